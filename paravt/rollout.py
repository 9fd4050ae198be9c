"""From prompts to groups of scored episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from paravt.agent import EpisodeConfig, run_episode
from paravt.algo import draw_frame_budget, group_advantages
from paravt.engines.base import Engine, stable_seed
from paravt.judge import Judge
from paravt.rewards import RewardConfig, reward
from paravt.types import Episode, Sample, Score
from paravt.video import FrameSource


@dataclass(frozen=True)
class RolloutConfig:
    group_size: int
    episode: EpisodeConfig
    reward: RewardConfig
    run_seed: int
    frame_budgets: tuple[int, ...] | None = None
    """Of nFrames gating; None: `episode.frame_budget` always."""
    budget_weights: tuple[float, ...] | None = None
    """Of `frame_budgets`; None: uniform."""
    max_concurrent: int = 64


@dataclass(frozen=True)
class Group:
    """The G episodes of one prompt at one visit, with their rewards by term."""

    id: str
    episodes: tuple[Episode, ...]

    @property
    def totals(self) -> list[float | None]:
        """None where unscored."""
        return [episode.rewards["total"].value for episode in self.episodes]

    @property
    def informative(self) -> bool:
        return not group_advantages(self.totals).equal


async def rollout(
    prompts: Sequence[tuple[Sample, int]],
    engine: Engine,
    reader: FrameSource,
    config: RolloutConfig,
    step: int,
    judge: Judge | None = None,
    on_episode: Callable[[Episode], None] = lambda episode: None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Group]:
    """One group for each prompt (a sample and the number of its visit), in their order.

    Everything sampled follows from (run seed, step, sample, visit, number within the group), whatever runs at the
    same time. `around` is entered around each episode and its judge (`LockstepEngine.episode`).
    """
    slots = asyncio.Semaphore(config.max_concurrent)

    async def one(sample: Sample, visit: int, number: int) -> Episode:
        budget = config.episode.frame_budget
        if config.frame_budgets is not None:
            budget = draw_frame_budget(config.run_seed, sample.id, visit, config.frame_budgets, config.budget_weights)
        seed = stable_seed(config.run_seed, step, visit, number)
        async with slots:
            with around():
                episode = await run_episode(
                    sample, engine, replace(config.episode, frame_budget=budget, seed=seed), reader=reader
                )
                graded: Score | None = None
                if judge is not None and sample.type == "open" and episode.scored:
                    graded = await judge.score(sample, episode.answer)
        episode = replace(episode, rewards=reward(episode, config.reward, graded))
        on_episode(episode)
        return episode

    groups = [asyncio.gather(*(one(*prompt, number) for number in range(config.group_size))) for prompt in prompts]
    return [
        Group(f"{step}/{sample.id}@{visit}", tuple(await group))
        for (sample, visit), group in zip(prompts, groups, strict=True)
    ]
