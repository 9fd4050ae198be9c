"""The policy loss on numbers worked out by hand, and against TRL's own GRPO loss where the settings coincide."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from paravt.loss import LossConfig, LossOutput, policy_loss

ZERO = torch.zeros(1)


def of_ratio(ratio: float, advantage: float, config: LossConfig, sampler: float = 0.0) -> tuple[float, float]:
    """`(loss, its derivative by the new log-probability)` of one token of old log-probability 0 and weight 1."""
    new = tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss = policy_loss(new, zero, zero + sampler, zero + advantage, zero + 1, config).loss
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "derivative"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),
        (1.5, 2.0, -2.6, 0.0),  # above 1.3: clipped, no gradient
        (0.5, 2.0, -1.0, -1.0),  # below, but the advantage is positive: the way back stays open
        (0.5, -2.0, 1.8, 0.0),  # below 0.9: clipped
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_the_bounds_are_separate(ratio: float, advantage: float, loss: float, derivative: float) -> None:
    found = of_ratio(ratio, advantage, LossConfig(clip_low=0.1, clip_high=0.3))
    assert found == pytest.approx((loss, derivative))


@pytest.mark.parametrize(("cap", "weight"), [(2.0, 1.5), (1.2, 1.2), (math.inf, 1.5), (None, 1.0)])
def test_the_importance_weight_is_truncated_and_has_no_gradient(cap: float | None, weight: float) -> None:
    found = of_ratio(1.1, 2.0, LossConfig(importance_cap=cap), sampler=-math.log(1.5))
    assert found == pytest.approx((-2.2 * weight, -2.2 * weight))


def test_k3() -> None:
    new = tensor([math.log(0.5)], requires_grad=True)
    config = LossConfig(kl_coef=0.1)
    output = policy_loss(new, new.detach(), new.detach(), ZERO, ZERO + 1, config, tensor([math.log(0.25)]))
    k3 = 0.5 - math.log(0.5) - 1
    assert output.loss.item() == pytest.approx(0.1 * k3)
    output.loss.backward()
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(0.1 * (1 - 0.5))
    assert output.stats.means()["kl_ref"] == pytest.approx(k3)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(new, new, new, ZERO, ZERO, config)


def test_stats_add_up_and_leave_out_what_has_no_weight() -> None:
    new = tensor([0.0, math.log(1.5), math.log(0.5), math.log(0.5), 5.0])
    old = torch.zeros(5)
    sampler = tensor([0.0, -1.0, 0.25, 0.0, 9.0])
    advantages = tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    weights = tensor([1.0, 0.5, 2.0, 0.1, 0.0])
    config = LossConfig(importance_cap=2.0)
    whole = policy_loss(new, old, sampler, advantages, weights, config)
    means = whole.stats.means()
    assert means == pytest.approx(
        {
            "tokens": 4,
            "ratio": (1 + 1.5 + 0.5 + 0.5) / 4,
            "clipped_low": 0.25,
            "clipped_high": 0.25,
            "kl_old": (0.5 - math.log(1.5) + 2 * (-0.5 - math.log(0.5))) / 4,
            "kl_ref": 0,
            "importance": (1 + 2 + math.exp(-0.25) + 1) / 4,
            "truncated": 0.25,
            "mismatch": 1.25 / 4,
            "mismatch_max": 1.0,
        },
        rel=1e-6,
    )
    streams = (new, old, sampler, advantages, weights)
    parts = [policy_loss(*(stream[at] for stream in streams), config) for at in (slice(0, 2), slice(2, 5))]
    assert (parts[0].stats + parts[1].stats).means() == pytest.approx(means)
    assert (parts[0].loss + parts[1].loss).item() == pytest.approx(whole.loss.item())
    nothing = policy_loss(*(stream[:0] for stream in streams), config)
    assert nothing.stats.means()["mismatch_max"] == 0


@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan])
def test_tokens_without_weight_take_no_part_whatever_they_are(odd: float) -> None:
    new = tensor([math.log(1.25), odd], dtype=torch.float64, requires_grad=True)
    zero, other = torch.zeros(2, dtype=torch.float64), tensor([0.0, odd], dtype=torch.float64)
    config = LossConfig(kl_coef=0.1)
    loss = policy_loss(new, other, other, tensor([2.0, odd]).double(), tensor([1.0, 0.0]).double(), config, other).loss
    loss.backward()
    assert new.grad is not None
    assert new.grad[1] == 0
    alone = policy_loss(new[:1].detach(), zero[:1], zero[:1], zero[:1] + 2, zero[:1] + 1, config, zero[:1]).loss
    assert loss.item() == pytest.approx(alone.item())


def test_impossible_settings_are_refused() -> None:
    for wrong in ({"clip_low": 1.5}, {"clip_high": -0.1}, {"importance_cap": 0.0}, {"kl_coef": -1.0}):
        with pytest.raises(ValueError, match="is"):
            LossConfig(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- against TRL

B, T = 5, 7


@pytest.fixture(scope="module")
def streams() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(*shape, generator=noise, dtype=torch.float64)

    new = normal(B, T, mean=-2.0, scale=0.5)
    lengths = tensor([7, 3, 1, 5, 6])
    return {
        "new": new,
        "old": new + normal(B, T, scale=0.3),
        "sampler": new + normal(B, T, scale=0.8),
        "reference": new + normal(B, T, scale=0.5),
        "advantages": normal(B),
        "mask": (torch.arange(T) < lengths[:, None]).long(),
    }


def trl_loss(streams: dict[str, Tensor], loss_type: str, config: LossConfig) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """`GRPOTrainer._compute_loss` itself, on a trainer without a model; `(loss, gradient, TRL's metrics)`."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    new = streams["new"].clone().requires_grad_()
    trainer = object.__new__(grpo.GRPOTrainer)
    vars(trainer).update(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
        ),
        loss_type=loss_type,
        beta=config.kl_coef,
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=config.importance_cap is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=T,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    ratio = (streams["old"] - streams["sampler"]).exp()
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": streams["mask"],
            "advantages": streams["advantages"],
            "old_per_token_logps": streams["old"],
            "ref_per_token_logps": streams["reference"],
            "importance_sampling_ratio": ratio.clamp(max=config.importance_cap or 1.0),
            "num_items_in_batch": streams["mask"].sum(),
        },
    )
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, trainer._metrics["train"]


