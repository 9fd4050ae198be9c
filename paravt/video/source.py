"""An open video file: the checks before it is opened, its video stream, and packets from any place on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from fractions import Fraction
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import av
from av.stream import Disposition

from paravt.errors import VideoError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet as AvPacket
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream

    Packet: TypeAlias = AvPacket[VideoStream]

# Decoders that look at `skip_frame` for every packet anew. (dav1d reads it once, when it is opened.)
_SKIPS_PER_PACKET = frozenset({"h264", "hevc", "mpeg2video", "mpeg4"})
# These open further files, which the name and the time of the list say nothing about.
_PLAYLISTS = frozenset({"concat", "hls", "dash", "imf"})
# After a seek FFmpeg's demuxer of MPEG program streams makes up timestamps (off by a field, for seconds).
_UNSEEKABLE = frozenset({"mpeg"})


def file_identity(path: str) -> str:
    """Names the content of a file: its resolved path, size and modification time. Raises VideoError."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise VideoError(path, "no such file") from None
    except (OSError, ValueError) as error:  # no permission, a name with a zero byte
        raise VideoError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if stat.S_ISDIR(found.st_mode):
        raise VideoError(path, "is a directory, not a video")
    if not stat.S_ISREG(found.st_mode):
        raise VideoError(path, "is not a regular file")  # a pipe would hang
    if found.st_size == 0:
        raise VideoError(path, "the file is empty")
    name = f"{os.path.realpath(path)}\0{found.st_size}\0{found.st_mtime_ns}"
    return blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()


class Source:
    """The video stream of a file. A context manager; not thread-safe. Times are ticks of `time_base`.

    Raises VideoError if the file cannot be opened or has no video stream (cover pictures are none).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = file_identity(path)
        self.file_size = os.path.getsize(path)
        self.errors = 0
        """Packets that could not be decoded so far."""
        self._open()

    def _open(self) -> None:
        try:
            # An absolute path is never taken for a URL; the whitelist keeps playlists from reaching the network.
            container = av.open(
                os.path.abspath(self.path), "r", options={"protocol_whitelist": "file"}, metadata_errors="replace"
            )
        except (av.FFmpegError, OSError) as error:
            raise VideoError(self.path, f"not a readable video ({error.strerror})") from None
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        playable = [s for s in streams if s.time_base and s.codec_context is not None]
        form = container.format.name
        reason = None
        if form in _PLAYLISTS:
            reason = f"a playlist ({form}), not a video; give the video itself"
        elif form == "tty" or form.startswith("image2") or form.endswith("_pipe"):  # FFmpeg "plays" text and pictures
            reason = f"not a video (FFmpeg takes it for {form})"
        elif not streams:
            reason = "no video stream"
        elif not playable:
            reason = "no decoder for its video stream"
        if reason:
            container.close()
            raise VideoError(self.path, reason)
        self.container: InputContainer = container
        # As players do: the stream marked as the default, if one is.
        self.stream: VideoStream = next((s for s in playable if s.disposition & Disposition.default), playable[0])
        assert self.stream.time_base is not None
        self.time_base: Fraction = self.stream.time_base
        # One thread: output is deterministic, errors belong to their packet, and files are the unit of parallelism.
        self.decoder: VideoCodecContext = self.stream.codec_context
        self.decoder.thread_count = 1
        # AVI stores no presentation times; what its packets claim to have are decoding times.
        self.has_pts = container.format.name != "avi"
        self.skips_per_packet = self.decoder.name in _SKIPS_PER_PACKET

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.container.close()

    def rewind(self) -> None:
        """Back to the very first packet. Reopens, since not every demuxer can seek before its first keyframe."""
        self.container.close()
        self._open()

    def seek(self, tick: int) -> bool:
        """To a place at or before `tick`, as far as the demuxer can tell; False if it cannot seek."""
        if self.container.format.name in _UNSEEKABLE:
            return False
        try:
            self.container.seek(tick, stream=self.stream, backward=True)
        except (av.FFmpegError, OverflowError):
            return False
        return True

    def packets(self) -> Iterator[Packet]:
        """The stream's packets from here on, in decoding order, until the end or the first unreadable place."""
        try:
            for packet in self.container.demux(self.stream):
                if packet.size:  # the last one is empty: PyAV's signal to drain the decoder
                    yield packet
        except av.FFmpegError:
            return

    def decode(self, packet: Packet | None) -> list[av.VideoFrame]:
        """The frames that come out when `packet` (None: the end) goes in. Undecodable data gives none."""
        try:
            return self.decoder.decode(packet)
        except av.FFmpegError:
            self.errors += 1
            return []

    def keyframe_before(self, tick: int) -> int | None:
        """The timestamp of the index's keyframe at or before `tick`; None if the container has no index there."""
        index = self.stream.index_entries
        found = index.search_timestamp(tick, backward=True, any_frame=False) if len(index) else -1
        return index[found].timestamp if found >= 0 else None

    @property
    def index_is_complete(self) -> bool:
        """Whether every packet is in the index (MP4 and AVI) and not just some keyframes, or what was read so far."""
        return self.stream.frames > 0 and len(self.stream.index_entries) > 0

    def seconds(self, ticks: int) -> float:
        return float(ticks * self.time_base)

    def ticks(self, seconds: float) -> int:
        return int(seconds / self.time_base)
