"""A scripted teacher: runs the product's own agent on worlds and yields the traces to learn from."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from paravt.agent import EpisodeConfig, run_episode
from paravt.chat import TokenChat, text_message, timestamp
from paravt.engines.base import stable_seed
from paravt.engines.scripted import ScriptedEngine, Step
from paravt.lab.world import CELL, DURATION, Question, WorldReader, question, world
from paravt.prompts import Prompts
from paravt.tools import CROP_VIDEO
from paravt.turns import render_call
from paravt.types import Dispatch, Episode, Trace
from paravt.video import overview_times, window_times

Kind = Literal["parallel", "sequential", "none", "crop"]
STRIDE = 4
"""Seconds between the frames of a crop of a cell (16 frames of 64 s)."""


def script(asked: Question, dispatch: Dispatch, frame_budget: int, video: str) -> dict[str, list[Step]]:
    """What an ideal policy says: every cell of the asked range is watched, and the reports are true."""
    answer = asked.sample.answer
    found = f"<think>\nThe reports show {answer}.\n</think>\n<answer>{answer}</answer>"
    if dispatch == "none":
        seen = world(video).visible(overview_times(DURATION, frame_budget), asked.start, asked.end)
        look = f"The frames show {answer}." if seen else "The frames do not show it."
        return {"main": [f"<think>\n{look}\n</think>\n<answer>{answer}</answer>"]}
    reports = [_report(video, cell) for cell in asked.cells]
    if dispatch == "parallel":
        steps: dict[str, list[Step]] = {f"crop/0/{i}": [report] for i, report in enumerate(reports)}
        return {"main": [_calls(asked.start, asked.end, asked.cells), found], **steps}
    steps = {f"crop/{i}/0": [report] for i, report in enumerate(reports)}
    return {"main": [*(_calls(*cell, [cell]) for cell in asked.cells), found], **steps}


def glances(video: str, frames: int, draw: random.Random) -> list[tuple[int, int]]:
    """Two windows of `frames` pictures, one every STRIDE seconds: in the first one there is something to see, in the
    second one there is not."""
    length = frames * STRIDE
    starts = range(0, DURATION - length + 1, STRIDE if length < CELL else CELL)
    seen = [bool(world(video).visible(window_times(a, a + length, 1 / STRIDE))) for a in starts]
    return [
        (a, a + length)
        for wanted in (True, False)
        for a in [draw.choice([a for a, found in zip(starts, seen, strict=True) if found == wanted])]
    ]


def _calls(start: int, end: int, windows: list[tuple[int, int]]) -> str:
    calls = "\n".join(render_call("crop_video", {"start_time": a, "end_time": b}) for a, b in windows)
    return f"<think>\nI watch {start} to {end} seconds.\n</think>\n{calls}"


def _report(video: str, window: tuple[int, int]) -> str:
    return ", ".join(world(video).visible(window_times(*window, 1 / STRIDE))) or "nothing"


def play(asked: Question, chat: TokenChat, config: EpisodeConfig, steps: dict[str, list[Step]]) -> Episode:
    done = asyncio.run(run_episode(asked.sample, ScriptedEngine(chat, steps), config, reader=WorldReader()))
    if done.errors:
        raise RuntimeError(f"the teacher's own episode failed: {done.errors[0]}")
    return done


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of traces, the frame budgets K of their overviews, the cells of a question, the frames of
    "crop" windows."""

    kinds: Mapping[Kind, float]
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    lengths: tuple[int, ...] = (2, 3, 4, 5)
    crop_frames: tuple[int, ...] = (16,)


def traces(chat: TokenChat, mixture: Mixture, seed: int) -> Iterator[Trace]:
    """Endless traces, always the same for the same seed.

    A "crop" episode yields the traces of two sub-agents, the others yield the main trace alone: sub-agents see the
    same in every mode, and most of their windows are empty, which is soon learned.
    """
    draw = random.Random(stable_seed("traces", seed))
    number = 0
    while True:
        number += 1
        video = f"world-{seed}-{number}"
        asked = question(video, 0, lengths=mixture.lengths)
        kind = draw.choices(list(mixture.kinds), list(mixture.kinds.values()))[0]
        budget = draw.choice(mixture.budgets)
        if kind != "crop":
            config = EpisodeConfig(frame_budget=budget, dispatch=kind, call_timeout=None, force_answer=False)
            yield play(asked, chat, config, script(asked, kind, budget, video)).main
            continue
        windows = glances(video, draw.choice(mixture.crop_frames), draw)
        steps: dict[str, list[Step]] = {f"crop/0/{i}": [_report(video, w)] for i, w in enumerate(windows)}
        steps["main"] = [_calls(asked.start, asked.end, windows), "<answer>.</answer>"]
        config = EpisodeConfig(frame_budget=1, crop_fps=1 / STRIDE, call_timeout=None, force_answer=False)
        yield from (c.trace for c in play(asked, chat, config, steps).crops if c.trace is not None)


def phrases(chat: TokenChat) -> list[str]:
    """Texts that are the same in many traces: the prompts' fixed parts, the tools block, calls, timestamps."""
    header = chat.open([text_message("system", "."), text_message("user", ".")], [CROP_VIDEO.schema]).text
    call = render_call("crop_video", {"start_time": 0, "end_time": 1})
    times = [timestamp(second) for second in range(0, DURATION, 2)]
    return [*Prompts().fixed_phrases(), *header.split("."), *re.split(r"\d", call), *times]
