"""How well a checkpoint does on the lab's task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paravt.agent import EpisodeConfig, run_episode
from paravt.ask import open_engine
from paravt.engines.base import Engine
from paravt.lab.questions import question, true_reports
from paravt.lab.world import WorldReader
from paravt.metrics import mean
from paravt.rewards import accuracy, format_strict
from paravt.types import Dispatch, Episode

_CONCURRENT = 8


@dataclass(frozen=True)
class LabScore:
    dispatch: Dispatch
    accuracy: float
    strict: float
    """Share of episodes in which every turn obeys the format and the last one answers."""
    tool_calls: float
    """Executed calls per episode (kappa)."""
    true_reports: float
    """Mean over the episodes with reports of the share that say what the window's frames show."""
    unscored: int


async def play(
    engine: Engine, dispatch: Dispatch, questions: Sequence[int], frame_budget: int, temperature: float = 0.0
) -> list[Episode]:
    """One episode for each question number, each about a video of its own."""
    config = EpisodeConfig(frame_budget=frame_budget, dispatch=dispatch, temperature=temperature, force_answer=False)
    reader = WorldReader()
    slots = asyncio.Semaphore(_CONCURRENT)

    async def one(number: int) -> Episode:
        async with slots:
            return await run_episode(question(f"score-{number}", 0).sample, engine, config, reader=reader)

    return list(await asyncio.gather(*(one(number) for number in questions)))


def score(episodes: Sequence[Episode]) -> LabScore:
    scored = [episode for episode in episodes if episode.scored]
    return LabScore(
        dispatch=episodes[0].dispatch,
        accuracy=mean(accuracy(episode.sample, episode.answer).value for episode in scored),
        strict=mean(format_strict(episode) for episode in scored),
        tool_calls=mean([episode.tool_calls for episode in scored]),
        true_reports=mean(true_reports(episode) for episode in scored),
        unscored=len(episodes) - len(scored),
    )


def run_score(model: str | None, questions: int, frame_budget: int, console: Console) -> list[LabScore]:
    """Print a table of the three ways of dispatching."""
    engine = open_engine(model)

    async def all_modes() -> list[LabScore]:
        out = []
        modes: tuple[Dispatch, ...] = ("parallel", "sequential", "none")
        for mode in modes:
            episodes: list[Episode] = []
            batches = range(0, questions, _CONCURRENT)
            for first in track(batches, f"{mode}, K = {frame_budget}", console=Console(stderr=True)):
                numbers = range(first, min(first + _CONCURRENT, questions))
                episodes += await play(engine, mode, numbers, frame_budget)
            out.append(score(episodes))
        await engine.close()
        return out

    scores = asyncio.run(all_modes())
    table = Table("dispatch", "accuracy", "strict", "calls", "true reports", "unscored")
    for row in scores:
        table.add_row(
            row.dispatch, f"{row.accuracy:.2f}", f"{row.strict:.2f}", f"{row.tool_calls:.2f}",
            "-" if math.isnan(row.true_reports) else f"{row.true_reports:.2f}", str(row.unscored),
        )  # fmt: skip
    console.print(table)
    console.print(f"{questions} questions, K = {frame_budget}")
    return scores
