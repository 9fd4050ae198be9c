"""Endless samples in a shuffled order that follows from a seed, with a cursor that can be saved."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paravt.engines.base import stable_seed
from paravt.types import Sample


@dataclass(frozen=True)
class Cursor:
    """How far a stream was read: whole passes over the samples, and samples of the current pass.

    `put_back` are places (pass, sample of the pass) that were read and come once more, before all others.
    """

    visit: int = 0
    index: int = 0
    put_back: tuple[tuple[int, int], ...] = ()

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Cursor:
        """From the fields of one, as JSON gives them back."""
        return cls(saved["visit"], saved["index"], tuple((visit, index) for visit, index in saved["put_back"]))


@dataclass(frozen=True)
class Draw:
    """A sample, with its place in the stream."""

    sample: Sample
    visit: int
    """The number of the pass."""
    index: int
    """Within the pass."""


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

    def take(self, count: int) -> list[Draw]:
        """The next samples."""
        return [self._next() for _ in range(count)]

    def cursor_without(self, draws: Sequence[Draw]) -> Cursor:
        """The cursor of a stream from which these had not been taken yet."""
        cursor, places = self.cursor, tuple((draw.visit, draw.index) for draw in draws)
        return Cursor(cursor.visit, cursor.index, (*places, *cursor.put_back))

    def _next(self) -> Draw:
        visit, index, put_back = self.cursor.visit, self.cursor.index, self.cursor.put_back
        if put_back:
            self.cursor = Cursor(visit, index, put_back[1:])
            visit, index = put_back[0]
        else:
            last = index + 1 == len(self._samples)
            self.cursor = Cursor(visit + 1, 0) if last else Cursor(visit, index + 1)
        return Draw(self._samples[self._pass(visit)[index]], visit, index)

    def _pass(self, visit: int) -> list[int]:
        if self._order[0] != visit:
            order = list(range(len(self._samples)))
            random.Random(stable_seed(self._seed, "order", visit)).shuffle(order)
            self._order = (visit, order)
        return self._order[1]
