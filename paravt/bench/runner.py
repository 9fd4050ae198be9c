"""Playing many questions on one or more engines at the same time.

A question that fails because of an engine is tried again, elsewhere if there is an elsewhere. An engine that keeps
failing gets pauses, so that it does not eat up the tries of questions that others could answer; if nothing succeeds any
more, the run stops, and what it has not played is left for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import anyio

from paravt.bench.results import Result
from paravt.engines.base import Engine
from paravt.errors import EngineError, VideoError
from paravt.types import Episode, EpisodeError, Sample

_LONGEST_PAUSE = 30.0
"""Seconds."""
PATIENCE = 120.0
"""Seconds without a success after which a run stops."""


@dataclass(frozen=True)
class Job:
    bench: str
    sample: Sample


@dataclass
class Place:
    """Where questions are played: an engine, and how it has done so far."""

    name: str
    engine: Engine
    running: int = 0
    failures: int = 0
    """In a row."""
    ready_at: float = field(default=0.0, repr=False)
    """In the loop's time: not used before."""


Play = Callable[[Sample, Engine], Awaitable[Episode]]


async def run_jobs(
    jobs: Iterable[Job],
    places: Sequence[Place],
    play: Play,
    record: Callable[[Result], None],
    *,
    concurrency: int = 8,
    tries: int = 3,
    patience: float = PATIENCE,
) -> None:
    """Play every job once to its end: until it does not fail, or `tries` times; `record` is told of the last try.

    `concurrency` is the number of questions that each place has at a time. What `record` raises ends the run. Raises
    EngineError if all places fail from the start, or if nothing has succeeded for `patience` seconds.
    """
    pool = _Pool(places, concurrency, patience)
    left = iter(jobs)
    workers = [asyncio.create_task(_work(left, pool, play, record, tries)) for _ in range(concurrency * len(places))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(left: Iterator[Job], pool: _Pool, play: Play, record: Callable[[Result], None], tries: int) -> None:
    for job in left:
        been: list[str] = []
        while True:
            place = await pool.take(been)
            try:
                episode = await play(job.sample, place.engine)
            finally:
                pool.give(place)
            failure = first_failure(episode)
            pool.note(place, failure)
            been.append(place.name)
            # a video does not get better by trying again
            if failure is None or failure.kind == VideoError.kind or len(been) >= tries:
                break
        record(Result(job.bench, len(been), place.name, episode))


def first_failure(episode: Episode) -> EpisodeError | None:
    return next((error for error in episode.errors if not error.scored), None)


class _Pool:
    """The places, each with so many slots."""

    def __init__(self, places: Sequence[Place], slots: int, patience: float) -> None:
        self._places, self._slots, self._patience = places, slots, patience
        self._freed = asyncio.Event()
        self._failures = 0
        """In a row, of all places."""
        self._succeeded: float | None = None
        """When something did last, in the loop's time."""

    async def take(self, been: Collection[str]) -> Place:
        """A slot, at a place that has not been tried if there is one, at the one with the least to do."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            free = [place for place in self._places if place.running < self._slots and place.ready_at <= now]
            if been and any(place.name not in been and not place.failures for place in self._places):
                # worth waiting for, rather than failing again at once where it has just failed
                free = [place for place in free if place.name not in been]
            if free:
                place = min(free, key=lambda place: (place.name in been, place.failures > 0, place.running))
                place.running += 1
                return place
            self._freed.clear()
            pauses = [place.ready_at - now for place in self._places if place.ready_at > now]
            with anyio.move_on_after(min(pauses, default=None)):
                await self._freed.wait()

    def give(self, place: Place) -> None:
        place.running -= 1
        self._freed.set()

    def note(self, place: Place, failure: EpisodeError | None) -> None:
        if failure is not None and failure.kind == VideoError.kind:
            return  # not the engine's doing
        now = asyncio.get_running_loop().time()
        if failure is None:
            place.failures = self._failures = 0
            self._succeeded = now
            return
        place.failures += 1
        self._failures += 1
        if (waves := place.failures / self._slots) >= 1:  # all that runs at a place fails together
            place.ready_at = now + min(2.0 ** (waves - 1), _LONGEST_PAUSE)
        enough = self._failures >= max(3, 2 * self._slots * len(self._places))
        if enough and (self._succeeded is None or now - self._succeeded > self._patience):
            raise EngineError(
                f"{self._failures} attempts in a row have failed, the last with: {failure.message}; "
                "stopped; the same command goes on with what is left"
            )
