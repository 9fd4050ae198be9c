"""An evaluation of a checkpoint: the product's agent on questions of its own, every question at every K.

The episodes are written with their rewards, and every number of a report is computed from these files.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from paravt.agent import EpisodeConfig, run_episode
from paravt.engines.base import Prompt, stable_seed
from paravt.engines.local import LocalEngine
from paravt.engines.lockstep import LockstepEngine
from paravt.episodes import save_episodes
from paravt.lab.evaluation_recipe import EvaluationRecipe
from paravt.lab.faults import FaultyEngine, forgive
from paravt.lab.logs import episodes_file
from paravt.lab.questions import question, true_reports
from paravt.lab.world import GLYPHS, WorldReader, world
from paravt.models import QwenVL, load_model
from paravt.provenance import claim_run
from paravt.rewards import RewardConfig, reward
from paravt.types import Episode, Sample, Score
from paravt.video import FrameSource


def lab_questions(seed: int, count: int) -> list[Sample]:
    """Questions that no training has seen, each about a video of its own, the same for the same seed.

    `metadata["windows"]` is the number of scenes that have to be watched.
    """
    return [question(f"eval-{seed}-{number}", 0).sample for number in range(count)]


def wrong_report(sample: Sample, seed: int, prompt: Prompt) -> str:
    """A report like a sub-agent's that does not say what its frames show."""
    seen = world(sample.video).visible([frame.time for frame in prompt.images])
    draw = random.Random(stable_seed("wrong", seed, sample.id, prompt.trace))
    return " " + draw.choice([glyph for glyph in GLYPHS if glyph not in seen])


def run_evaluation(recipe: EvaluationRecipe, out: Path, console: Console) -> None:
    """Write `out/episodes/K4.jsonl` and so on; what is there already is not played again.

    Deterministic: the same recipe, the same episodes.
    """
    with claim_run(out, recipe.model_dump_json(indent=1)):
        missing = [budget for budget in recipe.evaluation.budgets if not episodes_file(out, budget).exists()]
        if missing:
            model = load_model(recipe.model.path, recipe.model.dtype, recipe.model.device)
            samples = lab_questions(recipe.seed, recipe.evaluation.questions)
            asyncio.run(_evaluate_all(model, WorldReader(), samples, recipe, missing, out, console))


async def _evaluate_all(
    model: QwenVL,
    reader: FrameSource,
    samples: Sequence[Sample],
    recipe: EvaluationRecipe,
    budgets: Sequence[int],
    out: Path,
    console: Console,
) -> None:
    engine = LockstepEngine(LocalEngine(model), reader)
    try:
        for budget in budgets:
            episodes = await evaluate(engine, samples, recipe, budget)
            save_episodes([(str(budget), episode) for episode in episodes], episodes_file(out, budget))
            console.print(f"K = {budget}: {len(episodes)} episodes")
    finally:
        await engine.close()


async def evaluate(
    engine: LockstepEngine, samples: Sequence[Sample], recipe: EvaluationRecipe, budget: int
) -> list[Episode]:
    """One episode for each sample, with its rewards; `true_reports` is among them where there are reports."""
    evaluation, faults = recipe.evaluation, recipe.evaluation.faults
    values = recipe.episode.model_dump() | {"frame_budget": budget, "dispatch": evaluation.dispatch}
    if evaluation.max_turns is not None:
        values["max_turns"] = evaluation.max_turns
    seed = stable_seed("evaluation", recipe.seed, budget)
    config = EpisodeConfig(**values, temperature=evaluation.temperature, seed=seed)
    slots = asyncio.Semaphore(evaluation.max_concurrent)

    async def one(sample: Sample) -> Episode:
        faulty: FaultyEngine | None = None
        if faults is not None:
            lie = (lambda prompt: wrong_report(sample, recipe.seed, prompt)) if faults.kind == "wrong" else None
            faulty = FaultyEngine(engine, engine.chat, faults.calls, lie)
        async with slots:
            with engine.episode():
                episode = await run_episode(sample, faulty or engine, config, reader=engine.reader)
        episode = forgive(episode)
        rewards = reward(episode, RewardConfig())
        truth = true_reports(episode)
        if truth is not None:
            rewards["true_reports"] = Score(truth)
        if faulty is not None:
            rewards["faults"] = Score(float(faulty.hits))
        return replace(episode, rewards=rewards)

    return list(await asyncio.gather(*(one(sample) for sample in samples)))
