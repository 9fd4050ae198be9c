"""Means over seeds with their intervals, and what can be said when two are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
"""The 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the last one is a little wide."""

ONE_SEED_MARGIN = 0.1
"""What one seed has to differ by to count as a difference at all: it has no interval of its own."""


@dataclass(frozen=True)
class Estimate:
    """The mean over seeds, with the 95 % interval of Student's t; one seed has none."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / self.n

    @property
    def half(self) -> float | None:
        """Half the width of the interval: t * s / sqrt(n)."""
        if self.n < 2:
            return None
        variance = sum((value - self.mean) ** 2 for value in self.values) / (self.n - 1)
        return _T[min(self.n - 1, len(_T)) - 1] * math.sqrt(variance / self.n)

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    @property
    def reach(self) -> float:
        """How far from the mean is still the same: the interval's half, or the margin of one seed."""
        return ONE_SEED_MARGIN / 2 if self.half is None else self.half


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Of the seeds that have a value; None if none has."""
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return Estimate(known) if known else None


def compare(one: Estimate, other: Estimate) -> Literal["above", "below", "unclear"]:
    """Is one above the other: their intervals (for one seed, margins) do not overlap."""
    if one.mean - one.reach > other.mean + other.reach:
        return "above"
    return "below" if one.mean + one.reach < other.mean - other.reach else "unclear"
