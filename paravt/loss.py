"""The policy loss on scored tokens: typed in, typed out, no configuration look-ups and no model.

Left out on purpose: aggregation. `weights_N` carry all of it (token mean, sequence mean, the constant of Dr. GRPO, the
weight of sub-agents, global counts over ranks), so that the loss of a step is a plain sum over tokens, however they are
spread over microbatches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2
    """The ratio new/old is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low."""
    importance_cap: float | None = 2.0
    """C in min(old/sampler, C); infinity: not truncated; None: every weight is 1."""
    kl_coef: float = 0.0
    """beta, the weight of the KL to the reference."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or self.kl_coef < 0:
            raise ValueError("clip_low is in [0, 1], clip_high and kl_coef are not negative")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ValueError("importance_cap is positive, or None")


@dataclass(frozen=True)
class LossStats:
    """Sums over tokens of weight other than 0, detached; those of microbatches add up."""

    tokens: Tensor
    ratio: Tensor
    """new/old."""
    clipped_low: Tensor
    """Tokens with the ratio under its lower bound where that stops the gradient (advantage < 0)."""
    clipped_high: Tensor
    """The same above the upper bound (advantage > 0)."""
    kl_old: Tensor
    """k3 estimate of KL(old || new): how far the updates have moved the policy from the one that is clipped against."""
    kl_ref: Tensor
    """k3 estimate of KL(new || reference), as in the loss; 0 without a reference."""
    importance: Tensor
    """min(old/sampler, C)."""
    truncated: Tensor
    """Tokens at which the cap C held."""
    mismatch: Tensor
    """|old - sampler| of the log-probabilities."""
    mismatch_max: Tensor
    """Its maximum, which is not a sum."""

    def __add__(self, other: LossStats) -> LossStats:
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        return LossStats(**sums, mismatch_max=torch.maximum(self.mismatch_max, other.mismatch_max))

    def means(self) -> dict[str, float]:
        """Per token, by name; `tokens` stays a count."""
        sums = torch.stack([getattr(self, name) for name in SUMS]).tolist()
        means = {name: value / max(1.0, sums[0]) for name, value in zip(SUMS[1:], sums[1:], strict=True)}
        return {"tokens": sums[0], **means, "mismatch_max": self.mismatch_max.item()}


SUMS = (
    "tokens", "ratio", "clipped_low", "clipped_high", "kl_old", "kl_ref", "importance", "truncated", "mismatch",
)  # fmt: skip


@dataclass(frozen=True)
class LossOutput:
    loss: Tensor
    """Scalar; the sum of this call's tokens."""
    stats: LossStats


def policy_loss(
    new_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    config: LossConfig,
    ref_logprobs_N: Tensor | None = None,
) -> LossOutput:
    """Sum over tokens of weight * (-min(old/sampler, C) * min(r A, clip(r) A) + beta * k3), with r = new/old.

    The clipped surrogate is that of PPO (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, Yu et al. 2025,
    eq. 10) and advantages per token; the truncated importance weight, detached, is that of IMPALA (Espeholt et al.
    2018) as used for a sampler that is not the learner; k3 = exp(ref - new) - (ref - new) - 1 is Schulman's estimator
    of KL(new || ref) ("Approximating KL divergence", 2020), as in GRPO (Shao et al. 2024, eq. 4). Only
    `new_logprobs_N` gets a gradient. All log-probabilities are of the sampling distribution. Tokens of weight 0 take no
    part, whatever their other values are (0 times an infinite loss would be NaN).
    """
    counted_N = weights_N != 0
    new_logprobs_N, old_logprobs_N, sampler_logprobs_N, advantages_N = (
        torch.where(counted_N, values_N, 0.0)
        for values_N in (new_logprobs_N, old_logprobs_N, sampler_logprobs_N, advantages_N)
    )
    log_ratio_N = new_logprobs_N - old_logprobs_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)

    importance_N = (old_logprobs_N - sampler_logprobs_N).exp().detach()
    truncated_N = torch.zeros_like(importance_N, dtype=torch.bool)
    if config.importance_cap is None:
        importance_N = torch.ones_like(importance_N)
    else:
        truncated_N = importance_N > config.importance_cap
        importance_N = importance_N.clamp(max=config.importance_cap)
    token_loss_N = -importance_N * surrogate_N

    kl_ref_N = torch.zeros_like(ratio_N)
    if ref_logprobs_N is not None:
        log_ref_N = torch.where(counted_N, ref_logprobs_N, 0.0) - new_logprobs_N
        kl_ref_N = log_ref_N.exp() - log_ref_N - 1
        token_loss_N = token_loss_N + config.kl_coef * kl_ref_N
    elif config.kl_coef:
        raise ValueError("kl_coef is set, but there are no log-probabilities of a reference")

    with torch.no_grad():

        def total(values_N: Tensor) -> Tensor:
            return values_N[counted_N].double().sum()

        mismatch_N = (old_logprobs_N - sampler_logprobs_N).abs()[counted_N].double()
        stats = LossStats(
            tokens=total(counted_N),
            ratio=total(ratio_N),
            clipped_low=total((ratio_N < 1 - config.clip_low) & (advantages_N < 0)),
            clipped_high=total((ratio_N > 1 + config.clip_high) & (advantages_N > 0)),
            kl_old=total(ratio_N - log_ratio_N - 1),
            kl_ref=total(kl_ref_N),
            importance=total(importance_N),
            truncated=total(truncated_N),
            mismatch=mismatch_N.sum(),
            mismatch_max=mismatch_N.max() if len(mismatch_N) else mismatch_N.new_zeros(()),
        )
    return LossOutput((weights_N * token_loss_N).sum(), stats)
