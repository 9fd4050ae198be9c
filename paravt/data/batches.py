"""Batches of traces from a stream of rows, decoded ahead on threads."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paravt.data.rows import DrawnRow, Position, RowStream
from paravt.data.skips import RowError
from paravt.data.traces import Loaded, TraceBuilder
from paravt.errors import DataError
from paravt.types import Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceBatch:
    traces: tuple[Trace, ...]
    position: Position
    """Of the stream after this batch: where a run goes on that ends here."""
    skipped: dict[str, int]
    """Rows so far, by reason."""

    def to_dict(self) -> dict[str, Any]:
        """What is needed to go on."""
        return {"position": self.position.to_dict(), "skipped": self.skipped}


def batches(
    stream: RowStream, builder: TraceBuilder, size: int, workers: int, skipped: dict[str, int] | None = None
) -> Generator[TraceBatch, None, None]:
    """Endless batches of `size` traces. Rows are loaded on `workers` threads, ahead of their turn, and used in order.

    Rows that cannot be used are skipped and counted on top of `skipped`; the first one of each reason is logged.
    Raises DataError if as many rows in a row as there are cannot be used.
    """
    counts = Counter(skipped or {})
    waiting: deque[tuple[DrawnRow, Future[Loaded], Position]] = deque()
    traces: list[Trace] = []
    misses = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="paravt-rows") as pool:
        try:
            while True:
                while len(waiting) < 2 * workers:
                    drawn = stream.take()
                    waiting.append((drawn, pool.submit(_load, builder, drawn), stream.position))
                drawn, loaded, position = waiting.popleft()
                try:
                    traces.append(builder.render(loaded.result()))
                    misses = 0
                except RowError as error:
                    if not counts[error.reason]:
                        log.warning("skipped (%s): %s: %s", error.reason, drawn.name, error)
                    counts[error.reason] += 1
                    misses += 1
                    if misses >= stream.size:
                        raise DataError(f"no row can be used: {_listed(counts)}; {drawn.name}: {error}") from error
                if len(traces) == size:
                    yield TraceBatch(tuple(traces), position, dict(counts))
                    traces = []
        finally:
            for _, loaded, _ in waiting:
                loaded.cancel()


def _load(builder: TraceBuilder, drawn: DrawnRow) -> Loaded:
    if isinstance(drawn.row, RowError):
        raise drawn.row
    return builder.load(drawn.row)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


class Prefetch:
    """Makes batches ahead on a thread of its own, at most `depth` of them. What fails there is raised by `take`."""

    def __init__(self, made: Generator[TraceBatch, None, None], depth: int) -> None:
        self._made = made
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="paravt-batches")
        self._waiting = deque(self._pool.submit(next, made) for _ in range(depth))
        self.waited = 0.0
        """Seconds that `take` had to wait, in all."""

    def take(self) -> TraceBatch:
        started = time.monotonic()
        batch = self._waiting.popleft().result()
        self.waited += time.monotonic() - started
        self._waiting.append(self._pool.submit(next, self._made))
        return batch

    def close(self) -> None:
        """Waits for the batch that is being made. Batches that nobody took are lost; no position tells of them."""
        self._pool.shutdown(cancel_futures=True)
        self._made.close()
