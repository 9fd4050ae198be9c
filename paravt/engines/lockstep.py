"""Batches that don't depend on timing, for runs that must give the same numbers twice.

How a batch is composed changes the rounding of its results, and an engine composes batches from what happens to be
there. Here, requests wait until nothing else can happen any more (every episode waits for the engine, no frames are
being read), then go to the engine together, in the order of their seeds, and the next batch starts from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.video import Frames, FrameSource, VideoInfo

T = TypeVar("T")
# Turns of the event loop without a new request after which nothing can follow any more: a finished request reaches
# its episode, the episode its next call, the call its sub-agent and a semaphore on the way, in far fewer.
_QUIET_TURNS = 50


@dataclass
class _Waiting:
    prompt: Prompt
    sampling: Sampling
    n: int
    done: asyncio.Future[list[Completion]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LockstepEngine:
    """Wraps an engine and the frame source that the same episodes read from. Seeds must differ between requests."""

    def __init__(self, engine: LocalEngine, reader: FrameSource) -> None:
        self._engine = engine
        self.reader = _CountingReader(reader)
        self._waiting: list[_Waiting] = []
        self._flusher: asyncio.Task[None] | None = None

    @property
    def chat(self) -> TokenChat:
        return self._engine.chat

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        waiting = _Waiting(prompt, sampling, n)
        self._waiting.append(waiting)
        if self._flusher is None:
            self._flusher = asyncio.ensure_future(self._flush_when_quiet())
        return await waiting.done

    async def _flush_when_quiet(self) -> None:
        quiet, known = 0, 0
        while quiet < _QUIET_TURNS:
            await asyncio.sleep(0.001 if self.reader.reading else 0)
            still = not self.reader.reading and len(self._waiting) == known
            quiet, known = (quiet + 1 if still else 0), len(self._waiting)
        batch = sorted(self._waiting, key=lambda waiting: waiting.sampling.seed)
        self._waiting = []
        results = await self._engine.generate_batch([(w.prompt, w.sampling, w.n) for w in batch])
        self._flusher = None  # what the results set off belongs to the next batch
        for waiting, result in zip(batch, results, strict=True):
            if waiting.done.done():
                continue  # cancelled
            if isinstance(result, BaseException):
                waiting.done.set_exception(result)
            else:
                waiting.done.set_result(result)

    async def load_policy(self, version: int, weights: Mapping[str, Any]) -> None:
        await self._engine.load_policy(version, weights)

    async def close(self) -> None:
        await self._engine.close()


class _CountingReader:
    """Knows whether a read is under way."""

    def __init__(self, reader: FrameSource) -> None:
        self._reader = reader
        self.reading = 0

    async def _count(self, read: Awaitable[T]) -> T:
        self.reading += 1
        try:
            return await read
        finally:
            self.reading -= 1

    async def ainfo(self, path: str) -> VideoInfo:
        return await self._count(self._reader.ainfo(path))

    async def aread(self, path: str, times: Sequence[float], size: tuple[int, int] | None = None) -> Frames:
        return await self._count(self._reader.aread(path, times, size))

    async def aread_many(
        self, path: str, windows: Sequence[Sequence[float]], size: tuple[int, int] | None = None
    ) -> list[Frames]:
        return await self._count(self._reader.aread_many(path, windows, size))
