"""The optimizer of the learner: AdamW with a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    """The peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: int = 0
    """Linear, from 0."""
    total_steps: int | None = None
    """The step count at which the decay has reached `final_lr_ratio`; needed unless the schedule is constant."""
    final_lr_ratio: float = 0.0
    """Of the learning rate at the end of the decay to the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of matrices; norms and biases are not decayed."""
    clip_grad_norm: float = 1.0
    """Bound on the norm of the whole gradient, over all ranks."""

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"a {self.schedule} schedule needs total_steps")
        above_zero = {"eps": self.eps, "clip_grad_norm": self.clip_grad_norm, "total_steps": self.total_steps}
        for name, value in above_zero.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value:g}")
        not_below = {"learning_rate": self.learning_rate, "warmup_steps": self.warmup_steps,
                     "weight_decay": self.weight_decay}  # fmt: skip
        for name, value in not_below.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value:g}")
        if not 0 <= self.final_lr_ratio <= 1 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("final_lr_ratio is between 0 and 1, and both betas are at least 0 and below 1")


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Of step 0, 1, ...: linear warm-up, then the peak, or a decay from it to `final_lr_ratio` at the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - 1 - config.warmup_steps))
    share = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * share)


def make_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, eps=config.eps
    )
