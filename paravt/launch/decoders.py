"""Videos decoded on other machines: actors of Ray that read files, behind the interface of `paravt.video.FrameReader`.

Frames come as arrays of uint8 through Ray's object store: processes on a machine share them, none copies them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, WorkerCrashedError

from paravt.engines.base import stable_seed
from paravt.errors import VideoError
from paravt.types import Frame
from paravt.video import FrameReader, Frames, VideoInfo

log = logging.getLogger(__name__)

_Size = tuple[int, int] | None
_TRIED = 2
"""Workers that may be lost with a request: a file can be what ends them."""
_DEADLY = "the processes that read it crash"


class Decoder:
    """The actor: one file at a time, on one core."""

    def __init__(self) -> None:
        self._reader = FrameReader(workers=1)

    async def info(self, path: str) -> VideoInfo:
        return await self._reader.ainfo(path)

    async def read(self, path: str, windows: Sequence[Sequence[float]], size: _Size) -> list[Frames]:
        return await self._reader.aread_many(path, windows, size)


class Decoders:
    """A `FrameSource` over such actors. A file is read by one of them, which has it in its cache.

    What a lost actor was asked is asked of the next one, and then of a process for this alone. If that ends too, it is
    the file: nobody reads it again. Ray brings lost actors back.
    Raises VideoError as a reader does.
    """

    def __init__(self, actors: Sequence[Any], kind: type[Decoder] = Decoder) -> None:
        self._actors, self._kind = tuple(actors), kind
        self._deadly: set[str] = set()
        self._here = FrameReader(workers=1)
        self._frames: WeakValueDictionary[str, Frame] = WeakValueDictionary()
        """Episodes of a group look at the same frames: one copy is kept of each."""
        self.asked_again = 0
        """Requests that an actor was lost with."""

    @classmethod
    def place(cls, number: int) -> Decoders:
        actor = ray.remote(num_cpus=1, max_restarts=-1, scheduling_strategy="SPREAD")(Decoder)
        return cls([actor.remote() for _ in range(number)])

    def __reduce__(self) -> tuple[type[Decoders], tuple[tuple[Any, ...], type[Decoder]]]:
        """For another process; it shares the actors."""
        return type(self), (self._actors, self._kind)

    async def ainfo(self, path: str) -> VideoInfo:
        name = os.path.abspath(path)
        info = await self._ask("info", name)
        return await self._here.ainfo(name) if info is None else info

    async def aread(self, path: str, times: Sequence[float], size: _Size = None) -> Frames:
        return (await self.aread_many(path, (times,), size))[0]

    async def aread_many(self, path: str, windows: Sequence[Sequence[float]], size: _Size = None) -> list[Frames]:
        name = os.path.abspath(path)
        read = await self._ask("read", name, windows, size)
        found = await self._here.aread_many(name, windows, size) if read is None else read
        return [Frames(tuple(map(self._kept, frames.frames)), frames.missing) for frames in found]

    def _kept(self, frame: Frame | None) -> Frame | None:
        return None if frame is None else self._frames.setdefault(frame.key, frame)

    async def _ask(self, what: str, path: str, *arguments: object) -> Any:
        """The answer of the first actor that gives one, or of a process that is made for it; None without a cluster."""
        if path in self._deadly:
            raise VideoError(path, _DEADLY)
        order = sorted(range(len(self._actors)), key=lambda number: stable_seed(path, number))
        for number in order[:_TRIED]:
            try:
                return await _answer(getattr(self._actors[number], what).remote(path, *arguments))
            except RayTaskError:
                raise
            except RayError as error:  # the actor, its machine, or an answer on its way from there
                self.asked_again += 1
                log.warning("decode worker %d is lost (%s): its request goes elsewhere", number, type(error).__name__)
        alone = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(_alone)
        try:
            return await _answer(alone.remote(self._kind, what, path, *arguments))
        except RayTaskError:
            raise
        except (WorkerCrashedError, OutOfMemoryError):
            self._deadly.add(path)
            log.warning("%s: %s; it is not read again", path, _DEADLY)
            raise VideoError(path, _DEADLY) from None
        except RayError:
            return None


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, VideoError):
            raise VideoError(error.cause.path, error.cause.reason) from None
        raise


def _alone(kind: type[Decoder], what: str, *arguments: object) -> Any:
    return asyncio.run(getattr(kind(), what)(*arguments))
