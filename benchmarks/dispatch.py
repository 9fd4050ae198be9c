"""Several crops of a video: parallel against sequential dispatch.

    python benchmarks/dispatch.py [--repeats 5]

Twice, each time both sides alternately and with fresh caches; printed are medians of the ratios parallel / sequential
of wall time and of prompt tokens.

1. The shipped checkpoint answers questions about generated videos. Its reports are two tokens long and its frames one,
   so that the main agent's own turns are most of the work, and those cannot run in parallel.
2. Proportions of a real model: 5 million parameters, frames of 16 tokens, sub-agents that write reports of
   `--report-tokens` tokens. Weights are random: the turns of the main agent are scripted, and cost what it costs the
   engine to sample as many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paravt.agent import EpisodeConfig, run_episode
from paravt.ask import shipped_model
from paravt.chat import TokenChat
from paravt.engines.base import Completion, Engine, Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.engines.scripted import ScriptedEngine
from paravt.lab.demo import question_of_two_scenes
from paravt.lab.questions import Question
from paravt.lab.teacher import script
from paravt.lab.tiny import TinyShape, build_model, build_processor
from paravt.lab.world import write_video
from paravt.models import load_model
from paravt.models.qwen_vl import QwenVL
from paravt.rewards import accuracy
from paravt.types import Dispatch, Episode
from paravt.video import FrameReader

MODES: tuple[Dispatch, ...] = ("parallel", "sequential")


class ScriptedMain:
    """Sub-agents are sampled by the engine; the main agent's turns are sampled too, and replaced by scripted ones."""

    def __init__(self, engine: LocalEngine, scripted: ScriptedEngine) -> None:
        self._engine, self._scripted = engine, scripted

    @property
    def chat(self) -> TokenChat:
        return self._engine.chat

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        if prompt.trace != "main":
            return await self._engine.generate(prompt, sampling, n)
        wanted = await self._scripted.generate(prompt, sampling, n)
        await self._engine.generate(prompt, Sampling(max_tokens=len(wanted[0].ids)), n)
        return wanted

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        await self._engine.load_policy(version, weights)

    async def close(self) -> None:
        await self._engine.close()


class NeverStops(QwenVL):
    """Reports of full length: with random weights, a stop token would end them anywhere."""

    @property
    def banned_ids(self) -> list[int]:
        return [*super().banned_ids, *self.chat.stop_ids]


def realistic() -> QwenVL:
    shape = TinyShape(hidden=256, layers=4, feed_forward=768, vision_hidden=128, vision_depth=4, frame_side=128)
    tokenizer = load_model(shipped_model()).chat.tokenizer
    return NeverStops(build_model(tokenizer, shape), build_processor(tokenizer, shape))


async def play(engine: Engine, asked: Question, mode: Dispatch, config: EpisodeConfig) -> Episode:
    try:
        return await run_episode(asked.sample, engine, config, reader=FrameReader())
    finally:
        await engine.close()


def measure(
    title: str, questions: list[tuple[str, Question]], engine: Callable[[str, Question, Dispatch], Engine], options: Any
) -> None:
    ratios: dict[str, list[float]] = {"wall time": [], "wall time of the crops": [], "prompt tokens": []}
    right = dict.fromkeys(MODES, 0)
    for name, asked in questions:
        done: dict[Dispatch, Episode] = {}
        for mode in MODES:
            config = EpisodeConfig(dispatch=mode, **options)
            done[mode] = asyncio.run(play(engine(name, asked, mode), asked, mode, config))
            right[mode] += accuracy(asked.sample, done[mode].answer).value == 1
        if any(episode.errors for episode in done.values()) or len({e.tool_calls for e in done.values()}) > 1:
            print(f"  {name}: left out, {[e.tool_calls for e in done.values()]} crops")
            continue
        parallel, sequential = done["parallel"], done["sequential"]
        ratios["wall time"].append(parallel.timings["total"] / sequential.timings["total"])
        ratios["wall time of the crops"].append(parallel.timings["crops"] / sequential.timings["crops"])
        counts = [sum(trace.prompt_tokens for trace in done[mode].traces) for mode in MODES]
        ratios["prompt tokens"].append(counts[0] / counts[1])
    print(f"{title}: {len(ratios['wall time'])} questions, right answers {right}")
    for what, values in ratios.items():
        if values:
            spread = f"({min(values):.2f} - {max(values):.2f})"
            print(f"  {what:24} parallel / sequential = {statistics.median(values):.2f} {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--report-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        questions = []
        for number in range(args.repeats):
            name = f"bench-{number}"
            path = str(Path(directory) / f"{name}.mp4")
            write_video(name, path)
            questions.append((name, question_of_two_scenes(name, path)))
        shipped = load_model(shipped_model())
        measure("shipped checkpoint", questions, lambda *_: LocalEngine(shipped), {"frame_budget": 64})

        model = realistic()

        def scripted_main(name: str, asked: Question, mode: Dispatch) -> Engine:
            steps = {"main": script(asked, mode, 64, name)["main"]}
            return ScriptedMain(LocalEngine(model), ScriptedEngine(shipped.chat, steps))

        options = {"frame_budget": 64, "max_report_tokens": args.report_tokens, "call_timeout": None}
        measure("real proportions", questions, scripted_main, options)


if __name__ == "__main__":
    main()
