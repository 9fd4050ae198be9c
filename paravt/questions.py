"""The questions that a recipe names, and episodes about them while a model is trained on something else."""

from __future__ import annotations

import asyncio
import logging

from torch import Tensor

from paravt.agent import EpisodeConfig
from paravt.config import DifficultyFilter, QuestionFile, QuestionRows, SampledEpisodes
from paravt.data import Draw, read_question_rows, read_samples
from paravt.data.difficulty import pass_rates, read_difficulty, sift
from paravt.engines.local import LocalEngine
from paravt.engines.lockstep import LockstepEngine
from paravt.errors import DataError
from paravt.metrics import rollout_metrics
from paravt.models import QwenVL
from paravt.ranks import Ranks
from paravt.rewards import RewardConfig
from paravt.rollout import Group, Rollout, RolloutConfig
from paravt.types import Sample
from paravt.video import FrameReader

log = logging.getLogger(__name__)


def read_questions(data: QuestionFile | QuestionRows) -> list[Sample]:
    """Raises DataError if there are none; those that cannot be used or teach nothing are counted in the log."""
    if isinstance(data, QuestionFile):
        samples = read_samples(data.path)
    else:
        samples, skipped = read_question_rows(data.files, data.root)
        for reason, count in skipped.most_common():
            log.warning("skipped %d questions: %s", count, reason)
    return samples if data.difficulty is None else _sifted(samples, data.difficulty)


def _sifted(samples: list[Sample], wanted: DifficultyFilter) -> list[Sample]:
    kept, counts = sift(samples, pass_rates(read_difficulty(wanted.file)), wanted.above, wanted.below)
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    log.warning("difficulty of %d questions: %s", len(samples), told)
    if not kept:
        raise DataError(f"{wanted.file}: leaves no question to learn from: {told}")
    if counts["unmeasured"] == len(samples):
        raise DataError(f"{wanted.file}: has measured none of the {len(samples)} questions")
    return kept


def play_episodes(
    model: QwenVL,
    samples: list[Sample],
    wanted: SampledEpisodes,
    reader: FrameReader,
    seed: int,
    step: int,
    ranks: Ranks,
    weights: dict[str, Tensor] | None = None,
) -> dict[str, float]:
    """One episode for each sample, with the model as it is or with other weights; means as in reinforcement learning.

    In lockstep: the same model gives the same numbers. Each of the `ranks` plays its share, and has the means of all.
    """
    config = RolloutConfig(
        group_size=1,
        episode=EpisodeConfig(**wanted.episode.model_dump(), temperature=wanted.temperature),
        reward=RewardConfig(),
        run_seed=seed,
    )

    async def play() -> list[Group]:
        engine = LockstepEngine(LocalEngine(model), reader)
        try:
            await engine.load_policy(step, weights)
            rollout = Rollout(engine, engine.reader, config, around=engine.episode)
            draws = [Draw(sample, 0, index) for index, sample in enumerate(samples)][ranks.rank :: ranks.size]
            return await asyncio.gather(*(rollout.group(draw, step, draw.index) for draw in draws))
        finally:
            await engine.close()

    model.module.eval()
    told = ranks.exchange([group.without_pixels() for group in asyncio.run(play())])
    return rollout_metrics(sorted((group for part in told for group in part), key=lambda group: group.number))
