"""What a video file is: opened once, without decoding more than its first frame."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av

from paravt.errors import VideoError
from paravt.video.decode import Shown, shown_by_decoder, shown_by_packets
from paravt.video.pixels import quarter_turns
from paravt.video.source import Source

# Slack for times that were rounded or printed: half of the last digit of six decimals, doubled.
_SLACK = 1e-6
# How far before its claimed end (seconds) to look for the last frame of a container without a complete index.
_TAILS = (2.0, 20.0, 200.0)
# Index entries that are worth counting: 5 ms. An hour's would take longer than all the rest of opening it.
_COUNTED = 10_000


@dataclass(frozen=True)
class VideoInfo:
    """What is known of a video without decoding it. Time 0 is its first displayable frame."""

    path: str
    duration: float
    """Seconds: timestamp of the last frame + how long it is shown - timestamp of the first frame."""
    fps: float
    """Average frames per second; 0.0 if unknown."""
    width: int
    height: int
    """Of the upright frame, in pixels."""
    rotation: int
    """Degrees counter-clockwise (0, 90, 180, 270) that readers apply to the stored frames."""
    first_pts: float
    """Where the container puts the first displayable frame, in seconds."""
    frame_count: int | None
    """Frames with readable data, if that is cheap to know (short files)."""
    warnings: tuple[str, ...]
    identity: str
    """Names the content (path, size, modification time) in cache keys."""


@dataclass(frozen=True)
class Probe:
    """`VideoInfo` and the clock behind it, in ticks of `time_base`."""

    info: VideoInfo
    time_base: Fraction
    first: int
    end: int
    known: tuple[int, ...] | None
    """All displayable timestamps, if the probe had to pass over the whole file anyway."""

    def target(self, time: float) -> int | str:
        """The tick that `time` (seconds) asks for, or why there is no frame at it."""
        if not math.isfinite(time):
            return f"no frame at {time} s: not a time"
        if time + _SLACK < 0:
            return f"no frame at {time:.3f} s: before the video's begin"
        tick = self.first + math.floor((time + _SLACK) / self.time_base)
        if tick >= self.end:
            return f"no frame at {time:.3f} s: the video ends at {self.info.duration:.3f} s"
        return tick

    def time(self, pts: int) -> float:
        """Seconds from the first displayable frame."""
        return float((pts - self.first) * self.time_base)


def open_video(path: str) -> VideoInfo:
    """Facts about a video file. Raises VideoError (file and reason) for what has no displayable video."""
    with Source(path) as source:
        return probe(source).info


def probe(source: Source) -> Probe:
    """Facts about an open file; moves its position. Raises VideoError if nothing in it can be displayed."""
    frame = _first_frame(source)
    if frame is None:
        raise VideoError(source.path, "no frame of its video stream can be displayed")
    if frame.pts is None:
        raise VideoError(source.path, "its frames have no timestamps (a raw stream; put it into a container)")
    first = frame.pts
    turns = quarter_turns(frame)
    size = (frame.width, frame.height)
    shown, whole = _tail(source, first)
    # A packet that was cut off is no frame to end with. (Before the end it is one: to be reported as missing.)
    last = next((s for s in reversed(shown) if s.whole), Shown(first, frame.duration or 0, True))
    end = last.pts + (last.duration or _usual_step(source, shown))
    duration = source.seconds(end - first)
    rate = source.stream.average_rate or source.stream.guessed_rate
    width, height = size if turns % 2 == 0 else size[::-1]
    warning = _shortfall(source, duration)
    info = VideoInfo(
        path=source.path,
        duration=duration,
        fps=float(rate) if rate else 0.0,
        width=width,
        height=height,
        rotation=90 * turns,
        first_pts=source.seconds(first),
        frame_count=sum(s.whole for s in shown) if whole else _indexed_frames(source),
        warnings=(warning,) if warning else (),
        identity=source.identity,
    )
    known = tuple(s.pts for s in shown if s.pts < end) if whole else None
    return Probe(info, source.time_base, first, end, known)


def _first_frame(source: Source) -> av.VideoFrame | None:
    for packet in source.packets():
        for frame in source.decode(packet):
            return frame
    for frame in source.decode(None):
        return frame
    return None


def _tail(source: Source, first: int) -> tuple[list[Shown], bool]:
    """(the last frames in order of display, whether these are all frames of the file)."""
    for tick in _tail_seeks(source, first):
        if tick <= first:
            break
        shown = _scan(source, tick, first)
        if shown:
            return shown, shown[0].pts == first
    shown = _scan(source, None, first)
    return shown, bool(shown) and shown[0].pts == first


def _tail_seeks(source: Source, first: int) -> Iterator[int]:
    index = source.stream.index_entries
    if source.index_is_complete:
        key = source.keyframe_before(index[len(index) - 1].timestamp)
        while key is not None:
            at = index.search_timestamp(key, backward=True, any_frame=False)
            if index[at].pos + index[at].size <= source.file_size:  # else the file was cut off before it
                yield key
                return
            key = source.keyframe_before(key - 1)
        return
    claimed = _claimed_seconds(source)
    if claimed is not None:
        for before in _TAILS:
            yield first + source.ticks(claimed - before)


def _scan(source: Source, start: int | None, first: int) -> list[Shown]:
    """All displayable frames from `start` (None: the begin) to the end, sorted."""
    if not _go(source, start):
        return []
    shown = shown_by_packets(source.packets()) if source.has_pts else None
    if shown is None:
        _go(source, start)
        shown = shown_by_decoder(source, source.packets())
    return [frame for frame in shown if frame.pts >= first]


def _go(source: Source, start: int | None) -> bool:
    if start is None:
        source.rewind()
        return True
    return source.seek(start)


def _usual_step(source: Source, shown: list[Shown]) -> int:
    """How long a frame is shown that does not say so: its stream's frame interval, in ticks."""
    rate = source.stream.average_rate or source.stream.guessed_rate
    if rate:
        return max(1, round(1 / (rate * source.time_base)))
    return shown[-1].pts - shown[-2].pts if len(shown) > 1 else 1


def _claimed_seconds(source: Source) -> float | None:
    """How long the container says that the video is."""
    if source.stream.duration:
        return source.seconds(source.stream.duration)
    return source.container.duration / av.time_base if source.container.duration else None


def _shortfall(source: Source, duration: float) -> str | None:
    claimed = _claimed_seconds(source)
    if claimed is None:
        return None
    index = source.stream.index_entries
    readable = f"the container claims {claimed:.1f} s, {duration:.1f} s are readable"
    if source.index_is_complete:
        last = index[len(index) - 1]
        return f"file is truncated: {readable}" if last.pos + last.size > source.file_size else None
    # Without an index only the claim itself speaks, and that of a container may be about its audio.
    alone = source.stream.duration is not None or len(source.container.streams) == 1
    return f"file may be truncated: {readable}" if alone and claimed > duration + 1.0 else None


def _indexed_frames(source: Source) -> int | None:
    index = source.stream.index_entries
    if not source.index_is_complete or len(index) > _COUNTED:
        return None
    return sum(not entry.is_discard and entry.pos + entry.size <= source.file_size for entry in index)
