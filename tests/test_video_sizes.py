"""Times to look at and sizes to look in: exact midpoints, and Qwen's own sizes where Qwen defines them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.video import frame_size, overview_times, window_times


def test_overview_times_are_midpoints() -> None:
    assert overview_times(8.0, 4) == (1.0, 3.0, 5.0, 7.0)
    assert overview_times(0.1, 1) == (0.05,)
    times = overview_times(0.3, 64)
    assert len(times) == 64
    assert 0 < times[0] < times[-1] < 0.3


@pytest.mark.parametrize(("duration", "k"), [(0.0, 4), (-1.0, 4), (math.nan, 4), (math.inf, 4), (1.0, 0)])
def test_overview_times_refuse(duration: float, k: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        overview_times(duration, k)


def test_window_times() -> None:
    assert window_times(10.0, 14.0) == (10.5, 11.5, 12.5, 13.5)
    assert window_times(10.0, 14.9) == pytest.approx([10.6125, 11.8375, 13.0625, 14.2875])
    assert len(window_times(0.0, 100.0)) == 16
    assert len(window_times(0.0, 100.0, fps=2.0, max_frames=500)) == 200
    assert window_times(5.0, 5.01) == (5.005,)
    assert len(window_times(0.1, 0.3, fps=10.0)) == 2  # 0.3 - 0.1 is a little less than 0.2


@pytest.mark.parametrize(
    ("start", "end", "kwargs"),
    [
        (2.0, 2.0, {}),
        (3.0, 2.0, {}),
        (math.nan, 2.0, {}),
        (0.0, math.inf, {}),
        (0.0, 1.0, {"fps": 0.0}),
        (0.0, 1.0, {"max_frames": 0}),
    ],
)
def test_window_times_refuse(start: float, end: float, kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"needs|must be"):
        window_times(start, end, **kwargs)


sides = st.integers(1, 5000)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.sampled_from([28, 32]), st.sampled_from([1024, 4096, 50_176, 200_704]))
def test_frame_size_keeps_its_bounds(width: int, height: int, factor: int, max_pixels: int) -> None:
    w, h = frame_size(width, height, factor=factor, max_pixels=max_pixels)
    assert w % factor == h % factor == 0
    assert w >= factor
    assert h >= factor
    assert w * h <= max_pixels
    assert frame_size(height, width, factor=factor, max_pixels=max_pixels) == (h, w)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.sampled_from([28, 32]), st.sampled_from([50_176, 200_704]))
def test_frame_size_is_qwens(width: int, height: int, factor: int, max_pixels: int) -> None:
    utils = pytest.importorskip("qwen_vl_utils.vision_process")
    if max(width, height) / min(width, height) > 200:
        return  # Qwen refuses
    h, w = utils.smart_resize(height, width, factor, min_pixels=4 * factor * factor, max_pixels=max_pixels)
    if min(h, w) >= factor and h * w <= max_pixels:  # else Qwen's is no usable size
        assert frame_size(width, height, factor=factor, max_pixels=max_pixels) == (w, h)


def test_frame_size_examples() -> None:
    assert frame_size(19, 19, factor=28, max_pixels=4096) == (56, 56)  # growing by a hair too much leaves it square
    assert frame_size(640, 360) == (288, 160)
    assert frame_size(360, 640) == (160, 288)
    assert frame_size(224, 224) == (224, 224)
    assert frame_size(100_000, 1) == (1568, 32)
    assert frame_size(1, 1) == (64, 64)
    for bad in ({"width": 0, "height": 5}, {"width": 5, "height": 5, "max_pixels": 1000}):
        with pytest.raises(ValueError, match=r"must be|below"):
            frame_size(**bad)
