"""A step of the learner as a whole: what it trains and tells, the reference, the schedule. Adapters and exports are
what peft and transformers say they are."""

from __future__ import annotations

import asyncio
import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from test_learner import (
    SHAPE,
    TEMPERATURE,
    batch,
    configure,
    frames_of,
    fresh_model,
    naive_logprobs,
    row,
    text_of,
    weights_of,
)

from paravt.engines.base import Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.errors import RecipeError
from paravt.learner import Learner, LoRA
from paravt.loss import LossConfig
from paravt.models import QwenVL, load_model
from paravt.optim import OptimizerConfig, learning_rate
from paravt.packing import dummy_row


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

    with pytest.raises(RecipeError, match="no linear layers"):
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
