"""How certain a mean over questions is, and whether two systems differ on the same questions.

Questions about one video are not independent of each other, so whole videos are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """Of 95 %."""

    low: float
    high: float


def bootstrap(values: Sequence[float], videos: Sequence[Hashable]) -> Interval | None:
    """The percentile interval of the mean of `values`, whole videos drawn with replacement (source: the cluster
    bootstrap of Efron and Tibshirani). The same numbers for the same input. None without values, for one video, which
    says nothing about others, and where all values are the same: drawing them again says nothing."""
    if len(set(videos)) < 2 or len(set(values)) < 2:
        return None
    places = {video: place for place, video in enumerate(dict.fromkeys(videos))}
    cluster = np.array([places[video] for video in videos])
    sums = np.bincount(cluster, np.asarray(values, float))
    sizes = np.bincount(cluster).astype(float)
    random = np.random.default_rng(_SEED)
    draws = (random.integers(len(places), size=len(places)) for _ in range(RESAMPLES))
    means = [sums[drawn].sum() / sizes[drawn].sum() for drawn in draws]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(low), float(high))


def share_interval(shares: Sequence[float], videos: Sequence[Hashable]) -> Interval | None:
    """The interval of a mean of shares, 0 to 1. Where all are 0, or all are 1, drawing again says nothing: then the
    exact bound for so many videos (source: Clopper and Pearson)."""
    end = 0.025 ** (1 / len(set(videos))) if shares else 0.0
    if shares and all(share == 1 for share in shares):
        return Interval(end, 1.0)
    if shares and all(share == 0 for share in shares):
        return Interval(0.0, 1 - end)
    return bootstrap(shares, videos)


def mcnemar(only_one: int, only_other: int) -> float:
    """The exact two-sided p value of McNemar's test: of the questions that exactly one of two systems gets right, how
    unlikely is a split at least as uneven if both are equally good? 1.0 where they never differ."""
    n = only_one + only_other
    if n == 0:
        return 1.0
    fewer = min(only_one, only_other)
    # in logarithms: 0.5 ** n is nothing from n = 1075 on
    terms = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(fewer + 1)]
    largest = max(terms)
    tail = math.exp(largest - n * math.log(2)) * sum(math.exp(term - largest) for term in terms)
    return min(1.0, 2 * tail)
