"""How often a policy answers questions rightly at each K: what `paravt data difficulty` measures.

What it writes, and what a recipe makes of it, is in `paravt.data.difficulty`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paravt.agent import EpisodeConfig
from paravt.data import Draw
from paravt.data.difficulty import Difficulty, fingerprint, measurement
from paravt.data.journal import Journal
from paravt.engines.base import Engine
from paravt.errors import DataError, RecipeError
from paravt.judge import Judge
from paravt.rewards import RewardConfig
from paravt.rollout import Group, Rollout, RolloutConfig
from paravt.types import Sample
from paravt.video import FrameSource

_PATIENCE = 16
"""Groups without a scored episode after which a run that has scored nothing ends."""


@dataclass(frozen=True)
class DifficultyConfig:
    budgets: Sequence[int]
    """K, each on its own."""
    samples: int
    """Episodes of a question at each K."""
    episode: EpisodeConfig
    """Its seed is the run's; its frame budget is not used."""
    pass_at: float = 0.5
    """The accuracy of a right answer."""
    concurrency: int = 16
    """Episodes at a time."""


async def measure(
    questions: Sequence[Sample],
    engines: Sequence[Engine],
    reader: FrameSource,
    policy: Mapping[str, Any],
    config: DifficultyConfig,
    out: Path,
    judge: Judge | None = None,
    on_done: Callable[[Difficulty], None] = lambda done: None,
) -> list[Difficulty]:
    """Play every question at every K and write a line for each to `out`; what is there is not played again.

    `policy` names who plays; all lines of a file are of one policy with the same settings. Raises RecipeError for a
    file of another one, DataError if nothing can be scored.
    """
    settings = {**policy, **_settings(config, judge)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with Journal(out) as journal:
        known = _known(journal, settings, out)
        wanted = [(sample, budget) for sample in questions for budget in config.budgets
                  if (sample.id, fingerprint(sample), budget) not in known]  # fmt: skip
        rollouts = {
            budget: [Rollout(engine, reader, _rollout_config(config, budget), judge) for engine in engines]
            for budget in config.budgets
        }
        slots = asyncio.Semaphore(max(1, config.concurrency // config.samples))
        alive, lost = [row.accuracy for row in known.values()], list[str]()

        async def one(number: int, sample: Sample, budget: int) -> Difficulty:
            async with slots:
                each = rollouts[budget]
                group = await each[number % len(each)].group(Draw(sample, 0, number), 0, number)
            done = _measured(group, sample, budget, config.pass_at, settings)
            journal.add(asdict(done))
            if done.samples:
                alive.append(done.accuracy)
            else:
                lost.append(_reason(group))
            if not alive and len(lost) == _PATIENCE:
                raise DataError(f"none of the first {_PATIENCE} groups of episodes could be scored: {lost[0]}")
            on_done(done)
            return done

        tasks = [asyncio.ensure_future(one(n, *pair)) for n, pair in enumerate(wanted)]
        try:
            measured = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if lost and not alive:
            raise DataError(f"no episode could be scored: {lost[0]}")
    all_of = known | {(done.id, done.sample, done.frames): done for done in measured}
    keys = ((sample.id, fingerprint(sample), budget) for sample in questions for budget in config.budgets)
    return [all_of[key] for key in keys]


def _settings(config: DifficultyConfig, judge: Judge | None) -> dict[str, Any]:
    """What pass rates depend on, beside the policy."""
    asked = config.episode
    return {
        "samples": config.samples,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "dispatch": asked.dispatch,
        "evidence": asked.evidence,
        "max_turns": asked.max_turns,
        "max_tokens": asked.max_tokens,
        "pass_at": config.pass_at,
        "judge": None if judge is None else judge.model,
    }


def _known(journal: Journal, settings: Mapping[str, Any], out: Path) -> dict[tuple[str, str, int], Difficulty]:
    """What was measured before, by id, fingerprint and K; what failed is played again. Raises RecipeError for
    measurements with other settings, DataError for a line that is none."""
    known = {}
    for number, row in enumerate(journal.rows, 1):
        if row.get("policy") != settings:
            raise RecipeError(f"{out}:{number}: measured with another policy or other settings; choose another --out")
        found = measurement(row, out, number)
        if found.samples:
            known[found.id, found.sample, found.frames] = found
    return known


def _rollout_config(config: DifficultyConfig, budget: int) -> RolloutConfig:
    asked = config.episode
    return RolloutConfig(
        group_size=config.samples,
        episode=replace(asked, frame_budget=budget, max_frames=max(asked.max_frames, 2 * budget)),
        reward=RewardConfig(),
        run_seed=asked.seed,
        max_concurrent=config.concurrency,
    )


def _measured(group: Group, sample: Sample, budget: int, pass_at: float, settings: Mapping[str, Any]) -> Difficulty:
    scores = [episode.rewards["accuracy"].value for episode in group.episodes]
    scored = [score for score in scores if score is not None]
    return Difficulty(
        id=sample.id,
        sample=fingerprint(sample),
        frames=budget,
        samples=len(scored),
        passed=sum(score >= pass_at for score in scored),
        accuracy=sum(scored) / len(scored) if scored else None,
        failed=len(scores) - len(scored),
        policy=settings,
    )


def _reason(group: Group) -> str:
    """Why the first episode of a group is unscored."""
    first = group.episodes[0]
    return next((e.message for e in first.errors if not e.scored), first.rewards["accuracy"].explanation)
