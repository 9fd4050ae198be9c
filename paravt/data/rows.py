"""Endless rows of many files in a shuffled order that follows from a seed, with a position that can be saved.

The order of a pass: the groups of all files are shuffled and cut into windows of a bounded size, and the rows of each
window are shuffled among each other. So a window is all that is in memory, and every row occurs once in a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from paravt.data.skips import RowError
from paravt.data.stream import Cursor
from paravt.data.tables import Group, Rows, read_group
from paravt.engines.base import stable_seed

_WINDOW_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Position:
    """How far a mixture was read: rows drawn, and where each source is."""

    drawn: int
    cursors: tuple[Cursor, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Position:
        return cls(saved["drawn"], tuple(Cursor.restored(cursor) for cursor in saved["cursors"]))


@dataclass(frozen=True)
class DrawnRow:
    name: str
    """File and number, to be found again."""
    row: dict[str, Any] | RowError
    """What is none is not dropped here."""
    source: int = 0
    """Of a mixture, from 0."""


class RowSource:
    """Files that are read as one."""

    def __init__(self, groups: Sequence[Group], seed: int, columns: Sequence[str] = (),
                 window_bytes: int = _WINDOW_BYTES) -> None:  # fmt: skip
        if not groups:
            raise ValueError("no rows")
        self.size = sum(group.rows for group in groups)
        self._groups, self._seed, self._columns, self._window_bytes = groups, seed, columns, window_bytes
        self._ends = np.cumsum([group.rows for group in groups])
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._open: OrderedDict[int, Rows] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, cursor: Cursor) -> DrawnRow:
        """Raises DataError if a file is damaged or has changed."""
        at = int(self._pass(cursor.visit)[cursor.index])
        number = int(np.searchsorted(self._ends, at, side="right"))
        group = self._groups[number]
        index = at - int(self._ends[number] - group.rows)
        name = f"{group.path}: row {group.first + index}"
        rows = self._rows(number)
        try:
            return DrawnRow(name, rows[index])
        except RowError as error:
            return DrawnRow(name, error)

    def after(self, cursor: Cursor) -> Cursor:
        last = cursor.index + 1 == self.size
        return Cursor(cursor.visit + 1, 0) if last else replace(cursor, index=cursor.index + 1)

    def _rows(self, number: int) -> Rows:
        if number not in self._open:
            size = self._groups[number].bytes
            while self._open and self._bytes + size > self._window_bytes:
                old, _ = self._open.popitem(last=False)
                self._bytes -= self._groups[old].bytes
            self._open[number] = read_group(self._groups[number], self._columns)
            self._bytes += size
        self._open.move_to_end(number)
        return self._open[number]

    def _pass(self, visit: int) -> np.ndarray:
        if self._order[0] != visit:
            # numpy promises that RandomState gives the same in every version
            draw = np.random.RandomState(np.random.MT19937(stable_seed(self._seed, "order", visit)))
            windows: list[list[np.ndarray]] = []
            room = 0
            for number in draw.permutation(len(self._groups)):
                group, end = self._groups[number], int(self._ends[number])
                if not windows or group.bytes > room:
                    windows.append([])
                    room = self._window_bytes
                windows[-1].append(np.arange(end - group.rows, end))
                room -= group.bytes
            order = np.concatenate([draw.permutation(np.concatenate(window)) for window in windows])
            self._order = (visit, order)
        return self._order[1]


class RowStream:
    """Draws from several sources by weight; which one is drawn follows from the seed and the number of the draw."""

    def __init__(
        self, sources: Sequence[RowSource], weights: Sequence[float], seed: int, position: Position | None = None
    ) -> None:
        if len(sources) != len(weights) or not all(weight > 0 for weight in weights):
            raise ValueError("a positive weight for each source")
        self.sources, self._seed = sources, seed
        self._shares = np.cumsum(weights) / sum(weights)
        self.position = position or Position(0, (Cursor(),) * len(sources))

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)

    def take(self) -> DrawnRow:
        drawn, cursors = self.position.drawn, list(self.position.cursors)
        at = stable_seed(self._seed, "source", drawn) / 2**63
        chosen = min(int(np.searchsorted(self._shares, at, side="right")), len(cursors) - 1)
        row = replace(self.sources[chosen][cursors[chosen]], source=chosen)
        cursors[chosen] = self.sources[chosen].after(cursors[chosen])
        self.position = Position(drawn + 1, tuple(cursors))
        return row
