"""Rows of published data on their way to a model: ours against `fetch_video` and the processor, row by row.

    python benchmarks/data.py [--videos 12 --seconds 90 --rows 24 --repeats 3]

Both sides read the same rows (a conversation about a video, at most 64 frames, one a second, each at most 224 x 224 px)
and end with token ids, a mask and the pixel patches that the vision tower takes. The plain way is what a training
script does at first: for each row `fetch_video` of qwen-vl-utils and the processor, when the row is needed. Ours is
what `paravt sft` does: rows are decoded ahead on threads, videos are read by keyframes, and a frame that was decoded
a moment ago (several rows are about one video) is not decoded again.

1. Rows a second, and CPU seconds for a row, each side alone; medians of the ratios, measured alternately.
2. The share of a step that waits for data, beside a device that computes for `--step` seconds a batch. The device is a
   pause: its time is free for the CPU, as that of a GPU is. By default the step takes as long as the plain way takes
   for a batch, so that half of the plain run is waiting.

`fetch_video` needs torchcodec (or decord). Without either our side is measured alone, and the script says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from paravt.ask import shipped_model
from paravt.config import MessageFiles
from paravt.models import QwenVL, load_model
from paravt.ranks import Ranks
from paravt.sft_batches import Batches
from paravt.sft_rows import Corpus
from paravt.video import FrameReader, frame_size

WIDTH, HEIGHT, FPS, GOP = 640, 360, 25, 250
FRAMES, PIXELS = 64, 50_176
SAID = "<think>\nI have seen it.\n</think>\n<answer>nothing</answer>"


def write_video(path: Path, seconds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = rng.integers(0, 256, (HEIGHT // 8, WIDTH // 4, 3), dtype=np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", GOP
        stream.options = {"preset": "ultrafast", "crf": "28", "x264-params": "scenecut=0:open-gop=0"}
        for i in range(seconds * FPS):
            pixels = np.roll(scene, i % GOP * 3, axis=1)[:, :WIDTH].copy()
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = i, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_rows(path: Path, videos: list[Path], count: int) -> list[dict[str, Any]]:
    import json

    rows = []
    for n in range(count):
        video = {"type": "video_url", "video_url": {"url": str(videos[n % len(videos)])}}
        asked = {"role": "user", "content": [video, {"type": "text", "text": f"What is seen at {n} seconds?"}]}
        rows.append({"messages": [asked, {"role": "assistant", "content": SAID}]})
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def plain_row(model: QwenVL, row: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """One row by the tools that come with the model."""
    from qwen_vl_utils.vision_process import fetch_video

    asked, answer = row["messages"]
    url, text = asked["content"][0]["video_url"]["url"], asked["content"][1]["text"]
    element = {"video": url, "fps": 1.0, "max_frames": FRAMES, "resized_width": size[0], "resized_height": size[1]}
    frames, metadata = fetch_video(element, image_patch_size=16, return_video_metadata=True)
    content = [{"type": "video"}, {"type": "text", "text": text}]
    shown = [{"role": "user", "content": content}, answer]
    rendered = model.processor.apply_chat_template(shown, tokenize=False)
    inputs = model.processor(
        text=[rendered], videos=[frames], video_metadata=[metadata], do_resize=False, do_sample_frames=False,
        return_tensors="pt",
    )  # fmt: skip
    prompt = model.processor.apply_chat_template(shown[:1], tokenize=False, add_generation_prompt=True)
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    said = len(model.processor.tokenizer(rendered.removeprefix(prompt))["input_ids"])
    mask[:, -said:] = True
    return {**inputs, "mask": mask}


class Ours:
    """The batches of `paravt sft`, their pixels prepared where the learner prepares them: in the step."""

    def __init__(self, model: QwenVL, path: Path, size: int, workers: int) -> None:
        data = MessageFiles(kind="messages", files=(str(path),), max_frames=FRAMES, max_pixels=PIXELS, workers=workers)
        corpus = Corpus(data, 0)
        self.model, self.size, self.waited = model, size, 0.0
        self.reader = FrameReader(workers=workers)
        builder = corpus.builder(model, self.reader)
        builder.chat.max_pixels = PIXELS  # the small model's own limit is lower
        self.rows = Batches(corpus.stream(), builder, Ranks(), workers, data.prefetch * size)

    def batch(self) -> int:
        """`waited` grows by what a run of `paravt sft` calls `data_wait`."""
        batch = self.rows.take(self.size)
        self.waited += batch.waited
        for trace in batch.mine:
            np.array(trace.ids), np.array(trace.loss_mask)
            self.model.pixel_inputs(trace.images)
        return batch.rows

    def close(self) -> None:
        self.rows.close()
        self.reader.close()


def measured(work: Callable[[], int], count: int) -> tuple[float, float]:
    """(wall, CPU) seconds for a row, over `count` rows."""
    wall, cpu, done = time.perf_counter(), time.process_time(), 0
    while done < count:
        done += work()
    return (time.perf_counter() - wall) / done, (time.process_time() - cpu) / done


def waiting(step: Callable[[], Any], device: float, batches: int) -> tuple[float, float]:
    """(share of the time that a device which computes for `device` seconds a batch waits for the next one, seconds)."""
    waited, started = 0.0, time.perf_counter()
    for _ in range(batches):
        before = time.perf_counter()
        step()
        waited += time.perf_counter() - before
        time.sleep(device)
    seconds = time.perf_counter() - started
    return waited / seconds, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=12)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step", type=float, default=None, help="seconds of the device; default: see above")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    backend = next((name for name in ("torchcodec", "decord") if importlib.util.find_spec(name)), None)
    if backend is None or importlib.util.find_spec("qwen_vl_utils") is None:
        backend = None
        print("the plain way is left out: it needs qwen-vl-utils and torchcodec (or decord)")
    else:
        os.environ["FORCE_QWENVL_VIDEO_READER"] = backend  # read when qwen_vl_utils is imported
    model = load_model(shipped_model())
    model.chat.max_pixels = PIXELS
    size = frame_size(WIDTH, HEIGHT, factor=model.chat.frame_factor, max_pixels=PIXELS)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        videos = [directory / f"{n}.mp4" for n in range(args.videos)]
        for n, video in enumerate(videos):
            write_video(video, args.seconds, n)
        rows = write_rows(directory / "rows.jsonl", videos, args.rows)
        print(
            f"{args.rows} rows about {args.videos} videos of {args.seconds} s ({WIDTH}x{HEIGHT}), frames {size},"
            f" {args.workers} threads, {os.cpu_count()} cores, fetch_video with {backend}; medians of {args.repeats}"
        )
        endless: Iterator[dict[str, Any]] = itertools.cycle(rows)

        def plain() -> int:
            plain_row(model, next(endless), size)
            return 1

        if backend is not None:
            plain()  # imports
        sides: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
        for _ in range(args.repeats):
            ours = Ours(model, directory / "rows.jsonl", args.batch, args.workers)
            sides["ours"].append(measured(ours.batch, args.rows))
            ours.close()
            if backend is not None:
                sides["plain"].append(measured(plain, args.rows))
        for side, runs in sides.items():
            if runs:
                wall, cpu = (statistics.median(run[k] for run in runs) for k in (0, 1))
                print(f"{side:<6} {1 / wall:6.2f} rows/s, {cpu:6.3f} CPU seconds for a row")
        if backend is not None:
            pairs = list(zip(sides["plain"], sides["ours"], strict=True))
            wall, cpu = (statistics.median(plain[k] / ours[k] for plain, ours in pairs) for k in (0, 1))
            print(f"ours is x{wall:.1f} in rows/s and takes 1/{cpu:.1f} of the CPU time")
        slow = statistics.median(run[0] for run in sides["plain"] or sides["ours"])
        device = args.batch * slow if args.step is None else args.step
        count = max(2, 2 * args.rows // args.batch)
        ours = Ours(model, directory / "rows.jsonl", args.batch, args.workers)
        ours.batch()
        ours.waited = 0.0
        share, seconds = waiting(ours.batch, device, count)
        line = (
            f"device {device:.2f} s a batch of {args.batch}: ours waits {share:.0%} of the time"
            f" ({ours.waited / seconds:.0%} for rows, which is the `data_wait_share` of a run; the rest for pixels)"
        )
        ours.close()
        if backend is not None:
            share, _ = waiting(lambda: [plain() for _ in range(args.batch)], device, count)
            line += f", the plain way {share:.0%}"
        print(line)


if __name__ == "__main__":
    main()
