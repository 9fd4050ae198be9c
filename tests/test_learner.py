"""The learner's step, against the plain way: every row alone through transformers' own model, its own positions, no
packing, no shared prompt, no chunks.

Log-probabilities and the gradient of every parameter (vision tower included) are the same: with several groups in one
batch, suffixes of any length, frames inside tool replies, rows alone, any token budget, with and without activation
checkpointing, with either attention kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl

from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.learner import Learner, LearnerConfig
from paravt.loss import LossConfig, policy_loss
from paravt.models import QwenVL, faster
from paravt.packing import pack, plan, share
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, Row, TextPart

torch.set_num_threads(1)

SHAPE = TinyShape(hidden=48, layers=2, heads=4, kv_heads=2, feed_forward=64, vision_hidden=32, frame_side=64)
TEMPERATURE = 0.7


def fresh_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> QwenVL:
    tokenizer = train_tokenizer([Prompts().system, "<1.0 seconds> what is in this video"], ["what is in"])
    return QwenVL(build_model(tokenizer, SHAPE, seed).to(dtype), build_processor(tokenizer, SHAPE))


def frames_of(name: str, number: int, side: int = 32) -> tuple[Frame, ...]:
    noise = np.random.default_rng(sum(map(ord, name)))
    return tuple(
        Frame(float(i), noise.integers(0, 256, (side, side, 3), dtype=np.uint8), f"{name}/{i}/{side}")
        for i in range(number)
    )


def text_of(model: QwenVL, text: str, frames: Sequence[Frame] = ()) -> tuple[list[int], tuple[Frame, ...]]:
    parts = [part for f in frames for part in (TextPart(f"<{f.time:.1f} seconds>"), ImagePart(f))]
    segment = model.chat.open([Message("user", (*parts, TextPart(text)))])
    return list(segment.ids), segment.images


def row(
    model: QwenVL,
    prompt: tuple[list[int], tuple[Frame, ...]],
    pieces: Sequence[int | tuple],
    seed: int,
    group: str = "g",
) -> Row:
    """`pieces`: numbers of sampled tokens, and things that are not sampled, as `text_of` gives them."""
    noise = np.random.default_rng(seed)
    usable = np.setdiff1d(np.arange(model.module.config.text_config.vocab_size), model.banned_ids)
    ids, images = list(prompt[0]), list(prompt[1])
    mask = [False] * len(ids)
    for piece in pieces:
        new = noise.choice(usable, piece).tolist() if isinstance(piece, int) else piece[0]
        images += () if isinstance(piece, int) else piece[1]
        ids += new
        mask += [isinstance(piece, int)] * len(new)
    sampled = np.array(mask)
    return Row(
        ids=np.array(ids),
        mask=sampled,
        logprobs=np.where(sampled, noise.normal(-4, 0.5, len(ids)), 0.0),
        advantages=np.where(sampled, noise.normal(0, 1, len(ids)), 0.0),
        images=tuple(images),
        group_id=group,
        episode_id=f"{group}/{seed}",
        role="main",
        policy_version=0,
    )


def batch(model: QwenVL) -> list[Row]:
    """Two groups, ragged, with frames of two sizes in tool replies; a row alone; a text row; one nothing was sampled
    of; and one of a single sampled token, whose suffix is empty."""
    first = text_of(model, "what is in this video?", frames_of("a", 3))
    second = text_of(model, "what is in it?", (*frames_of("b", 1, 64), *frames_of("b", 2)))
    alone = text_of(model, "crop_video", frames_of("c", 2))
    reply = text_of(model, "reply", frames_of("d", 2))
    large = text_of(model, "another", frames_of("e", 1, 64))
    return [
        row(model, first, [7], 1),
        row(model, second, [3, reply, 5], 2, "h"),
        row(model, first, [2, reply, 4, large, 3], 3),
        row(model, first, [1], 4),
        row(model, alone, [6, large, 2], 5, "alone"),
        row(model, second, [9, text_of(model, "none")], 6, "h"),
        row(model, first, [], 7),
        row(model, text_of(model, "text only"), [4], 8, "text"),
        row(model, first, [13], 9),
    ]


def weights_of(rows: Sequence[Row]) -> list[np.ndarray]:
    total = sum(r.mask.sum() for r in rows)
    return [np.where(r.mask, (1 + i % 3) / total, 0.0) for i, r in enumerate(rows)]


def test_a_row_can_be_scored_at_another_temperature() -> None:
    model = fresh_model()
    rows = batch(model)[:3]
    warm, plain = (Learner(model, LearnerConfig(temperature=t)) for t in (TEMPERATURE, 1.0))
    for asked, wanted in zip(warm.logprobs(rows, temperature=1.0), plain.logprobs(rows), strict=True):
        assert np.array_equal(asked, wanted)
    assert not np.array_equal(warm.logprobs(rows)[0], plain.logprobs(rows)[0])


def naive_logprobs(module: Any, model: QwenVL, one: Row) -> Tensor:
    ids = torch.from_numpy(one.ids)[None]
    images = {}
    if one.images:
        pixels, grid = model.pixel_inputs(one.images)
        images = {"pixel_values": pixels.to(module.dtype), "image_grid_thw": grid}
    logits = module(
        input_ids=ids, mm_token_type_ids=(ids == model.chat.image_id).int(), use_cache=False, **images
    ).logits[0, :-1]
    logits = logits.double() if module.dtype == torch.float64 else logits.float()
    logits[:, model.banned_ids] = -torch.inf
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[torch.from_numpy(one.mask)[1:]]


def naive_gradients(
    model: QwenVL, rows: Sequence[Row], config: LossConfig, old: Sequence[np.ndarray] | None = None
) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    module = copy.deepcopy(model.module).train()
    module.config.text_config._attn_implementation = "sdpa"
    out = []
    for i, (one, weights) in enumerate(zip(rows, weights_of(rows), strict=True)):
        if one.mask.any():
            logprobs = naive_logprobs(module, model, one)
            of = {"dtype": logprobs.dtype}
            before = logprobs.detach() if old is None else torch.tensor(old[i][one.mask], **of)
            policy_loss(
                logprobs, before, torch.tensor(one.logprobs[one.mask], **of),
                torch.tensor(one.advantages[one.mask], **of), torch.tensor(weights[one.mask], **of), config,
            ).loss.backward()  # fmt: skip
            out.append(logprobs.detach().double().numpy())
    return out, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def configure(**changes: Any) -> LearnerConfig:
    """SGD-like bookkeeping: gradients are looked at before the optimizer sees them."""
    return replace(LearnerConfig(loss=LossConfig(importance_cap=2.0), temperature=TEMPERATURE), **changes)


def gradients(learner: Learner, monkeypatch: pytest.MonkeyPatch, *args: Any) -> dict[str, Tensor]:
    """Of one step, before they are clipped. The weights stay as they are."""
    seen: dict[str, Tensor] = {}

    def keep(rate: float) -> float:
        seen.update({n: p.grad.clone() for n, p in learner.model.module.named_parameters() if p.grad is not None})
        learner.optimizer.zero_grad()
        return 0.0

    monkeypatch.setattr(learner, "_update", keep)
    learner.step(*args)
    return seen


@pytest.fixture
def double_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two places of the model calculate in float32 whatever its dtype; not here, so that float64 can be exact."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return tuple((x * cos + modeling_qwen3_vl.rotate_half(x) * sin).to(x.dtype) for x in (q, k))  # type: ignore[return-value]

    def normalise(self: Any, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled

    for place in (modeling_qwen3_vl, faster):
        monkeypatch.setattr(place, "apply_rotary_pos_emb_vision", rotate)
    monkeypatch.setattr(modeling_qwen3_vl.Qwen3VLTextRMSNorm, "forward", normalise)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    """By parameter, relative to its own gradient and, where that cancels to nothing, to the whole one."""
    assert found.keys() == expected.keys()
    assert any("visual.patch_embed" in name for name in found)
    whole = torch.cat([g.flatten() for g in expected.values()]).double().norm()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient.double()).norm()
        assert error <= bound * (gradient.double().norm() + 1e-3 * whole), name


def check_as_every_row_alone(
    model: QwenVL, config: LearnerConfig, monkeypatch: pytest.MonkeyPatch, bounds: Any
) -> None:
    rows = batch(model)
    expected, expected_gradients = naive_gradients(model, rows, config.loss)
    learner = Learner(model, config)
    logprobs = learner.logprobs(rows)
    assert all((got[~one.mask] == 0).all() for got, one in zip(logprobs, rows, strict=True))
    scored = np.concatenate([got[one.mask] for got, one in zip(logprobs, rows, strict=True)])
    np.testing.assert_allclose(scored, np.concatenate(expected), rtol=0, atol=bounds[0])
    compare(gradients(learner, monkeypatch, rows, weights_of(rows)), expected_gradients, bounds[1])


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize("budget", [100_000, 250, 1])
def test_as_every_row_alone(kernel: Any, budget: int, monkeypatch: pytest.MonkeyPatch, double_throughout: None) -> None:
    config = configure(kernel=kernel, token_budget=budget)
    check_as_every_row_alone(fresh_model(torch.float64), config, monkeypatch, (1e-12, 1e-12))


def test_as_every_row_alone_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    check_as_every_row_alone(fresh_model(), configure(), monkeypatch, (1e-5, 1e-4))


def test_old_logprobs_clip_the_update(monkeypatch: pytest.MonkeyPatch, double_throughout: None) -> None:
    model = fresh_model(torch.float64)
    rows = batch(model)
    noise = np.random.default_rng(0)
    learner = Learner(model, configure())
    old = [now + 0.3 * noise.normal(size=len(now)) for now in learner.logprobs(rows)]
    _, expected = naive_gradients(model, rows, learner.config.loss, old)
    compare(gradients(learner, monkeypatch, rows, weights_of(rows), old), expected, 1e-12)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_activation_checkpointing_changes_nothing_and_the_model_never_gets_a_cache(
    chunk: int, monkeypatch: pytest.MonkeyPatch, double_throughout: None
) -> None:
    """With a cache under checkpointing, transformers drops it and suffixes would be trained without their prompt."""
    model = fresh_model(torch.float64)
    rows = batch(model)
    _, expected = naive_gradients(model, rows, LossConfig())
    learner = Learner(model, configure(activation_checkpointing=True, logits_chunk=chunk))
    calls: list[dict[str, Any]] = []
    layer_calls: list[int] = []
    text = model.module.model.language_model
    text.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    text.layers[0].self_attn.register_forward_pre_hook(lambda *_: layer_calls.append(1))
    compare(gradients(learner, monkeypatch, rows, weights_of(rows)), expected, 1e-12)
    assert len(calls) == 1
    assert len(layer_calls) == 2, "the layer ran again in backward"
    assert calls[0]["use_cache"] is False
    assert calls[0].get("cache") is None
    assert calls[0]["position_ids"] is not None


def test_bfloat16_stays_near(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model(torch.bfloat16)
    rows = batch(model)
    exact = fresh_model(torch.float32)
    exact.module.load_state_dict(model.module.state_dict())
    expected, expected_gradients = naive_gradients(exact, rows, LossConfig())
    learner = Learner(model, configure())
    scored = [got[one.mask] for got, one in zip(learner.logprobs(rows), rows, strict=True) if one.mask.any()]
    np.testing.assert_allclose(np.concatenate(scored), np.concatenate(expected), rtol=0, atol=0.15)
    found = torch.cat([g.flatten().float() for g in gradients(learner, monkeypatch, rows, weights_of(rows)).values()])
    wanted = torch.cat([g.flatten() for g in expected_gradients.values()])
    assert torch.nn.functional.cosine_similarity(found, wanted, 0) > 0.99


def test_prompts_are_shared_by_what_they_show() -> None:
    model = fresh_model()
    rows = batch(model)
    shared = share(model.chat, rows)
    assert sorted(group.rows for group in shared) == [(0, 2, 3, 8), (1, 5), (4,), (7,)]
    other = text_of(model, "what is in this video?", frames_of("z", 3))
    strange = row(model, other, [3], 10)
    assert list(strange.ids[: len(other[0])]) == list(rows[0].ids[: len(other[0])])
    assert len(share(model.chat, [rows[0], strange])) == 2, "the same ids, but other pictures"
    assert len(share(model.chat, rows, share_prompts=False)) == 8
    packed = pack(model, rows, shared)
    fed = {frame.key for frame in packed.frames}
    assert fed == {frame.key for one in rows for frame in one.images}
    assert len(packed.frames) == 3 + 2 + 1 + 3 + 2 + 2 + 1, "a prompt's frames once, a reply's with its row"
    assert packed.ids_BT.numel() == sum(group.tokens for group in shared) == sum(packed.layout.pieces)


def test_microbatches_keep_to_the_budget() -> None:
    model = fresh_model()
    rows = batch(model)
    shared = share(model.chat, rows)
    for budget in (60, 150, 250, 10_000):
        batches = plan(shared, budget)
        done = sorted(index for groups in batches for group in groups for index in group.rows)
        assert done == [0, 1, 2, 3, 4, 5, 7, 8]
        for groups in batches:
            assert sum(g.tokens for g in groups) <= budget or (len(groups) == 1 and len(groups[0].rows) == 1)
    assert len(plan(shared, 10_000)) == 1


def test_a_row_that_cannot_be_right_is_refused() -> None:
    model = fresh_model()
    prompt = text_of(model, "what")
    bad = row(model, prompt, [3], 1)
    bad.ids[-1] = model.chat.image_id
    with pytest.raises(ValueError, match="never sampled"):
        Learner(model, configure()).logprobs([replace(bad, images=frames_of("a", 1))])
    with pytest.raises(ValueError, match="nothing comes before"):
        share(model.chat, [replace(bad, mask=np.ones_like(bad.mask))])
    with pytest.raises(ValueError, match="do not match"):
        share(model.chat, [replace(row(model, text_of(model, "x", frames_of("a", 2)), [2], 1), images=())])
    with pytest.raises(ValueError, match="no row has a scored token"):
        Learner(model, configure()).logprobs([row(model, prompt, [], 1)])
