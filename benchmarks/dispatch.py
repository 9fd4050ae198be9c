"""Five crops of a long video: parallel against sequential dispatch, with the shipped checkpoint.

    python benchmarks/dispatch.py [--repeats 5] [--frames 64] [--model DIR]

Both sides answer the same questions about the same generated videos through the local engine, alternately, with fresh
prefix caches; printed are ratios (median over questions) of wall time and of prompt tokens. Only questions where both
sides really ran five crops count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import torch

from paravt.agent import EpisodeConfig, run_episode
from paravt.ask import shipped_model
from paravt.engines.local import LocalEngine
from paravt.lab.demo import longest_question
from paravt.lab.world import write_video
from paravt.types import Dispatch, Episode
from paravt.video import FrameReader

MODES: tuple[Dispatch, ...] = ("parallel", "sequential")


async def play(path: str, question: str, mode: Dispatch, args: argparse.Namespace) -> Episode:
    from paravt.types import Sample

    async with LocalEngine.load(args.model) as engine:
        config = EpisodeConfig(frame_budget=args.frames, dispatch=mode)
        return await run_episode(Sample("q", path, question), engine, config, reader=FrameReader())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--model", default=str(shipped_model()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {"wall time": [], "prompt tokens": []}
    right = dict.fromkeys(MODES, 0)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(args.repeats):
            name = f"bench-{number}"
            path = str(Path(directory) / f"{name}.mp4")
            write_video(name, path)
            asked = longest_question(name, path)
            episodes = {mode: asyncio.run(play(path, asked.sample.question, mode, args)) for mode in MODES}
            for mode, episode in episodes.items():
                right[mode] += episode.answer == asked.sample.answer
            parallel, sequential = episodes["parallel"], episodes["sequential"]
            calls = {mode: episode.tool_calls for mode, episode in episodes.items()}
            print(f"question {number}: crops {calls}, answers {[episodes[m].answer for m in MODES]}")
            if set(calls.values()) != {5}:
                continue
            ratios["wall time"].append(parallel.timings["total"] / sequential.timings["total"])
            tokens = [sum(trace.prompt_tokens for trace in e.traces) for e in (parallel, sequential)]
            ratios["prompt tokens"].append(tokens[0] / tokens[1])
    print(f"right answers of {args.repeats}: {right}")
    for what, values in ratios.items():
        if values:
            print(f"{what}: parallel / sequential = {statistics.median(values):.2f} (median of {len(values)})")


if __name__ == "__main__":
    main()
