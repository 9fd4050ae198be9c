"""What the local engine promises, against transformers itself on tiny models with random weights.

The log-probabilities that it reports are those of a plain forward pass over the whole sequence, however the sequence
came about: alone, in a group, among strangers of other sizes, or as a later turn of a trace. A prefix is computed once.
What is sampled depends on the request and its seed alone.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.kv import KVPool, PrefixStore, common_prefix
from paravt.engines.local import LocalEngine
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.models import QwenVL
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, TextPart

torch.set_num_threads(1)

SHAPE = TinyShape(hidden=64, layers=2, heads=4, kv_heads=2, feed_forward=128, vision_hidden=32, frame_side=96)
T0 = Sampling(max_tokens=8)


def fresh_model(seed: int = 0) -> QwenVL:
    tokenizer = train_tokenizer([Prompts().system, "<1.0 seconds> 320 384 what is in this video"], ["what is in"])
    return QwenVL(build_model(tokenizer, SHAPE, seed), build_processor(tokenizer, SHAPE))


@pytest.fixture(scope="module")
def model() -> QwenVL:
    return fresh_model()


def frame(seed: int, height: int = 32, width: int = 32) -> Frame:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Frame(float(seed), pixels, f"{seed}/{height}x{width}")


def user(text: str, frames: Sequence[Frame] = (), role: str = "user") -> Message:
    parts = [part for f in frames for part in (TextPart(f"<{f.time:.1f} seconds>"), ImagePart(f))]
    return Message(role, (*parts, TextPart(text)))  # type: ignore[arg-type]


def prompt(model: QwenVL, text: str = "what is in this video?", frames: Sequence[Frame] = ()) -> Prompt:
    segment = model.chat.open([user(text, frames)])
    return Prompt(segment.ids, segment.images)


def reference(model: QwenVL, asked: Prompt, ids: Sequence[int], temperature: float = 0.0) -> torch.Tensor:
    """Log-probabilities (len(ids), vocabulary) at the positions that predict `ids`, by one plain forward pass."""
    whole = torch.tensor([[*asked.ids, *ids]])
    images = {}
    if asked.images:
        pixels, grid = model.pixel_inputs(asked.images)
        images = {"pixel_values": pixels, "image_grid_thw": grid}
    with torch.no_grad():
        types = (whole == model.chat.image_id).int()
        logits = model.module(input_ids=whole, mm_token_type_ids=types, use_cache=False, **images).logits[0].float()
    logits[:, model.banned_ids] = -torch.inf
    return torch.log_softmax(logits[len(asked.ids) - 1 : -1] / (temperature or 1.0), -1)


def check(model: QwenVL, asked: Prompt, completion: Completion, temperature: float = 0.0) -> None:
    expected = reference(model, asked, completion.ids, temperature)
    picked = expected[torch.arange(len(completion.ids)), list(completion.ids)]
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs, picked, atol=1e-4, rtol=0)
    assert completion.text == model.chat.tokenizer.decode(completion.ids, clean_up_tokenization_spaces=False)
    stopped = completion.ids[-1] in model.chat.stop_ids
    assert completion.stop_reason == ("stop" if stopped else "length")
    assert model.chat.stop_ids.isdisjoint(completion.ids[:-1])
    assert completion.usage.prompt_tokens == len(asked.ids)
    assert completion.usage.completion_tokens == len(completion.ids)
    if temperature == 0:
        assert completion.ids == tuple(expected.argmax(-1).tolist())


# ---------------------------------------------------------------------- the same numbers as a plain forward pass


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_logprobs_single_and_group(model: QwenVL, temperature: float) -> None:
    asked = prompt(model, frames=[frame(1), frame(2, 64, 32), frame(1)])
    async with LocalEngine(model) as engine:
        for n in (1, 4):
            done = await engine.generate(asked, Sampling(24, temperature, seed=3), n)
            assert len(done) == n
            for completion in done:
                check(model, asked, completion, temperature)


@pytest.mark.parametrize("limits", [{}, {"max_batch": 2}, {"prefill_tokens": 64}, {"prefix_cache_bytes": 0}])
async def test_logprobs_of_concurrent_strangers(model: QwenVL, limits: dict[str, int]) -> None:
    pictures = [[], [frame(1)], [frame(2, 64, 96), frame(3)], [frame(i, 32, 64) for i in range(9)], [frame(1)] * 4]
    asked = [prompt(model, "what " * i, frames) for i, frames in enumerate(pictures)]
    samplings = [Sampling(5 + 4 * i, 0.7 if i % 2 else 0.0, seed=i) for i in range(len(asked))]
    async with LocalEngine(model, **limits) as engine:
        done = await asyncio.gather(*(engine.generate(p, s, 2) for p, s in zip(asked, samplings, strict=True)))
    for p, s, completions in zip(asked, samplings, done, strict=True):
        for completion in completions:
            check(model, p, completion, s.temperature)


async def test_logprobs_where_groups_share_their_prompts_while_they_decode(
    model: QwenVL, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []
    find = LocalEngine._trunks

    def spy(self: LocalEngine, rows: list[Any], width: int) -> Any:
        trunks = find(self, rows, width)
        shared.append(len(trunks))
        return trunks

    monkeypatch.setattr(LocalEngine, "_trunks", spy)
    asked = [prompt(model, "what " * i, [frame(9 * i + j, 64, 64) for j in range(24)]) for i in range(3)]
    samplings = [Sampling(24, 0.7, seed=1), Sampling(12, 0.0), Sampling(17, 1.3, seed=2)]
    counts = [6, 1, 5]
    async with LocalEngine(model) as engine:
        jobs = [engine.generate(p, s, n) for p, s, n in zip(asked, samplings, counts, strict=True)]
        done = await asyncio.gather(*jobs)
    assert {2, 3} <= set(shared)
    for p, s, completions in zip(asked, samplings, done, strict=True):
        for completion in completions:
            check(model, p, completion, s.temperature)


async def test_logprobs_of_later_turns(model: QwenVL) -> None:
    asked = prompt(model, frames=[frame(1), frame(2)])
    new = len(asked.ids)
    async with LocalEngine(model) as engine:
        for turn in range(3):
            fed, images = engine.stats.fed_tokens, engine.stats.encoded_images
            (done,) = await engine.generate(asked, Sampling(10, 0.7, seed=turn))
            check(model, asked, done, 0.7)
            assert engine.stats.fed_tokens - fed == new - 1 + len(done.ids)
            assert engine.stats.encoded_images - images == 2
            assert done.usage.cached_tokens == len(asked.ids) - new
            frames = [frame(10 * turn + 5, 64, 64), frame(10 * turn + 6)]
            reply = model.chat.reply([user("report", frames, "tool")], done.stop_reason)
            asked = Prompt((*asked.ids, *done.ids, *reply.ids), (*asked.images, *reply.images))
            new = 1 + len(reply.ids)  # the last sampled token was not fed yet


async def test_greedy_tokens_are_those_of_transformers(model: QwenVL) -> None:
    asked = prompt(model, frames=[frame(i, 64, 64) for i in range(3)])
    pixels, grid = model.pixel_inputs(asked.images)
    ids = torch.tensor([asked.ids])
    expected = model.module.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels,
        image_grid_thw=grid,
        mm_token_type_ids=(ids == model.chat.image_id).int(),
        max_new_tokens=32,
        do_sample=False,
        suppress_tokens=model.banned_ids,
    )
    async with LocalEngine(model) as engine:
        (done,) = await engine.generate(asked, Sampling(32))
    assert list(done.ids) == expected[0, len(asked.ids) :].tolist()


async def test_bfloat16_runs_and_is_near() -> None:
    model = fresh_model()
    asked = prompt(model, frames=[frame(1), frame(2)])
    async with LocalEngine(model) as engine:
        (exact,) = await engine.generate(asked, Sampling(1))
    model.module.to(torch.bfloat16)
    async with LocalEngine(model) as engine:
        done = await engine.generate(asked, Sampling(6, 0.7), 3)
        (first,) = await engine.generate(asked, Sampling(1))
    assert all(len(completion.ids) <= 6 for completion in done)
    assert exact.logprobs is not None
    assert first.logprobs is not None
    assert first.logprobs[0] == pytest.approx(exact.logprobs[0], abs=0.1)


# ---------------------------------------------------------------------- sampling


async def test_seeds(model: QwenVL) -> None:
    asked = prompt(model, frames=[frame(1)])
    sampling = Sampling(12, 1.0, seed=5)
    async with LocalEngine(model) as engine:
        alone = await engine.generate(asked, sampling, 3)
        assert len({completion.ids for completion in alone}) == 3
        strangers = [engine.generate(prompt(model, "320 " * i), Sampling(20, 1.0, seed=i)) for i in range(4)]
        again, *_ = await asyncio.gather(engine.generate(asked, sampling, 3), *strangers)
        assert [c.ids for c in again] == [c.ids for c in alone]
        other = await engine.generate(asked, Sampling(12, 1.0, seed=6), 3)
        assert {c.ids for c in other}.isdisjoint(c.ids for c in alone)


async def test_samples_follow_the_distribution(model: QwenVL) -> None:
    asked = prompt(model)
    async with LocalEngine(model, max_batch=256) as engine:
        done = await engine.generate(asked, Sampling(1, 0.3), 1500)
    p = reference(model, asked, [0], 0.3).exp()[0]
    counts = torch.bincount(torch.tensor([c.ids[0] for c in done]), minlength=len(p))
    likely = p > 0.02
    assert likely.any()
    spread = (p * (1 - p) / len(done)).sqrt()
    assert ((counts / len(done) - p).abs() < 5 * spread)[likely].all()


async def test_vision_tokens_and_padding_rows_are_never_sampled() -> None:
    model = fresh_model()
    asked = prompt(model)
    with torch.no_grad():  # make the banned tokens the most likely ones by far
        hidden = model.module.model(input_ids=torch.tensor([asked.ids])).last_hidden_state[0, -1]
        model.module.lm_head.weight = torch.nn.Parameter(model.module.lm_head.weight.clone())
        model.module.lm_head.weight[model.banned_ids] = 100 * hidden / hidden.norm()
    assert set(model.chat.vision_ids) <= set(model.banned_ids)
    assert reference(model, asked, [0])[0, model.banned_ids].max() == -torch.inf
    async with LocalEngine(model) as engine:
        for temperature in (0.0, 1.0):
            for completion in await engine.generate(asked, Sampling(16, temperature), 4):
                assert set(model.banned_ids).isdisjoint(completion.ids)
                check(model, asked, completion, temperature)


# ---------------------------------------------------------------------- shared prefixes


async def test_a_group_prefills_once(model: QwenVL) -> None:
    asked = prompt(model, frames=[frame(i) for i in range(6)])
    for split in (False, True):  # one request with n = 8, and eight requests at once
        async with LocalEngine(model) as engine:
            if split:
                one = [engine.generate(asked, Sampling(5, 1.0, seed=i)) for i in range(8)]
                done = [completion for (completion,) in await asyncio.gather(*one)]
            else:
                done = await engine.generate(asked, Sampling(5, 1.0), 8)
            assert engine.stats.encoded_images == 6
            assert engine.stats.fed_tokens == len(asked.ids) - 1 + sum(len(completion.ids) for completion in done)
            assert sorted(c.usage.cached_tokens for c in done) == [0] + [len(asked.ids) - 1] * 7


async def test_the_same_ids_with_other_frames_share_nothing_of_them(model: QwenVL) -> None:
    first, second = (prompt(model, frames=[frame(seed) for seed in seeds]) for seeds in ((1, 2, 3), (1, 7, 3)))
    second = Prompt(first.ids, second.images)  # the timestamps differ, so take the ids from the first
    async with LocalEngine(model) as engine:
        await engine.generate(first, T0)
        (done,) = await engine.generate(second, T0)
    check(model, second, done)
    image = first.ids.index(model.chat.image_id)
    assert done.usage.cached_tokens == first.ids.index(model.chat.image_id, image + 1)


async def test_the_same_key_with_another_size_is_another_image(model: QwenVL) -> None:
    small = frame(1)
    large = Frame(1.0, frame(1, 64, 64).pixels, small.key)
    async with LocalEngine(model) as engine:
        for picture in (small, large, small):
            asked = prompt(model, frames=[picture])
            (done,) = await engine.generate(asked, T0)
            check(model, asked, done)


async def test_prompts_of_a_batch_that_share_a_beginning_compute_it_once(model: QwenVL) -> None:
    asked = [prompt(model, f"{i} what?", [frame(j) for j in range(8)]) for i in range(3)]
    shared = common_prefix(np.array(asked[0].ids), np.array(asked[1].ids))
    async with LocalEngine(model) as engine:
        done = await asyncio.gather(*(engine.generate(p, T0) for p in asked))
        assert engine.stats.encoded_images == 8
        assert sorted(d[0].usage.cached_tokens for d in done) == [0, shared, shared]
    for p, (completion,) in zip(asked, done, strict=True):
        check(model, p, completion)


async def test_the_store_is_bounded_and_forgets_the_oldest(model: QwenVL) -> None:
    asked = [prompt(model, f"{i} what?", [frame(i)]) for i in range(5)]
    token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head dimension, float32
    room = (len(asked[0].ids) + 8) * token * 5 // 2
    async with LocalEngine(model, prefix_cache_bytes=room) as engine:
        for p in asked:
            await engine.generate(p, T0)
            assert 0 < engine._store.bytes <= room
        assert len(engine._store.entries) == 2
        (newest,) = await engine.generate(asked[4], T0)
        (oldest,) = await engine.generate(asked[0], T0)
    assert newest.usage.cached_tokens == len(asked[4].ids) - 1
    assert oldest.usage.cached_tokens < asked[0].ids.index(model.chat.image_id)


def test_store_keeps_the_longer_of_two_and_the_recent() -> None:
    def kv(length: int) -> list[torch.Tensor]:
        return [torch.full((2, 1, length, 1), float(length))]

    store = PrefixStore(max_bytes=2 * 4 * 10)  # ten tokens
    store.add(np.arange(4), kv(4))
    store.add(np.arange(6), kv(6))  # continues the first
    store.add(np.arange(5), kv(5))  # known already
    assert [len(entry.key) for entry in store.entries] == [6]
    store.add(np.arange(100, 104), kv(4))
    kept, length = store.longest(np.arange(3))
    assert length == 3
    assert kept is not None
    store.touch(kept)
    store.add(np.arange(200, 204), kv(4))  # the one at 100 was used less recently
    assert [int(entry.key[0]) for entry in store.entries] == [0, 200]
    store.add(np.arange(300, 311), kv(11))  # can never fit
    assert store.bytes == 2 * 4 * 10
    assert store.longest(np.arange(300, 302)) == (None, 0)


def test_pool_grows_without_losing_contents() -> None:
    pool = KVPool(2, 2, 4, torch.float32, torch.device("cpu"))
    pool.reserve(1, 3)
    kv = [torch.randn(2, 2, 3, 4) for _ in range(2)]
    pool.write(0, kv, 3)
    pool.reserve(5, 2000)
    assert all(torch.equal(a, b) for a, b in zip(pool.read(0, 3), kv, strict=True))
    assert pool.layers[0].shape[1] >= 5
    assert pool.layers[0].shape[3] >= 2000
    pool.clear()
    assert pool.layers[0].numel() == 0