def our_loss(streams: dict[str, Tensor], weights: Tensor, config: LossConfig) -> tuple[LossOutput, Tensor]:
    scored = streams["mask"].bool()
    new = streams["new"].clone().requires_grad_()
    advantages = streams["advantages"][:, None].expand(B, T)
    output = policy_loss(
        new[scored], streams["old"][scored], streams["sampler"][scored], advantages[scored], weights[scored], config,
        streams["reference"][scored] if config.kl_coef else None,
    )  # fmt: skip
    output.loss.backward()
    assert new.grad is not None
    return output, new.grad


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(
    "config",
    [
        LossConfig(clip_low=0.2, clip_high=0.2, importance_cap=None),
        LossConfig(clip_low=0.1, clip_high=0.28, importance_cap=2.0, kl_coef=0.04),
    ],
)
def test_as_trl(streams: dict[str, Tensor], loss_type: str, config: LossConfig) -> None:
    mask = streams["mask"].double()
    weights = {
        "grpo": mask / mask.sum(1, keepdim=True) / B,  # the mean of rows' means: seq_mean
        "bnpo": mask / mask.sum(),  # the mean over tokens: token_mean
        "dapo": mask / mask.sum(),
        "dr_grpo": mask / (B * T),  # over a constant
    }[loss_type]
    theirs, their_gradient, metrics = trl_loss(streams, loss_type, config)
    ours, our_gradient = our_loss(streams, weights, config)
    torch.testing.assert_close(ours.loss.detach(), theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-14)
    means = ours.stats.means()
    assert means["clipped_low"] == pytest.approx(metrics["clip_ratio/low_mean"][0])
    assert means["clipped_high"] == pytest.approx(metrics["clip_ratio/high_mean"][0])
    assert means["clipped_low"] > 0
    assert means["clipped_high"] > 0
    if config.kl_coef:
        assert means["kl_ref"] == pytest.approx(metrics["kl"][0])
