"""From prompts to groups of scored episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from paravt.agent import EpisodeConfig, run_episode
from paravt.algo import draw_frame_budget, group_advantages
from paravt.data import Draw
from paravt.engines.base import Engine, stable_seed
from paravt.errors import DataError
from paravt.judge import Judge
from paravt.rewards import RewardConfig, reward
from paravt.types import Episode, Sample, Score, Trace
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
    number: int
    """Of its prompt, in the order in which the run drew them."""
    episodes: tuple[Episode, ...]

    @property
    def totals(self) -> list[float | None]:
        """None where unscored."""
        return [episode.rewards["total"].value for episode in self.episodes]

    @property
    def informative(self) -> bool:
        return not group_advantages(self.totals).equal

    def staleness(self, version: int) -> int:
        """How many versions the oldest policy that sampled a token of it is behind."""
        segments = (s for episode in self.episodes for trace in episode.traces for s in trace.segments)
        return version - min((s.policy_version for s in segments if s.policy_version is not None), default=version)

    def without_pixels(self) -> Group:
        """To be told to other processes: frames keep their times and keys."""
        return replace(self, episodes=tuple(map(_without_pixels, self.episodes)))


class Rollout:
    """Plays the episodes of groups. `around` is entered around each episode and its judge (`LockstepEngine.episode`).

    At most `max_concurrent` episodes run at a time, of all groups together, in the order in which they were asked for.
    """

    def __init__(
        self,
        engine: Engine,
        reader: FrameSource,
        config: RolloutConfig,
        judge: Judge | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.engine, self._reader, self._config, self._judge, self._around = engine, reader, config, judge, around
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def group(self, draw: Draw, step: int, number: int, budget_weights: Sequence[float] | None = None) -> Group:
        """Everything sampled follows from (run seed, step, sample, visit, number within the group) and the weights of
        the frame budgets (None: those of the configuration), whatever runs at the same time."""
        sample, visit, config = draw.sample, draw.visit, self._config
        budget = config.episode.frame_budget
        if config.frame_budgets is not None:
            weights = config.budget_weights if budget_weights is None else budget_weights
            budget = draw_frame_budget(config.run_seed, sample.id, visit, config.frame_budgets, weights)
        seeds = (stable_seed(config.run_seed, step, visit, n) for n in range(config.group_size))
        configs = [replace(config.episode, frame_budget=budget, seed=seed) for seed in seeds]
        episodes = await asyncio.gather(*(self._episode(sample, each) for each in configs))
        return Group(f"{step}/{sample.id}@{visit}", number, tuple(episodes))

    async def _episode(self, sample: Sample, config: EpisodeConfig) -> Episode:
        async with self._slots:
            with self._around():
                episode = await run_episode(sample, self.engine, config, reader=self._reader)
                graded: Score | None = None
                if self._judge is not None and sample.type == "open" and episode.scored:
                    graded = await self._judge.score(sample, episode.answer)
        return replace(episode, rewards=reward(episode, self._config.reward, graded))


_NO_PIXELS = np.empty((0, 0, 3), np.uint8)


def _without_pixels(episode: Episode) -> Episode:
    crops = [c if c.trace is None else replace(c, trace=_blind(c.trace)) for c in episode.crops]
    return replace(episode, main=_blind(episode.main), crops=tuple(crops))


def _blind(trace: Trace) -> Trace:
    segments = [
        replace(segment, images=tuple(replace(frame, pixels=_NO_PIXELS) for frame in segment.images))
        for segment in trace.segments
    ]
    return replace(trace, segments=tuple(segments))


def check_scored(groups: Sequence[Group]) -> None:
    """Raises DataError if all episodes failed: a run whose videos or server are not there should not go on."""
    episodes = [episode for group in groups for episode in group.episodes]
    if episodes and not any(episode.rewards["total"].scored for episode in episodes):
        failures = [error.message for episode in episodes for error in episode.errors if not error.scored]
        reason = failures[0] if failures else episodes[0].rewards["total"].explanation
        raise DataError(f"none of the {len(episodes)} episodes of the first step could be scored; the first: {reason}")
