"""Endless samples in a shuffled order that follows from a seed, with a cursor that can be saved."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paravt.engines.base import stable_seed
from paravt.types import Sample


@dataclass(frozen=True)
class Cursor:
    """How far a stream was read: whole passes over the samples, and samples of the current pass."""

    visit: int = 0
    index: int = 0


class SampleStream:
    """Goes through the samples again and again, each pass in an order of its own.

    `take` advances the cursor; setting `cursor` to a saved one continues from there. Each sample occurs once in a
    pass, so none is lost or used twice.
    """

    def __init__(self, samples: Sequence[Sample], seed: int, cursor: Cursor | None = None) -> None:
        if not samples:
            raise ValueError("no samples")
        self._samples, self._seed = samples, seed
        self.cursor = cursor or Cursor()
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[tuple[Sample, int]]:
        """The next samples, each with the number of the pass (its visit)."""
        out = []
        for _ in range(count):
            visit, index = self.cursor.visit, self.cursor.index
            out.append((self._samples[self._pass(visit)[index]], visit))
            last = index + 1 == len(self._samples)
            self.cursor = Cursor(visit + 1, 0) if last else Cursor(visit, index + 1)
        return out

    def _pass(self, visit: int) -> list[int]:
        if self._order[0] != visit:
            order = list(range(len(self._samples)))
            random.Random(stable_seed(self._seed, "order", visit)).shuffle(order)
            self._order = (visit, order)
        return self._order[1]
