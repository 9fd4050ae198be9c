"""The learner's step, against the plain way: every row alone through transformers' own model, its own positions, no
packing, no shared prompt, no chunks.

Log-probabilities and the gradient of every parameter (vision tower included) are the same: with several groups in one
batch, suffixes of any length, frames inside tool replies, rows alone, any token budget, with and without activation
checkpointing, with either attention kernel. Adapters and exports are what peft and transformers say they are.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl

import paravt.prefix_attention as prefix_attention
from paravt.engines.base import Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.learner import Learner, LearnerConfig, LoRA
from paravt.loss import LossConfig, policy_loss
from paravt.models import QwenVL, faster, load_model
from paravt.optim import OptimizerConfig, learning_rate
from paravt.packing import dummy_row, pack, plan, share
from paravt.prefix_attention import Block, Layout, dense_mask, packed_attention
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
    assert len(packed.ids_T) == sum(group.tokens for group in shared) == sum(packed.layout.pieces)


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


def test_a_step_trains_and_tells_what_it_did() -> None:
    model = fresh_model()
    rows = batch(model)
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, schedule="linear", total_steps=10, weight_decay=0.1)
    learner = Learner(model, configure(optimizer=optimizer, token_budget=250))
    old = learner.logprobs(rows)
    weights = weights_of(rows)
    weights[7] = np.zeros_like(weights[7])
    steps = [learner.step(rows, weights, old) for _ in range(3)]
    assert [m.step for m in steps] == [1, 2, 3]
    assert [m.learning_rate for m in steps] == [5e-4, 1e-3, 1e-3]
    assert steps[0].microbatches > 1
    assert steps[0].token_means["tokens"] == sum(w.astype(bool).sum() for w in weights)
    assert steps[0].token_means["ratio"] == pytest.approx(1, abs=1e-5)
    assert steps[2].loss < steps[1].loss < steps[0].loss
    usable = model.module.config.text_config.vocab_size - len(model.banned_ids)
    assert 0 < steps[0].entropy < math.log(usable)
    assert steps[0].grad_norm > 0
    mismatch = np.concatenate([(o - r.logprobs)[w != 0] for o, r, w in zip(old, rows, weights, strict=True)])
    assert steps[0].token_means["mismatch"] == pytest.approx(np.abs(mismatch).mean(), rel=1e-5)
    assert steps[0].token_means["mismatch_max"] == pytest.approx(np.abs(mismatch).max(), rel=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = fresh_model()
    rows = batch(model)
    before = copy.deepcopy(model.module.state_dict())
    weights = weights_of(rows)
    weights[0][-1] = np.inf
    with pytest.raises(FloatingPointError, match="step 1"):
        Learner(model, configure()).step(rows, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())


def test_the_engine_and_the_learner_mean_the_same_distribution() -> None:
    """Of one module, which they share: sampled first, then scored, then sampled again."""
    model = fresh_model()
    engine = LocalEngine(model)
    ids, images = text_of(model, "what is in this video?", frames_of("a", 3))
    prompt = Prompt(tuple(ids), images)
    learner = Learner(model, configure(activation_checkpointing=True))
    for _ in range(2):
        done = asyncio.run(engine.generate(prompt, Sampling(max_tokens=12, temperature=TEMPERATURE, seed=1), 4))
        rows = []
        for completion in done:
            one = row(model, (ids, images), [len(completion.ids)], 0)
            one.ids[one.mask], one.logprobs[one.mask] = completion.ids, completion.logprobs
            rows.append(one)
        for one, logprobs in zip(rows, learner.logprobs(rows), strict=True):
            np.testing.assert_allclose(logprobs, one.logprobs, rtol=0, atol=1e-5)
        learner.step(rows, [np.zeros(len(one.ids)) for one in rows])
    asyncio.run(engine.close())


def test_the_reference_stays_where_training_began() -> None:
    model = fresh_model()
    rows = batch(model)
    config = configure(loss=LossConfig(kl_coef=0.1), optimizer=OptimizerConfig(learning_rate=1e-2))
    learner = Learner(model, config)
    before = learner.logprobs(rows)
    learner.step(rows, weights_of(rows), before, learner.reference_logprobs(rows))
    for now, then in zip(learner.reference_logprobs(rows), before, strict=True):
        np.testing.assert_array_equal(now, then)
    after = learner.step(rows, weights_of(rows), before, before)
    assert after.token_means["kl_ref"] > 0
    with pytest.raises(ValueError, match="reference"):
        Learner(fresh_model(), configure()).reference_logprobs(rows)


def test_adapters_train_save_and_merge(tmp_path: Path) -> None:
    model = fresh_model()
    rows = batch(model)
    base = copy.deepcopy(model.module)
    lora = LoRA(rank=4, alpha=8)
    learner = Learner(model, configure(lora=lora, optimizer=OptimizerConfig(learning_rate=1e-2)))
    trained = [name for name, p in model.module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * SHAPE.layers
    assert all("language_model" in name and "lora_" in name for name in trained)
    before = learner.logprobs(rows)
    learner.step(rows, weights_of(rows))
    learner.step(rows, weights_of(rows))
    after = np.concatenate(learner.logprobs(rows))
    assert np.abs(after - np.concatenate(before)).max() > 1e-3
    np.testing.assert_array_equal(np.concatenate(learner.reference_logprobs(rows)), np.concatenate(before))

    learner.save_adapters(tmp_path / "adapter")
    loaded = QwenVL(
        PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True).base_model.model, model.processor
    )
    np.testing.assert_allclose(np.concatenate(Learner(loaded, configure()).logprobs(rows)), after, atol=1e-6)

    learner.merge_and_export(tmp_path / "merged")
    whole = load_model(tmp_path / "merged")
    assert whole.module.state_dict().keys() == fresh_model().module.state_dict().keys()
    np.testing.assert_allclose(np.concatenate(Learner(whole, configure()).logprobs(rows)), after, atol=1e-4)
    np.testing.assert_array_equal(np.concatenate(learner.logprobs(rows)), after)

    with pytest.raises(ValueError, match="no linear layers"):
        Learner(fresh_model(), configure(lora=LoRA(targets=("q_projection",))))


def test_a_full_export_loads_and_what_else_runs_the_module_is_not_disturbed(tmp_path: Path) -> None:
    model = fresh_model()
    rows = batch(model)
    plain = [naive_logprobs(model.module, model, one) for one in rows if one.mask.any()]
    learner = Learner(model, configure(optimizer=OptimizerConfig(learning_rate=0.0)))
    for one, expected in zip([one for one in rows if one.mask.any()], plain, strict=True):
        assert torch.equal(naive_logprobs(model.module, model, one), expected), "ordinary attention as before"
    learner.step(rows, weights_of(rows))
    learner.merge_and_export(tmp_path / "out", torch.bfloat16)
    loaded = load_model(tmp_path / "out")
    assert loaded.module.dtype == torch.bfloat16
    assert loaded.module.config.text_config._attn_implementation == "sdpa"


def test_the_dummy_row_fits_the_processor() -> None:
    model = fresh_model()
    dummy = dummy_row(model)
    assert len(dummy.images) == 1
    assert np.isfinite(Learner(model, configure()).logprobs([dummy])[0]).all()


def test_the_schedules() -> None:
    cosine = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="cosine", total_steps=11, final_lr_ratio=0.1)
    rates = [learning_rate(cosine, step) for step in (0, 1, 2, 6, 10, 50)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    with pytest.raises(ValueError, match="total_steps"):
        OptimizerConfig(schedule="linear")


# ---------------------------------------------------------------------- the attention by itself

LAYOUT = Layout((Block(9, (4, 7, 1)), Block(5), Block(3, (6, 6))))


def reference_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * 0.3).masked_fill(~dense_mask(layout, q.device), -torch.inf)
    return scores.softmax(-1) @ v


def test_the_mask_by_hand() -> None:
    mask = dense_mask(Layout((Block(2, (1, 2)), Block(1))), torch.device("cpu"))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("kernel", ["cpu", "varlen"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_attention_and_its_gradient(
    kernel: Any, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "varlen" with stand-ins for the two CUDA operators, after their contract: what is tested is our bookkeeping."""
    if kernel == "varlen":
        monkeypatch.setattr(prefix_attention.torch.ops.aten, "_flash_attention_forward", varlen_forward, raising=False)
        monkeypatch.setattr(
            prefix_attention.torch.ops.aten, "_flash_attention_backward", varlen_backward, raising=False
        )
    noise = torch.Generator().manual_seed(0)
    tokens = sum(LAYOUT.pieces)
    shapes = [(1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8), (1, 4, tokens, 8)]
    q, k, v, upstream = (torch.randn(s, generator=noise, dtype=torch.float64).to(dtype) for s in shapes)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    packed_attention(*inputs, LAYOUT, 0.3, kernel).backward(upstream)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference_attention(*exact, LAYOUT)
    expected.backward(upstream.double())
    out = packed_attention(q, k, v, LAYOUT, 0.3, kernel)
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)
    for got, wanted in zip(inputs, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, atol=bound, rtol=bound)


def _sequences(cum_q: Tensor, cum_k: Tensor) -> list[tuple[slice, slice]]:
    bounds = zip(*(zip(c.tolist(), c.tolist()[1:], strict=False) for c in (cum_q, cum_k)), strict=True)
    return [(slice(*a), slice(*b)) for a, b in bounds]


def varlen_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert q.is_contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    for a, b in _sequences(cum_q, cum_k):
        assert a.stop - a.start <= max_q
        assert b.stop - b.start <= max_k
        args = (x.transpose(0, 1)[None] for x in (q[a], k[b], v[b]))
        piece, piece_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, 0.0, causal, scale=scale)
        out[a], lse[:, a] = piece[0].transpose(0, 1), piece_lse[0]
    return out, lse, None, None, None


def varlen_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale):  # type: ignore[no-untyped-def]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for a, b in _sequences(cum_q, cum_k):
        first = (x.transpose(0, 1)[None] for x in (g[a], q[a], k[b], v[b], out[a]))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *first, lse[None, :, a], 0.0, causal, scale=scale
        )
        for whole, where, part in zip(grads, (a, b, b), parts, strict=True):
            whole[where] = part[0].transpose(0, 1)
    return grads
