"""The reader that all episodes of a process share."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol

from paravt.errors import VideoError
from paravt.video.cache import FrameCache
from paravt.video.frames import Frames
from paravt.video.job import Answer, FileState, Job, Request, Stats
from paravt.video.pixels import Size
from paravt.video.probe import VideoInfo

# Files whose facts and timestamps are kept: at most a few MB each for an hour that was read throughout.
_FILES = 512

_Waiting = tuple[Request, "Future[Answer]"]


class FrameSource(Protocol):
    """Where frames come from: files (`FrameReader`), or anything that answers the same questions."""

    async def ainfo(self, path: str) -> VideoInfo: ...

    async def aread(self, path: str, times: Sequence[float], size: tuple[int, int] | None = None) -> Frames: ...

    async def aread_many(
        self, path: str, windows: Sequence[Sequence[float]], size: tuple[int, int] | None = None
    ) -> list[Frames]: ...


class FrameReader:
    """Reads frames of many videos for many episodes at once. Thread-safe.

    Decoding runs on threads of its own, one file on one thread. Requests for a file that is being read wait, and
    are then planned together: concurrent requests for the same frames decode them once. Decoded frames stay in a
    cache of `cache_bytes` bytes; a file that changes on disk is read anew. `workers` is the number of files read
    at a time (default: the number of cores).

    Every method raises VideoError if the file as a whole cannot be read; a single frame that cannot be had is a
    reason in `Frames.missing`.
    """

    def __init__(self, cache_bytes: int = 256 * 1024 * 1024, workers: int | None = None) -> None:
        self.cache = FrameCache(cache_bytes)
        self.stats = Stats()
        self._pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="paravt-video")
        self._lock = Lock()
        self._waiting: dict[str, list[_Waiting]] = {}  # a file that is being read has an entry, maybe an empty one
        self._states: OrderedDict[str, FileState] = OrderedDict()

    def info(self, path: str | os.PathLike[str]) -> VideoInfo:
        """Facts about a file; free for one that was opened before and is unchanged."""
        return self._submit(path, (), None).result().info

    def read(self, path: str | os.PathLike[str], times: Sequence[float], size: Size = None) -> Frames:
        """The frames displayed at `times` (seconds), in that order; `size` is (width, height) or None for native."""
        return self._submit(path, (times,), size).result().windows[0]

    def read_many(
        self, path: str | os.PathLike[str], windows_of_times: Sequence[Sequence[float]], size: Size = None
    ) -> list[Frames]:
        """`read` for several windows, planned as a union: what they share is decoded once."""
        return list(self._submit(path, windows_of_times, size).result().windows)

    async def ainfo(self, path: str | os.PathLike[str]) -> VideoInfo:
        return (await asyncio.wrap_future(self._submit(path, (), None))).info

    async def aread(self, path: str | os.PathLike[str], times: Sequence[float], size: Size = None) -> Frames:
        return (await asyncio.wrap_future(self._submit(path, (times,), size))).windows[0]

    async def aread_many(
        self, path: str | os.PathLike[str], windows_of_times: Sequence[Sequence[float]], size: Size = None
    ) -> list[Frames]:
        return list((await asyncio.wrap_future(self._submit(path, windows_of_times, size))).windows)

    def close(self) -> None:
        """Waits for what is being read and ends the threads."""
        self._pool.shutdown()

    def _submit(self, path: str | os.PathLike[str], windows: Sequence[Sequence[float]], size: Size) -> Future[Answer]:
        if size is not None and (size[0] < 1 or size[1] < 1):
            raise ValueError(f"size must be positive, got {size}")
        name = os.path.abspath(os.fspath(path))
        future: Future[Answer] = Future()
        request = Request(tuple(tuple(times) for times in windows), size)
        with self._lock:
            if name in self._waiting:
                self._waiting[name].append((request, future))
            else:
                self._pool.submit(self._serve, name)
                self._waiting[name] = [(request, future)]
        return future

    def _serve(self, name: str) -> None:
        """Answers the requests that wait for a file, all at once, until none is left."""
        while True:
            with self._lock:
                waiting = self._waiting[name]
                if not waiting:
                    del self._waiting[name]
                    return
                self._waiting[name] = []
                state = self._states.get(name)
            try:
                self._answer(name, state, [entry for entry in waiting if entry[1].set_running_or_notify_cancel()])
            except BaseException as error:  # a bug: whoever waits must hear of it rather than hang
                with self._lock:
                    waiting += self._waiting.pop(name)
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(error)
                raise

    def _answer(self, name: str, state: FileState | None, waiting: Sequence[_Waiting]) -> None:
        if not waiting:
            return
        try:
            job = Job(name, state, self.cache, self.stats)
            try:
                answers = job.run([request for request, _ in waiting])
            finally:
                job.close()
        except VideoError as error:
            for _, future in waiting:  # an exception of its own for each: raising one adds to its traceback
                future.set_exception(VideoError(error.path, error.reason))
            return
        with self._lock:
            self._states[name] = job.state
            self._states.move_to_end(name)
            while len(self._states) > _FILES:
                self._states.popitem(last=False)
        for (_, future), answer in zip(waiting, answers, strict=True):
            future.set_result(answer)


def read_frames(path: str | os.PathLike[str], times: Sequence[float], size: Size = None) -> Frames:
    """The frames of a file displayed at `times` (seconds from its first displayable frame), in that order.

    For a single read; share a `FrameReader` otherwise. Raises VideoError if the file cannot be read.
    """
    name = os.path.abspath(os.fspath(path))
    job = Job(name, None, FrameCache(0), Stats())
    try:
        return job.run([Request((times,), size)])[0].windows[0]
    finally:
        job.close()
