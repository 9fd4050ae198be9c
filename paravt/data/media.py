"""The files that rows show, as frames: images, and videos as frames that stand after their times."""

from __future__ import annotations

import base64
import io
import math
import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

import numpy as np
from PIL import Image, ImageOps

from paravt.data.addresses import bare, is_remote
from paravt.data.messages import ImageRef, VideoRef
from paravt.data.skips import RowError
from paravt.errors import VideoError
from paravt.types import Frame
from paravt.video import Frames, VideoInfo, distinct, frame_size, window_times


class VideoReader(Protocol):
    """What rows need of a reader of videos: `paravt.video.FrameReader`, or one that decodes nothing. Both methods raise
    VideoError."""

    def info(self, path: Path, /) -> VideoInfo: ...

    def read(self, path: Path, times: Sequence[float], size: tuple[int, int] | None = None, /) -> Frames: ...


_DAMAGED = (OSError, ValueError, TypeError, LookupError, SyntaxError, EOFError, NotImplementedError, struct.error,
            Image.DecompressionBombError)  # fmt: skip
"""What Pillow's readers raise for files that are not whole; no image ends a run."""


def local_path(url: str, root: Path | None = None) -> Path:
    """The file behind an address of a row. Relative ones (`longvt_source/...`) are relative to `root`.

    `file://` is taken off as often as it stands there: published rows have it twice. Raises RowError if there is no
    such file, or if it would have to be downloaded.
    """
    name = bare(url)
    if is_remote(name):
        raise RowError("media_remote", f"{url[:200]}: not a local file")
    for spelled in (name, unquote(name)):
        path = (root or Path()) / spelled
        if os.path.isfile(path):  # False, too, for what cannot be a name
            return path
    raise RowError("media_missing", f"{url[:200]}: no such file" + (f" under {root}" if root is not None else ""))


def read_image(ref: ImageRef, root: Path | None, factor: int, max_pixels: int) -> Frame:
    """An image as the model sees it: upright, RGB, sides multiples of `factor`, at most `max_pixels` (width x height).

    Raises RowError.
    """
    if ref.url.startswith("data:"):
        try:
            content = base64.b64decode(ref.url.partition(",")[2], validate=True)
        except ValueError as error:  # also for a character that is no ASCII
            raise RowError("media_damaged", f"an image in the row: {error}") from error
        name, source = blake2b(content, digest_size=16).hexdigest(), io.BytesIO(content)
    else:
        path = local_path(ref.url, root)
        try:
            about = path.stat()
            name, source = f"{path}:{about.st_size}:{about.st_mtime_ns}", io.BytesIO(path.read_bytes())
        except OSError as error:
            raise RowError("media_damaged", f"{path}: {error.strerror or error}") from error
    try:
        with Image.open(source) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except _DAMAGED as error:
        raise RowError("media_damaged", f"{ref.url[:200]}: not a readable image: {error}") from error
    size = frame_size(image.width, image.height, factor=factor, max_pixels=max_pixels)
    pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    return Frame(0.0, pixels, f"image:{name}:{size[0]}x{size[1]}")


def read_video(
    ref: VideoRef, root: Path | None, reader: VideoReader, factor: int, max_pixels: int, fps: float, max_frames: int
) -> tuple[Frame, ...]:
    """Frames at `fps`, evenly over the video or its stretch if that would be more than `max_frames`; what the row
    says goes first, up to `max_frames`. Frames that cannot be decoded are left out. Raises RowError if none can be."""
    path = local_path(ref.url, root)
    try:
        info = reader.info(path)
        start = ref.start or 0.0
        end = min(info.duration, ref.end if ref.end is not None else math.inf)
        if start >= end:
            raise RowError("media_damaged", f"{path}: ends before second {start:g}")
        most = min(max_frames, ref.max_frames or max_frames, ref.frames or max_frames)
        rate = ref.fps or fps
        if ref.frames is not None:
            rate = ref.frames / (end - start)
        size = frame_size(info.width, info.height, factor=factor, max_pixels=max_pixels)
        frames = distinct(reader.read(path, window_times(start, end, rate, most), size))
    except VideoError as error:
        raise RowError("media_damaged", str(error)) from error
    if not frames:
        raise RowError("media_damaged", f"{path}: none of its frames could be decoded")
    return frames
