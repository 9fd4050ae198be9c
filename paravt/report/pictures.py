"""Frames as small pictures inside a page: data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from paravt.types import Frame

OVERVIEW_WIDTH, CROP_WIDTH = 96, 160
"""The widest pictures (px) of overview frames and of the frames of crops."""
_QUALITY = 60


@dataclass(frozen=True)
class Picture:
    """`uri` is None where a frame could not be had, and `why` says so."""

    uri: str | None
    why: str = ""


Pictures = Callable[[Frame, int], Picture]
"""(frame, widest in px) -> its picture. Never raises: what cannot be had is a reason."""


def frame_picture(frame: Frame, widest: int) -> Picture:
    """The picture of a frame that has its pixels: one of an episode that was just played."""
    if frame.pixels.size == 0:
        return Picture(None, "its pixels were not kept")
    return Picture(data_uri(frame.pixels, widest))


def data_uri(pixels: np.ndarray, widest: int) -> str:
    """uint8 RGB of shape (height, width, 3) as a WebP at most `widest` px wide; never made larger."""
    image = Image.fromarray(pixels)
    if image.width > widest:
        height = max(1, round(image.height * widest / image.width))
        image = image.resize((widest, height), Image.Resampling.BILINEAR, reducing_gap=2.0)
    out = io.BytesIO()
    image.save(out, "WEBP", quality=_QUALITY)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()
