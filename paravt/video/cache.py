"""Decoded frames shared between episodes: a cache bounded in bytes, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from paravt.types import Frame
from paravt.video.pixels import Size

CacheKey = tuple[str, int, Size]
"""(identity of the file, pts in ticks, size)."""


class FrameCache:
    """Thread-safe. A frame larger than the whole cache is not kept."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"cache size must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self._frames: OrderedDict[CacheKey, Frame] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """Bytes of pixels held now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._frames)

    def get(self, key: CacheKey) -> Frame | None:
        with self._lock:
            frame = self._frames.get(key)
            if frame is not None:
                self._frames.move_to_end(key)
            return frame

    def put(self, key: CacheKey, frame: Frame) -> None:
        with self._lock:
            old = self._frames.pop(key, None)
            if old is not None:
                self._bytes -= old.pixels.nbytes
            if frame.pixels.nbytes > self.max_bytes:
                return
            self._frames[key] = frame
            self._bytes += frame.pixels.nbytes
            while self._bytes > self.max_bytes:
                _, oldest = self._frames.popitem(last=False)
                self._bytes -= oldest.pixels.nbytes
