"""Batches that don't depend on timing, for runs that must give the same numbers twice.

How a batch is composed changes the rounding of its results, and an engine composes batches from what happens to be
there. Here, requests wait until nothing else can follow any more, then go to the engine together, in the order of
their seeds; what comes meanwhile waits for the next batch.

Nothing can follow any more when

- every running episode (`LockstepEngine.episode`) has a request that waits: an episode that has none is busy with
  something, be it a judge, a thread or a file, and will be back;
- no frames are being read: a sub-agent may read while its peers wait;
- since then, the event loop went round `_QUIET_TURNS` times without a change of any of this.

The last point covers what needs no more than the event loop, such as a result on its way to its sub-agent, or a
sub-agent that gets its turn at a semaphore. It takes the same few turns in every run, at most a fifth of these (a
test), so the composition of every batch follows from the results of those before. That holds as long as

- sub-agents wait for nothing but the engine, the reader and each other (the rest of an episode may wait for anything
  but another episode);
- requests outside of episodes wait for nothing that takes time;
- nothing is cancelled, by a time-out for example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.errors import EngineError
from paravt.video import Frames, FrameSource, VideoInfo

T = TypeVar("T")
_Answer: TypeAlias = "asyncio.Future[list[Completion]]"
_QUIET_TURNS = 50
_POLL = 0.001
"""Seconds between two looks while something goes on outside the event loop."""

# The episode that a task belongs to; the tasks that it starts inherit it.
_EPISODE: ContextVar[object] = ContextVar("paravt_episode", default=None)


@dataclass(frozen=True, eq=False)
class _Call:
    prompt: Prompt
    sampling: Sampling
    n: int
    episode: object
    answer: _Answer

    @property
    def order(self) -> tuple[object, ...]:
        """Calls that are equal in all of this are interchangeable."""
        return (self.sampling.seed, self.prompt.trace, self.prompt.ids, self.n, self.sampling.max_tokens)


class LockstepEngine:
    """Wraps an engine and the frame source that the same episodes read from, which is `reader`."""

    def __init__(self, engine: LocalEngine, reader: FrameSource) -> None:
        self._engine = engine
        self.reader = _CountingReader(reader)
        self._episodes: set[object] = set()
        self._waiting: list[_Call] = []
        self._changes = 0  # of the two above
        self._sender: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def chat(self) -> TokenChat:
        return self._engine.chat

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Around each episode, with all that it does: no batch goes out while it has no request that waits."""
        episode = object()
        self._episodes.add(episode)
        self._changes += 1
        token = _EPISODE.set(episode)
        try:
            yield
        finally:
            _EPISODE.reset(token)
            self._episodes.remove(episode)
            self._changes += 1

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if self._closed:
            raise EngineError("the lockstep engine is closed")
        call = _Call(prompt, sampling, n, _EPISODE.get(), asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._changes += 1
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_batches())
        try:
            return await call.answer
        finally:
            if call in self._waiting:  # cancelled before it was sent
                self._waiting.remove(call)
                self._changes += 1

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        await self._engine.load_policy(version, weights)

    async def close(self) -> None:
        """Requests that wait or run fail with EngineError."""
        self._closed = True
        if self._sender is not None:
            self._sender.cancel()
        self._fail_waiting()
        await self._engine.close()

    async def _send_batches(self) -> None:
        """Runs as long as a call waits. The engine never has two batches at a time."""
        try:
            while self._waiting:
                await self._quiet()
                batch = [call for call in self._waiting if not call.answer.done()]
                self._waiting = []
                await self._send(sorted(batch, key=lambda call: call.order))
        finally:
            self._fail_waiting()  # of an event loop that ends, say; there is nobody left to send them

    async def _quiet(self) -> None:
        turns, seen = 0, -1
        while turns < _QUIET_TURNS:
            settled = not self.reader.reading and self._episodes <= {call.episode for call in self._waiting}
            changes = self._changes + self.reader.changes
            turns, seen = (turns + 1 if settled and changes == seen else 0), changes
            await asyncio.sleep(0 if settled else _POLL)

    async def _send(self, batch: Sequence[_Call]) -> None:
        """Send the calls and wait until the engine is done with all of them."""
        if not batch:
            return
        try:
            results = self._engine.submit([(call.prompt, call.sampling, call.n) for call in batch])
        except EngineError as error:  # it is closed
            for call in batch:
                call.answer.set_exception(EngineError(str(error)))
            return
        for call, result in zip(batch, results, strict=True):
            result.add_done_callback(partial(_hand_over, call.answer))
            call.answer.add_done_callback(partial(_give_up, result))
        await asyncio.wait(results)

    def _fail_waiting(self) -> None:
        for call in self._waiting:
            if not call.answer.done():
                call.answer.set_exception(EngineError("the lockstep engine was closed"))
        self._waiting = []


def _hand_over(answer: _Answer, result: _Answer) -> None:
    error = None if result.cancelled() else result.exception()
    if answer.done():
        return
    if result.cancelled():
        answer.cancel()
    elif error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result.result())


def _give_up(result: _Answer, answer: _Answer) -> None:
    if answer.cancelled():
        result.cancel()


class _CountingReader:
    """Knows whether a read is under way."""

    def __init__(self, reader: FrameSource) -> None:
        self._reader = reader
        self.reading = self.changes = 0

    async def _count(self, read: Awaitable[T]) -> T:
        self.reading += 1
        self.changes += 1
        try:
            return await read
        finally:
            self.reading -= 1
            self.changes += 1

    async def ainfo(self, path: str) -> VideoInfo:
        return await self._count(self._reader.ainfo(path))

    async def aread(self, path: str, times: Sequence[float], size: tuple[int, int] | None = None) -> Frames:
        return await self._count(self._reader.aread(path, times, size))

    async def aread_many(
        self, path: str, windows: Sequence[Sequence[float]], size: tuple[int, int] | None = None
    ) -> list[Frames]:
        return await self._count(self._reader.aread_many(path, windows, size))
