"""Videos and images looked at once each, whoever asks: facts, and whether what an episode first sees can be decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from paravt.errors import VideoError
from paravt.types import Frame
from paravt.video import FrameReader, Frames, VideoInfo, overview_times

T = TypeVar("T")
_SIZE = (64, 64)
"""Frames are decoded to see whether they can be; nobody looks at them."""


class Once(Generic[T]):
    """A function of a path that is computed once for each, also if many threads ask at the same time.

    What it raises is raised once; who waited for it, and who asks later, gets CancelledError.
    """

    def __init__(self, function: Callable[[Path], T]) -> None:
        self._function, self._lock = function, Lock()
        self._known: dict[Path, Future[T]] = {}

    def __call__(self, path: Path) -> T:
        with self._lock:
            known = self._known.get(path)
            mine = self._known.setdefault(path, Future()) if known is None else None
        if mine is None:
            assert known is not None
            return known.result()
        try:
            mine.set_result(self._function(path))
        finally:
            mine.cancel()  # of no effect on a result; without one, whoever waits must not wait for ever
        return mine.result()

    def __len__(self) -> int:
        return len(self._known)


@dataclass(frozen=True)
class Seen:
    """A video, or why it cannot be read."""

    info: VideoInfo | None
    fault: str | None = None


class VideoProbe:
    """Facts of videos. With `decode`, the first and the last of `frames` overview frames have to be there."""

    def __init__(self, workers: int, frames: int = 64, decode: bool = True) -> None:
        self._reader = FrameReader(cache_bytes=0, workers=workers)
        self._frames, self._decode = frames, decode
        self.look = Once(self._look)

    def _look(self, path: Path) -> Seen:
        try:
            info = self._reader.info(path)
            if not self._decode:
                return Seen(info)
            times = overview_times(info.duration, self._frames)
            first = self._reader.read(path, [times[0], times[-1]], _SIZE)
        except VideoError as error:
            return Seen(None, str(error))
        if first.reasons:
            return Seen(info, f"{path}: {first.reasons[0]}")
        return Seen(info)

    def info(self, path: Path, /) -> VideoInfo:
        """As a reader for rows whose tokens are only counted."""
        seen = self.look(path)
        if seen.info is None:
            raise VideoError(path, str(seen.fault).removeprefix(f"{path}: "))
        return seen.info

    def read(self, path: Path, times: Sequence[float], size: tuple[int, int] | None = None, /) -> Frames:
        """Black frames of the right times: as many as a video of a constant rate has."""
        info = self.info(path)
        width, height = size or (info.width, info.height)
        pixels = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (height, width, 3))
        rate = info.fps or 1000.0
        shown = (math.floor(time * rate + 1e-6) / rate for time in times)
        return Frames(tuple(Frame(at, pixels, f"{path}:{at:.6f}") for at in shown), (None,) * len(times))

    def close(self) -> None:
        self._reader.close()
