"""Answers a batch of requests about one file with one plan: what is known, then what must be decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

from paravt.errors import VideoError
from paravt.types import Frame
from paravt.video.cache import FrameCache
from paravt.video.decode import Run, decode_run, read_run
from paravt.video.frames import Frames
from paravt.video.pixels import Converter, Size
from paravt.video.plan import Timeline, group
from paravt.video.probe import Probe, VideoInfo, probe
from paravt.video.source import Source, file_identity

# Seconds between targets up to which reading on is cheaper than another seek; without an index a seek may land in
# the same group of pictures again, whose length is unknown; and the most to hold in memory as packets.
_NEAR, _FAR, _LONGEST = 2.0, 10.0, 30.0


@dataclass(frozen=True)
class Request:
    """The times (seconds) of several windows of one file."""

    windows: Sequence[Sequence[float]]
    size: Size


@dataclass(frozen=True)
class Answer:
    info: VideoInfo
    windows: tuple[Frames, ...]


@dataclass
class Stats:
    """Counts since the reader was made. `decoded` counts frames that came out of a decoder."""

    requests: int = 0
    opened: int = 0
    runs: int = 0
    """Stretches that were sought and read."""
    decoded: int = 0
    hits: int = 0
    """Asked frames that the cache held."""
    misses: int = 0
    """Asked frames that had to be decoded, repeats included."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


@dataclass
class FileState:
    """What was learnt about one content of a file. Used by one job at a time."""

    probe: Probe
    timeline: Timeline = field(default_factory=Timeline)
    broken: dict[int, str] = field(default_factory=dict)
    """Timestamps whose frames cannot be had, and why."""


class Job:
    """One batch of requests for one file, planned as a union: every group of pictures is decoded once."""

    def __init__(self, path: str, state: FileState | None, cache: FrameCache, stats: Stats) -> None:
        """`state` is what an earlier job left; it is used only if the file is still the same."""
        self._path = path
        self._cache = cache
        self._stats = stats
        self._got: dict[tuple[int, Size], Frame] = {}
        self._source: Source | None = None
        self._identity = file_identity(path)
        if state is not None and state.probe.info.identity == self._identity:
            self.state = state
        else:
            self.state = self._learn()

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Raises VideoError if the file cannot be read or changes meanwhile."""
        self._stats.add(requests=len(requests))
        asked: dict[int, set[Size]] = {}
        for request in requests:
            for tick in self._ticks(request):
                if not self._have(tick, request.size):
                    asked.setdefault(tick, set()).add(request.size)
        if asked:
            self._read(asked)
        self.close()
        if file_identity(self._path) != self._identity:
            raise VideoError(self._path, "the file changed while it was read")
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        if self._source is not None:
            self._source.container.close()
            self._source = None

    def _open(self) -> Source:
        if self._source is None:
            self._source = Source(self._path)
            self._stats.add(opened=1)
        return self._source

    def _learn(self) -> FileState:
        source = self._open()
        try:
            state = FileState(probe(source))
        except VideoError:
            self.close()
            raise
        if state.probe.known:
            state.timeline.add(state.probe.first, state.probe.end - 1, state.probe.known)
        return state

    def _ticks(self, request: Request) -> list[int]:
        targets = (self.state.probe.target(time) for times in request.windows for time in times)
        return [target for target in targets if isinstance(target, int)]

    def _have(self, tick: int, size: Size) -> bool:
        """Whether the answer needs no decoding; takes the frame from the cache, so that it stays until then."""
        pts = self.state.timeline.floor(tick)
        if pts is not None and (pts in self.state.broken or (pts, size) in self._got):
            return True
        frame = None if pts is None else self._cache.get((self._identity, pts, size))
        if pts is not None and frame is not None:
            self._got[pts, size] = frame
            self._stats.add(hits=1)
            return True
        self._stats.add(misses=1)
        return False

    def _read(self, asked: dict[int, set[Size]]) -> None:
        source = self._open()
        near, far, longest = (source.ticks(seconds) for seconds in (_NEAR, _FAR, _LONGEST))
        convert = Converter()
        for ticks in group(asked, source.keyframe_before, near, far, longest):
            run = read_run(source, ticks[0], ticks[-1])
            self._stats.add(runs=1)
            self._extend_timeline(run, ticks)
            wanted: dict[int, set[Size]] = {}
            for tick in ticks:
                pts = self.state.timeline.floor(tick)
                if pts is not None and pts not in self.state.broken:
                    wanted.setdefault(pts, set()).update(asked[tick])
            frames, decoded = decode_run(source, run, wanted, convert)
            self._stats.add(decoded=decoded)
            for pts, result in frames.items():
                if isinstance(result, str):
                    self.state.broken[pts] = result
                    continue
                for size, pixels in result.items():
                    frame = Frame(self.state.probe.time(pts), pixels, _frame_key(self._identity, pts, size))
                    self._got[pts, size] = frame
                    self._cache.put((self._identity, pts, size), frame)

    def _extend_timeline(self, run: Run, ticks: Sequence[int]) -> None:
        high = self.state.probe.end - 1 if run.at_end else ticks[-1]
        if run.low is not None and run.low <= high:
            self.state.timeline.add(run.low, high, run.pts)

    def _answer(self, request: Request) -> Answer:
        windows = []
        for times in request.windows:
            entries = [self._entry(time, request.size) for time in times]
            windows.append(
                Frames(
                    tuple(e if isinstance(e, Frame) else None for e in entries),
                    tuple(e if isinstance(e, str) else None for e in entries),
                )
            )
        return Answer(self.state.probe.info, tuple(windows))

    def _entry(self, time: float, size: Size) -> Frame | str:
        tick = self.state.probe.target(time)
        if isinstance(tick, str):
            return tick
        pts = self.state.timeline.floor(tick)
        if pts is None:
            return f"no frame at {time:.3f} s: nothing there can be read"
        if pts in self.state.broken:
            return f"no frame at {time:.3f} s: {self.state.broken[pts]}"
        return self._got[pts, size]


def _frame_key(identity: str, pts: int, size: Size) -> str:
    return f"{identity}:{pts}:{'native' if size is None else f'{size[0]}x{size[1]}'}"
