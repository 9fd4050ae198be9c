"""Reading windows of an hour-long video: `paravt.video` beside `fetch_video` of qwen-vl-utils, on the same work.

    python benchmarks/video.py --minutes 60 --repeats 3

Both sides return the same number of frames at the same size, from a 640x360 H.264 file at 25 fps with a keyframe
every 250 frames. They run alternately in one process; ours starts with an empty cache and a closed file every time.
Printed are medians of CPU and wall seconds, and their ratios. `fetch_video` needs torchcodec or decord installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from paravt.video import FrameReader, frame_size, overview_times, window_times

WIDTH, HEIGHT, FPS, GOP = 640, 360, 25, 250
SIZE = frame_size(WIDTH, HEIGHT)
WINDOW, FRAMES = 16.0, 16


def write_video(path: Path, minutes: int) -> None:
    """Encodes one minute and repeats its packets: the same demuxing and decoding as an hour that never repeats."""
    frames = 60 * FPS
    rng = np.random.default_rng(0)
    scene = rng.integers(0, 256, (HEIGHT // 8, WIDTH // 4, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    with av.open(os.fspath(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", GOP
        stream.options = {"preset": "veryfast", "crf": "26", "x264-params": "scenecut=0:open-gop=0"}
        packets = []
        for i in range(frames):
            pixels = np.roll(scene, i % GOP * 3, axis=1)[:, :WIDTH].copy()
            grain = rng.integers(-6, 7, (HEIGHT // 2, WIDTH // 2, 1)).repeat(2, axis=0).repeat(2, axis=1)
            frame = av.VideoFrame.from_ndarray((pixels + grain).clip(0, 255).astype(np.uint8), format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, FPS)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        minute = [(bytes(p), p.pts, p.dts, p.is_keyframe) for p in packets]
        for k in range(minutes):
            for data, pts, dts, is_key in minute:
                packet = av.Packet(data)
                packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, FPS), is_key
                packet.pts, packet.dts, packet.duration = pts + k * frames, dts + k * frames, 1
                container.mux(packet)


def group_windows(duration: float, episodes: int = 8, calls: int = 5) -> list[tuple[float, float]]:
    """What a group of episodes looks at: the same places, a few seconds apart."""
    rng = np.random.default_rng(1)
    places = [duration * (i + 0.5) / calls for i in range(calls)]
    starts = [float(place + rng.uniform(-6, 6)) for _ in range(episodes) for place in places]
    return [(start, start + WINDOW) for start in starts]


def ours(path: Path, windows: Sequence[Sequence[float]]) -> int:
    reader = FrameReader()
    frames = sum(len(frames.present) for frames in reader.read_many(path, windows, SIZE))
    reader.close()
    return frames


def theirs(path: Path, windows: Sequence[tuple[float, float]], frames: int) -> int:
    from qwen_vl_utils.vision_process import fetch_video

    size = {"resized_width": SIZE[0], "resized_height": SIZE[1]}
    total = 0
    for start, end in windows:
        # Its window includes the frame at `video_end`.
        row = {"video": os.fspath(path), "video_start": start, "video_end": end - 1 / FPS, "nframes": frames, **size}
        total += len(fetch_video(row, image_patch_size=16))
    return total


def cost(work: Callable[[], int]) -> tuple[float, float, int]:
    """(CPU seconds of all threads, wall seconds, frames)."""
    cpu, wall = time.process_time(), time.perf_counter()
    frames = work()
    return time.process_time() - cpu, time.perf_counter() - wall, frames


def compare(name: str, left: Callable[[], int], right: Callable[[], int] | None, repeats: int) -> None:
    """Prints one line: medians of both sides, measured alternately, and right / left."""
    sides = [left] if right is None else [left, right]
    runs: list[list[tuple[float, float, int]]] = [[] for _ in sides]
    for i in range(repeats):
        for j in sorted(range(len(sides)), reverse=i % 2 == 1):
            runs[j].append(cost(sides[j]))
    cpu, wall = ([statistics.median(run[k] for run in side) for side in runs] for k in (0, 1))
    frames = [side[0][2] for side in runs]
    line = f"{name:<28} ours {cpu[0]:6.2f} cpu {wall[0]:6.2f} wall {frames[0]:4d} frames"
    if right is not None:
        line += f" | fetch_video {cpu[1]:6.2f} cpu {wall[1]:6.2f} wall {frames[1]:4d} frames"
        line += f" | x{cpu[1] / cpu[0]:.1f} cpu x{wall[1] / wall[0]:.1f} wall"
        line += "" if frames[0] == frames[1] else " | FRAME COUNTS DIFFER"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    path = Path(tempfile.gettempdir()) / f"paravt-bench-{WIDTH}x{HEIGHT}-{args.minutes}min.mp4"
    if not path.exists():
        started = time.perf_counter()
        part = path.with_suffix(".part")
        write_video(part, args.minutes)
        part.replace(path)
        print(f"wrote {path} in {time.perf_counter() - started:.0f} s")
    backend = next((name for name in ("torchcodec", "decord") if importlib.util.find_spec(name)), None)
    if backend is None or importlib.util.find_spec("qwen_vl_utils") is None:
        print("fetch_video left out: it needs qwen-vl-utils and torchcodec (or decord)")
    else:
        os.environ["FORCE_QWENVL_VIDEO_READER"] = backend  # read when qwen_vl_utils is imported
        logging.disable(logging.WARNING)
        cost(lambda: theirs(path, [(0.0, WINDOW)], 2))  # imports

    opening, _, _ = cost(lambda: int(FrameReader().info(path).frame_count or 0))
    duration = FrameReader().info(path).duration
    print(
        f"{path.name}: {duration:.1f} s, {path.stat().st_size / 1e6:.0f} MB, opened in {opening:.3f} s; frames {SIZE}"
    )
    print(f"fetch_video reads with {backend}; {os.cpu_count()} cores; medians of {args.repeats} runs, seconds")

    def row(name: str, windows: list[tuple[float, float]], frames: int, times: list[tuple[float, ...]]) -> None:
        right = None if backend is None else lambda: theirs(path, windows, frames)
        compare(name, lambda: ours(path, times), right, args.repeats)

    five = [(start, start + WINDOW) for start in (duration * (i + 0.37) / 5 for i in range(5))]
    row("one 16 s window", five[:1], FRAMES, [window_times(*five[0])])
    row("five 16 s windows", five, FRAMES, [window_times(*w) for w in five])
    group = group_windows(duration)
    row("group of 8 x 5 windows", group, FRAMES, [window_times(*w) for w in group])
    for k in (16, 64):
        row(f"overview of {k} frames", [(0.0, duration)], k, [overview_times(duration, k)])


if __name__ == "__main__":
    main()
