"""The rows of each update, loaded ahead on threads, and the same whatever the number of processes.

Every process draws all rows of a stream and loads every n-th. They tell each other which of them can be used, so a
batch has the next usable rows of the stream, dealt over the processes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paravt.data.rows import DrawnRow, Position, RowStream
from paravt.data.skips import RowError
from paravt.data.traces import Loaded, TraceBuilder
from paravt.errors import DataError
from paravt.ranks import Ranks
from paravt.types import Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Of what is not `mine` only numbers are known; they are of all processes, and the same in each."""

    mine: tuple[Trace, ...]
    rows: int
    tokens: int
    """Scored ones."""
    waited: float
    """Seconds that the process had to wait for its rows that waited longest."""
    position: Position
    """Of the stream after this batch: where a run goes on that ends here."""
    skipped: Mapping[str, int]
    """Rows so far, by reason."""

    def to_dict(self) -> dict[str, Any]:
        """What is needed to go on."""
        return {"position": self.position.to_dict(), "skipped": dict(self.skipped)}


@dataclass(frozen=True)
class _Drawn:
    name: str
    source: int
    """Of the mixture."""
    made: Trace | RowError | None
    """None: another process loads it."""
    position: Position
    """Of the stream after it."""


class Batches:
    """The usable rows of a stream; others are counted on top of `skipped`, and `logged`: the first of each reason.

    `workers` threads load the rows of this process, and one renders them, so that up to `ahead` rows (of all processes)
    are made before they are asked for. All `ranks` make the same calls. To be closed.
    """

    def __init__(
        self,
        stream: RowStream,
        builder: TraceBuilder,
        ranks: Ranks,
        workers: int,
        ahead: int,
        skipped: Mapping[str, int] | None = None,
        logged: bool = True,
    ) -> None:
        self._ranks, self._logged = ranks, logged and ranks.first
        self._counts = Counter(skipped or {})
        self._position = stream.position
        # Of a pass that is gone on with, nobody knows what was used before.
        self._used = [cursor.index > 0 for cursor in stream.position.cursors]
        self._useless: set[int] = set()
        self._made = _draw(stream, builder, ranks, workers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paravt-batches")
        self._waiting = deque(self._thread.submit(next, self._made) for _ in range(ahead))

    def take(self, count: int, draws: int | None = None) -> Batch:
        """The next `count` usable rows; fewer only if `draws` more rows of the stream do not have as many.

        Raises DataError if no source of the stream had a usable row in a whole pass.
        """
        mine: list[Trace] = []
        rows = tokens = 0
        waited = 0.0
        left = draws
        while rows < count and left != 0:
            number = count - rows if left is None else min(count - rows, left)
            left = None if left is None else left - number
            started = time.monotonic()
            drawn = [self._next() for _ in range(number)]
            waits = time.monotonic() - started
            mine += [each.made for each in drawn if isinstance(each.made, Trace)]
            told = self._ranks.exchange((waits, [_told(each) for each in drawn]))
            waited += max(waits for waits, _ in told)
            for each, *outcomes in zip(drawn, *(outcomes for _, outcomes in told), strict=True):
                outcome = next(outcome for outcome in outcomes if outcome is not None)
                if isinstance(outcome, int):
                    rows, tokens = rows + 1, tokens + outcome
                    self._used[each.source] = True
                else:
                    self._skip(*outcome)
                self._end_pass(each, outcome)
            self._position = drawn[-1].position
        return Batch(tuple(mine), rows, tokens, waited, self._position, dict(self._counts))

    @property
    def drawn(self) -> int:
        """Rows of the stream that were asked for."""
        return self._position.drawn

    def close(self) -> None:
        """Waits for the row that is being made. Rows that nobody took are lost; no position tells of them."""
        self._thread.shutdown(cancel_futures=True)
        self._made.close()

    def _next(self) -> _Drawn:
        drawn = self._waiting.popleft().result() if self._waiting else self._thread.submit(next, self._made).result()
        self._waiting.append(self._thread.submit(next, self._made))
        return drawn

    def _skip(self, reason: str, name: str, message: str) -> None:
        if self._logged and not self._counts[reason]:
            log.warning("skipped (%s): %s: %s", reason, name, message)
        self._counts[reason] += 1

    def _end_pass(self, drawn: _Drawn, outcome: int | tuple[str, str, str]) -> None:
        """If it was the last row of a pass of its source: was any of them used?"""
        source = drawn.source
        if drawn.position.cursors[source].index:
            return
        if self._used[source]:
            self._useless.discard(source)
        elif source not in self._useless and not isinstance(outcome, int):
            self._useless.add(source)
            _, name, message = outcome
            counted = ", ".join(f"{count} {reason}" for reason, count in self._counts.most_common())
            if len(self._useless) == len(self._used):
                raise DataError(f"no row can be used: {counted}; {name}: {message}")
            if self._logged:
                log.warning("mixture.%d: none of its rows can be used: %s: %s", source, name, message)
        self._used[source] = False


def _told(drawn: _Drawn) -> int | tuple[str, str, str] | None:
    """What other processes have to know: the number of scored tokens, or why there are none."""
    if isinstance(drawn.made, RowError):
        return drawn.made.reason, drawn.name, str(drawn.made)
    return None if drawn.made is None else sum(drawn.made.loss_mask)


def _draw(stream: RowStream, builder: TraceBuilder, ranks: Ranks, workers: int) -> Generator[_Drawn, None, None]:
    """Endless. Rows are loaded on `workers` threads ahead of their turn, and come in the order of the stream."""
    waiting: deque[tuple[DrawnRow, Future[Loaded] | None, Position]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="paravt-rows") as pool:
        try:
            while True:
                while len(waiting) < 2 * workers * ranks.size:
                    mine = stream.position.drawn % ranks.size == ranks.rank
                    drawn = stream.take()
                    waiting.append((drawn, pool.submit(_load, builder, drawn) if mine else None, stream.position))
                drawn, loaded, position = waiting.popleft()
                yield _Drawn(drawn.name, drawn.source, _render(builder, loaded), position)
        finally:
            for _, loaded, _ in waiting:
                if loaded is not None:
                    loaded.cancel()


def _load(builder: TraceBuilder, drawn: DrawnRow) -> Loaded:
    if isinstance(drawn.row, RowError):
        raise drawn.row
    return builder.load(drawn.row)


def _render(builder: TraceBuilder, loaded: Future[Loaded] | None) -> Trace | RowError | None:
    try:
        return None if loaded is None else builder.render(loaded.result())
    except RowError as error:
        return error
