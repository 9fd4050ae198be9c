"""Every file of `cases/video`, against its facts and against a plain sequential decode.

What these tests lock: time 0 is the first displayable frame; the frame displayed at t is the last one whose
timestamp is <= t, with its own time and its own pixels; a frame that cannot be decoded, or that the decoder had to
conceal, is missing with a reason; a time at or past the end is missing; a file without video is one clear error.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest

from paravt.errors import VideoError
from paravt.video import FrameReader, open_video, read_frames
from paravt.video.pixels import Converter

CASES = Path(__file__).parent / "cases" / "video"
FACTS = json.loads((CASES / "facts.json").read_text())
VIDEOS = sorted(name for name, fact in FACTS.items() if "duration" in fact)
UNREADABLE = sorted(set(FACTS) - set(VIDEOS))


@cache
def sequential(name: str) -> dict[float, np.ndarray | None]:
    """Time -> pixels (None: flagged corrupt) of every frame of a plain decode from the first packet to the last."""
    frames: dict[int, np.ndarray | None] = {}
    convert = Converter()
    with av.open(str(CASES / name)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            try:
                decoded = packet.decode()
            except av.FFmpegError:
                continue
            for frame in decoded:
                frames[frame.pts] = None if frame.is_corrupt else convert(frame, None)
        base = stream.time_base
    first = min(frames)
    return {float((pts - first) * base): frames[pts] for pts in sorted(frames)}


@pytest.mark.parametrize("name", VIDEOS)
def test_info_matches_facts(name: str) -> None:
    fact, info = FACTS[name], open_video(str(CASES / name))
    assert info.duration == pytest.approx(fact["duration"], abs=1e-6)
    assert info.first_pts == pytest.approx(fact["first_pts"], abs=1e-6)
    assert [info.width, info.height] == fact["displayed_size"]
    assert info.rotation == fact["rotation_counterclockwise"]
    if name == "corrupt.mp4":
        assert info.frame_count == fact["displayable_frames"] + len(fact["packets_without_frame_pts"])
    else:
        assert info.frame_count in (None, fact["displayable_frames"])
    truncated = name == "trunc_fast.mp4"
    assert len(info.warnings) == truncated
    if truncated:
        assert info.warnings == ("file is truncated: the container claims 4.0 s, 2.0 s are readable",)


@pytest.mark.parametrize("name", VIDEOS)
def test_every_frame_is_the_one_of_a_sequential_decode(name: str) -> None:
    truth, fact = sequential(name), FACTS[name]
    assert len(truth) == fact["displayable_frames"]
    assert sum(pixels is None for pixels in truth.values()) == fact["frames_flagged_corrupt"]
    got = read_frames(CASES / name, list(truth))
    for (time, pixels), frame, reason in zip(truth.items(), got.frames, got.missing, strict=True):
        if pixels is None:
            assert frame is None
            assert "conceal" in reason
            continue
        assert frame is not None, reason
        assert frame.time == pytest.approx(time, abs=1e-9)
        assert frame.pixels.dtype == np.uint8
        assert frame.pixels.shape == (*reversed(fact["displayed_size"]), 3)
        # A damaged keyframe is concealed with what came before it, so that what follows depends on the way there.
        if name != "corrupt.mp4" or time < 1.9:
            np.testing.assert_array_equal(frame.pixels, pixels)


@pytest.mark.parametrize("name", [name for name in VIDEOS if name != "corrupt.mp4"])
def test_single_reads_between_frames_give_the_frame_before(name: str) -> None:
    truth = sequential(name)
    times = list(truth)
    ends = [*times[1:], FACTS[name]["duration"]]
    for i in sorted({0, 1, len(times) // 3, len(times) // 2, len(times) - 2, len(times) - 1} & set(range(len(times)))):
        for asked in (times[i] + 1e-4, times[i] + 0.6 * (ends[i] - times[i]), ends[i] - 1e-4):
            (frame,) = read_frames(CASES / name, [asked]).frames
            assert frame is not None
            assert frame.time == pytest.approx(times[i], abs=1e-9)
            np.testing.assert_array_equal(frame.pixels, truth[times[i]])


@pytest.mark.parametrize("name", VIDEOS)
def test_times_outside_are_missing(name: str) -> None:
    duration = FACTS[name]["duration"]
    asked = [duration, duration + 0.01, duration + 1e9, -0.01, math.nan, math.inf, -math.inf]
    got = read_frames(CASES / name, asked)
    assert got.present == ()
    assert len(got.reasons) == len(asked)
    assert "ends at" in got.reasons[0]
    assert "begin" in got.reasons[3]
    assert "not a time" in got.reasons[4]


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_are_one_clear_error(name: str) -> None:
    for read in (open_video, lambda path: read_frames(path, [0.0]), FrameReader().info):
        with pytest.raises(VideoError) as error:
            read(str(CASES / name))
        text = str(error.value)
        assert name in text
        assert "\n" not in text
        expected = "no video stream" if FACTS[name].get("video", 0) is None else ("empty", "not a readable video")
        assert any(part in text for part in ([expected] if isinstance(expected, str) else expected))


def test_paths_that_are_no_videos(tmp_path: Path) -> None:
    text, picture, pipe = tmp_path / "notes.txt", tmp_path / "a.png", tmp_path / "pipe.mp4"
    text.write_text("not a video at all\n" * 100)
    from PIL import Image

    Image.new("RGB", (64, 64)).save(picture)
    os.mkfifo(pipe)
    for path, reason in [
        (tmp_path / "absent.mp4", "no such file"),
        (tmp_path, "directory"),
        (text, "not a"),
        (picture, "not a video"),
        (pipe, "not a regular file"),
        ("bad\0name.mp4", "cannot be read"),
    ]:
        with pytest.raises(VideoError, match=reason):
            open_video(str(path))


def test_odd_names_are_files(tmp_path: Path) -> None:
    path = tmp_path / "http:%20é concat:x.mp4"
    shutil.copy(CASES / "base.mp4", path)
    assert open_video(str(path)).duration == pytest.approx(4.0)


def test_corrupt_misses_exactly_what_cannot_be_decoded() -> None:
    fact, truth = FACTS["corrupt.mp4"], sequential("corrupt.mp4")
    undecodable = fact["packets_without_frame_pts"]
    times = [i / 10 for i in range(40)]
    flagged = [time for time, pixels in truth.items() if pixels is None]
    for got in (
        dict(zip(times, read_frames(CASES / "corrupt.mp4", times).missing, strict=True)),
        {time: read_frames(CASES / "corrupt.mp4", [time]).missing[0] for time in times},
    ):
        assert [t for t in times if "cannot be decoded" in (got[t] or "")] == pytest.approx(undecodable)
        assert [t for t in times if "conceal" in (got[t] or "")] == pytest.approx(flagged)
        assert sum(reason is None for reason in got.values()) == 40 - len(undecodable) - len(flagged)


def test_gap_shows_the_last_frame_before_it() -> None:
    truth = list(sequential("gap.mp4"))
    i = max(range(1, len(truth)), key=lambda i: truth[i] - truth[i - 1])
    before, after = truth[i - 1], truth[i]
    assert after - before > 20
    got = read_frames(CASES / "gap.mp4", [before + 1, (before + after) / 2, after - 0.01, after])
    assert [frame.time for frame in got.present] == pytest.approx([before, before, before, after])


def test_truncated_file_reports_what_is_cut_off() -> None:
    got = read_frames(CASES / "trunc_fast.mp4", [1.9, 1.99, 2.0, 3.0])
    assert [frame.time for frame in got.present] == pytest.approx([1.9, 1.9])
    assert all("ends at 2.000 s" in reason for reason in got.reasons)


def test_rounded_times_still_hit_their_frame() -> None:
    truth = list(sequential("start.ts"))
    got = read_frames(CASES / "start.ts", [round(time, 6) - 5e-7 for time in truth])
    assert [frame.time for frame in got.present] == pytest.approx(truth)


@pytest.mark.parametrize("name", ["base.mp4", "rot90.mp4", "odd444.mp4", "hdr10.mp4"])
def test_sizes_are_those_of_the_upright_frame(name: str) -> None:
    native = read_frames(CASES / name, [1.0]).present[0].pixels
    small = read_frames(CASES / name, [1.0], size=(32, 64)).present[0].pixels
    assert small.shape == (64, 32, 3)
    # Upright both times: block means agree where a transposed or mirrored picture's would not.
    blocks = [[np.array_split(row, 4, axis=1) for row in np.array_split(p, 4, axis=0)] for p in (native, small)]
    means = np.array([[[cell.mean(axis=(0, 1)) for cell in row] for row in grid] for grid in blocks])
    assert np.abs(means[0] - means[1]).max() < 12


def test_rotation_is_counter_clockwise() -> None:
    """rot90.mp4 holds the pictures of base.mp4, to be shown turned by 90 degrees."""
    plain = read_frames(CASES / "base.mp4", [2.0]).present[0].pixels
    turned = read_frames(CASES / "rot90.mp4", [2.0]).present[0].pixels
    np.testing.assert_array_equal(turned, np.rot90(plain, 1))
    assert not np.array_equal(turned, np.rot90(plain, 3))


def test_native_pixels_are_those_of_the_decoder() -> None:
    frame = read_frames(CASES / "base.mp4", [0.0]).present[0]
    with av.open(str(CASES / "base.mp4")) as container:
        plain = next(container.decode(video=0)).to_ndarray(format="rgb24")
    # Not equal: PyAV repeats chroma where we interpolate it. Brightness is the same.
    luma = [pixels @ np.array([0.299, 0.587, 0.114]) for pixels in (frame.pixels, plain)]
    assert np.abs(luma[0] - luma[1]).mean() < 2.0
