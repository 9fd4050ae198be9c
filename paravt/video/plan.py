"""Which frame is displayed when, and what to decode for it. Pure functions over ticks (integer timestamps)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence


class Timeline:
    """What is known so far of a file's displayable timestamps.

    A list of disjoint stretches [low, high] of ticks, sorted; within a stretch every displayable timestamp is
    known, and `low` is one. It grows with every part that is demuxed, so that later reads of the same part find
    their frames (and perhaps the cache holds them) without opening the file.
    """

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._pts: list[list[int]] = []

    def add(self, low: int, high: int, pts: Iterable[int]) -> None:
        """All displayable timestamps within [low, high], in any order; those outside are ignored."""
        inside = {p for p in pts if low <= p <= high}
        if low not in inside:
            raise ValueError(f"a stretch begins with a timestamp, {low} is none")
        first = bisect_left(self._highs, low)
        last = bisect_right(self._lows, high)
        for known in self._pts[first:last]:
            inside.update(known)
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]
        self._pts[first:last] = [sorted(inside)]

    def floor(self, tick: int) -> int | None:
        """The timestamp of the frame displayed at `tick` (the last one <= it); None if not known yet."""
        i = bisect_right(self._lows, tick) - 1
        if i < 0 or tick > self._highs[i]:
            return None
        return self._pts[i][bisect_right(self._pts[i], tick) - 1]


def group(
    ticks: Iterable[int], keyframe_before: Callable[[int], int | None], near: int, far: int, longest: int
) -> list[list[int]]:
    """Splits targets into runs, each to be read by one seek and one pass over its packets.

    Neighbours share a run if the index names the same keyframe for both (so that no group of pictures is decoded
    twice) or if they lie within `near` ticks; where there is no index, within `far`, since the group of pictures
    may be long. A run does not grow beyond `longest` ticks except within one group of pictures: its packets are
    held in memory.
    """
    runs: list[list[int]] = []
    last_key: int | None = None
    for tick in sorted(set(ticks)):
        key = keyframe_before(tick)
        if runs:
            run = runs[-1]
            same = key is not None and key == last_key
            close = tick - run[-1] <= (far if key is None else near)
            if same or (close and tick - run[0] <= longest):
                run.append(tick)
                last_key = key
                continue
        runs.append([tick])
        last_key = key
    return runs


def spans(packets: Sequence[tuple[int | None, bool]], targets: Iterable[int]) -> list[tuple[int, int]]:
    """The parts [start, stop) of a run to decode, given (pts, is_keyframe) of its packets in decoding order.

    Each target needs the packets from the last keyframe that is not displayed after it (frames that are displayed
    before their keyframe belong to the group of pictures before) up to its own. Overlapping parts become one.
    Between parts the decoder starts afresh.
    """
    wanted = set(targets)
    parts: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    for j, (pts, is_key) in enumerate(packets):
        if is_key and pts is not None:
            keys.append((j, pts))
        if pts is None or pts not in wanted:
            continue
        start = next((k for k, key_pts in reversed(keys) if key_pts <= pts), 0)
        while parts and start <= parts[-1][1]:
            start = min(start, parts.pop()[0])
        parts.append((start, j + 1))
    return parts
