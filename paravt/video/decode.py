"""Reading a run of targets: packets from a sure keyframe on, then exactly the frames that are wanted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from paravt.video.pixels import Converter, Size
from paravt.video.plan import spans
from paravt.video.source import Source

if TYPE_CHECKING:
    from paravt.video.source import Packet

# H.264 and HEVC reorder by at most 16 frames; where decoding times are missing, this many later packets end a run.
_REORDER = 32
# How far (seconds) to go back from a target when a seek lands after it. The first retry goes just before the
# keyframe that was found, which is exact in containers with an index; the rest is for those that guess (MPEG-TS).
_BACK_OFF = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0)


Decoded: TypeAlias = "dict[Size, np.ndarray] | str"
"""The pixels of a frame by size, or why there are none."""


class Shown(NamedTuple):
    """A displayable frame, in ticks."""

    pts: int
    duration: int
    """0 if the container does not say."""
    whole: bool
    """False if its packet was cut off or marked as damaged."""


@dataclass(frozen=True)
class Run:
    """Packets that begin with a keyframe, and what they display."""

    packets: Sequence[Packet]
    pts: Sequence[int]
    """Displayable timestamps of these packets, sorted; some beyond the run's last target may be lacking."""
    exact: bool
    """Whether every packet carries its timestamp. If not, only decoding all of them tells what is displayed when."""
    at_end: bool
    """Whether these packets reach the end of the stream."""

    @property
    def low(self) -> int | None:
        """The displayable timestamp from which on all are known; None if there is none. Frames that are displayed
        before the first keyframe do not count: they cannot be decoded from here."""
        key = self.packets[0].pts if self.exact and self.packets else None
        first = 0 if key is None else bisect_left(self.pts, key)
        return self.pts[first] if first < len(self.pts) else None


def shown_by_packets(packets: Iterable[Packet]) -> list[Shown] | None:
    """The displayable frames of the packets, sorted; None if a packet lacks its timestamp (AVI).

    What an edit list discards is not displayable.
    """
    shown: list[Shown] = []
    for packet in packets:
        if packet.is_discard:
            continue
        if packet.pts is None:
            return None
        shown.append(Shown(packet.pts, packet.duration or 0, not packet.is_corrupt))
    return sorted(shown)


def shown_by_decoder(source: Source, packets: Iterable[Packet]) -> list[Shown]:
    """The same, found by decoding all of them, in the order in which they come out of the decoder.

    That is the order of display: the timestamps found are right as a set, and are dealt out in it.
    """
    source.decoder.skip_frame = "DEFAULT"
    shown: list[Shown] = []
    for packet in chain(packets, (None,)):
        shown += [Shown(f.pts, f.duration or 0, True) for f in source.decode(packet) if f.pts is not None]
    source.decoder.flush_buffers()
    return sorted(shown)


def read_run(source: Source, low: int, high: int) -> Run:
    """Packets that suffice to decode the frames displayed at `low`, at `high` and at any tick between.

    A seek is not to be trusted: MP4 compares decoding times, so that with B-frames it may land on a keyframe that
    is displayed after `low`; MPEG-TS lands anywhere. Then this seeks again, further back, up to the file's begin.
    """
    at = low
    if not source.has_pts:
        # One group of pictures more than needed: frames that are displayed before their keyframe can be decoded,
        # and counted, only with the one before.
        at = (source.keyframe_before(low) or low) - 1
    for back in _BACK_OFF:
        if not source.seek(at):
            break
        packets, at_end = _collect(source, low, high)
        if packets:
            run = _run(source, packets, at_end)
            if run.low is not None and run.low <= low:
                return run
            landed = packets[0].dts
            at = low if landed is None else min(low, landed - 1)
        at -= source.ticks(back)
    source.rewind()
    packets, at_end = _collect(source, low, high, from_begin=True)
    return _run(source, packets, at_end)


def _run(source: Source, packets: Sequence[Packet], at_end: bool) -> Run:
    shown = shown_by_packets(packets) if source.has_pts else None
    exact = shown is not None
    if shown is None:
        shown = shown_by_decoder(source, packets)
    return Run(packets, [frame.pts for frame in shown], exact, at_end)


def _collect(source: Source, low: int, high: int, from_begin: bool = False) -> tuple[list[Packet], bool]:
    """(packets from a keyframe on until nothing at or before `high` can follow, whether the stream ended).

    Gives up early if the first keyframe is displayed after `low`. At the file's begin everything counts.
    """
    packets: list[Packet] = []
    past = 0
    for packet in source.packets():
        pts = packet.pts if source.has_pts else None
        if packet.is_keyframe and pts is not None and pts <= low:
            packets.clear()  # a better start
        if not packets and not from_begin:
            if not packet.is_keyframe:
                continue  # nothing before a keyframe can be decoded
            if pts is not None and pts > low:
                return [packet], False
        packets.append(packet)
        # A frame is never displayed before it is decoded: once decoding times are past `high`, so is the rest.
        late = packet.dts is not None and packet.dts > high
        if late or (pts is not None and pts > high):
            past += 1
            if (late and pts is not None) or past >= _REORDER:
                return packets, False
    return packets, True


def decode_run(
    source: Source, run: Run, wanted: Mapping[int, Collection[Size]], convert: Converter
) -> tuple[dict[int, Decoded], int]:
    """Decodes the frames with the timestamps `wanted`, each at its sizes.

    Returns (per timestamp its pixels by size, or why there are none; number of frames the decoder put out).
    """
    got: dict[int, Decoded] = {}
    decoded = 0
    everything = [(0, len(run.packets))]
    parts = spans([(p.pts, p.is_keyframe) for p in run.packets], wanted) if run.exact else everything
    skip = run.exact and source.skips_per_packet
    for start, stop in parts:
        packets = run.packets[start:stop]
        labels = None if source.has_pts else run.pts
        errors = source.errors
        frames, count = _decode(source, packets, labels, wanted, convert, skip)
        decoded += count
        if skip and (source.errors > errors or any(isinstance(frame, str) for frame in frames.values())):
            # Concealment draws on whatever was decoded before: only without gaps is it what a player shows.
            frames, count = _decode(source, packets, labels, wanted, convert, skip=False)
            decoded += count
        got.update(frames)
    return {pts: got.get(pts, "it cannot be decoded") for pts in wanted}, decoded


def _decode(
    source: Source,
    packets: Sequence[Packet],
    labels: Sequence[int] | None,
    wanted: Mapping[int, Collection[Size]],
    convert: Converter,
    skip: bool,
) -> tuple[dict[int, Decoded], int]:
    """With `skip`, frames that no other frame refers to are not decoded unless they are wanted themselves.

    `labels` are the timestamps of the frames in order of output, where their own are not to be trusted.
    """
    got: dict[int, Decoded] = {}
    decoded = 0
    source.decoder.skip_frame = "DEFAULT"
    remaining = None if labels is None else iter(labels)
    for packet in (*packets, None):
        if skip and packet is not None:
            source.decoder.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
        for frame in source.decode(packet):
            decoded += 1
            if frame.pts is None:
                continue
            pts = frame.pts if remaining is None else next(remaining)
            if pts not in wanted or pts in got:
                continue
            if frame.is_corrupt:
                got[pts] = "its data is damaged, the decoder had to conceal it"
            else:
                got[pts] = {size: convert(frame, size) for size in wanted[pts]}
    source.decoder.flush_buffers()
    return got, decoded
