"""Where to look (times, in seconds) and how large to look (frame sizes, in pixels). Pure arithmetic."""

from __future__ import annotations

import math


def overview_times(duration: float, k: int) -> tuple[float, ...]:
    """`k` times (seconds) spread evenly over the whole video: the midpoints of `k` equal parts.

    If `k` exceeds the number of frames, times repeat frames; `paravt.video.distinct` drops the repeats.
    Raises ValueError unless `duration` is positive and finite and `k` >= 1.
    """
    if not (math.isfinite(duration) and duration > 0):
        raise ValueError(f"duration must be positive and finite, got {duration}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return _midpoints(0.0, duration, k)


def window_times(start: float, end: float, fps: float = 1.0, max_frames: int = 16) -> tuple[float, ...]:
    """Times (seconds) at which to look at the window [start, end): midpoints of n = floor((end - start) * fps) parts.

    n is at least 1 (also for a window shorter than a frame) and at most `max_frames`.
    Raises ValueError on `end` <= `start`, on values that are not finite, on `fps` <= 0 and on `max_frames` < 1.
    """
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise ValueError(f"a window needs finite start < end, got {start} to {end}")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be positive and finite, got {fps}")
    if max_frames < 1:
        raise ValueError(f"max_frames must be at least 1, got {max_frames}")
    # 0.3 - 0.1 is a little less than 0.2: without the slack a whole number of parts could lose one.
    n = min(max(math.floor((end - start) * fps + 1e-6), 1), max_frames)
    return _midpoints(start, end, n)


def frame_size(
    width: int, height: int, *, factor: int = 32, max_pixels: int = 50_176, min_pixels: int | None = None
) -> tuple[int, int]:
    """(width, height) at which a model with patches of `factor` pixels should see a frame of that displayed size.

    Sides are multiples of `factor` and at least `factor`, the area is at most `max_pixels`, the aspect is kept as
    closely as that allows. Small frames grow to `min_pixels` (default: four patches, as far as `max_pixels` allows).
    The same as `smart_resize` of Qwen's processors where that is defined; it refuses aspects beyond 200 and may
    return a side of 0 or an area above the maximum, this never does. Raises ValueError if nothing fits.
    """
    if width < 1 or height < 1 or factor < 1:
        raise ValueError(f"sizes must be positive, got {width}x{height} with factor {factor}")
    if max_pixels < factor * factor:
        raise ValueError(f"max_pixels {max_pixels} is below one patch of {factor}x{factor}")
    if min_pixels is None:
        min_pixels = min(4 * factor * factor, max_pixels)
    if min_pixels > max_pixels:
        raise ValueError(f"min_pixels {min_pixels} exceeds max_pixels {max_pixels}")
    w, h = (max(factor, round(side / factor) * factor) for side in (width, height))
    if w * h > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        w, h = (max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height))
    elif w * h < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        w, h = (math.ceil(side * grow / factor) * factor for side in (width, height))
    # An extreme aspect pins its short side at `factor`; then the area bounds the long one (and after growth both).
    long, short = max(w, h), min(w, h)
    if long * short > max_pixels:
        short = min(short, math.isqrt(max_pixels) // factor * factor)
        long = max_pixels // short // factor * factor
    return (long, short) if w >= h else (short, long)


def _midpoints(start: float, end: float, n: int) -> tuple[float, ...]:
    return tuple(start + (i + 0.5) * (end - start) / n for i in range(n))
