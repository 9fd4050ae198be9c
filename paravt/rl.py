"""PARA-GRPO: the training loop, top to bottom.

On-policy: every step samples groups of episodes with the current weights, pays them, turns pay and anchor marks into
per-token credit, and makes one update. Left out: more than one update on a batch, and rollouts that run ahead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.text import Text

from paravt.algo import CreditConfig, batch_marks_mean, loss_weights, pass_rate_weights, rows_from_group
from paravt.checkpoint import check_room, choose_checkpoint, load_checkpoint, save_checkpoint
from paravt.config import RLRecipe
from paravt.data import Cursor, SampleStream
from paravt.engines.local import LocalEngine
from paravt.engines.lockstep import LockstepEngine
from paravt.episodes import save_episodes
from paravt.judge import Judge
from paravt.learner import Learner, StepMetrics
from paravt.metrics import MetricsFile, Truth, latest, learner_metrics, rollout_metrics
from paravt.models import load_model
from paravt.provenance import claim_run
from paravt.report import plot_run
from paravt.rollout import Group, rollout
from paravt.spans import byte_reader
from paravt.trackers import open_tracker
from paravt.types import Row, Sample
from paravt.video import FrameSource
from paravt.watch import Watch


def run_rl(
    recipe: RLRecipe,
    out: Path,
    console: Console,
    samples: list[Sample],
    reader: FrameSource,
    truth: Truth | None = None,
    resume: str = "auto",
) -> None:
    """Train by a recipe; `out` gets checkpoints, `metrics.jsonl`, `timings.jsonl`, `curves.png` and episodes.

    A run that was stopped at any moment goes on from its newest complete checkpoint; `resume` can be "never" (it is an
    error if there is one) or the path of a checkpoint to start from. `truth` tells whether sub-agents' reports are
    true, where the task knows. Raises RecipeError if `out` holds a run of another recipe or cannot hold this one.
    """
    with claim_run(out, recipe.model_dump_json(indent=1)):
        asyncio.run(_Run(recipe, out, console, samples, reader, truth).train(resume))


class _Run:
    def __init__(
        self,
        recipe: RLRecipe,
        out: Path,
        console: Console,
        samples: list[Sample],
        reader: FrameSource,
        truth: Truth | None,
    ) -> None:
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        self.recipe, self.out, self.console, self.truth = recipe, out, console, truth
        self.model = load_model(recipe.model.path, recipe.model.dtype, recipe.model.device)
        self.learner = Learner(self.model, recipe.learner_config())
        self.stream = SampleStream(samples, recipe.seed)
        self.metrics, self.timings = MetricsFile(out / "metrics.jsonl"), MetricsFile(out / "timings.jsonl")
        self.watch = Watch(recipe.watch)
        self.trackers = [open_tracker(name, out, recipe.model_dump()) for name in recipe.trackers]
        self.judge = Judge(recipe.judge.url, recipe.judge.model) if recipe.judge else None
        self.config = recipe.rollout_config()
        self.credit = CreditConfig(recipe.anchor, std=recipe.std, subagents=recipe.subagents)
        self.token_bytes = byte_reader(self.model.chat.tokenizer)
        local = LocalEngine(self.model, max_batch=recipe.rollout.max_concurrent)
        self.engine: LocalEngine | LockstepEngine = local
        self.reader = reader
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        if recipe.deterministic:
            self.engine = LockstepEngine(local, reader)
            self.reader, self.around = self.engine.reader, self.engine.episode

    async def train(self, resume: str) -> None:
        self.resume(resume)
        check_room(self.out, self.learner, self.recipe.keep_checkpoints)
        try:
            await self.engine.load_policy(self.learner.steps, None)
            columns = (*Progress.get_default_columns(), TextColumn("{task.fields[shown]}"))
            with Progress(*columns, console=self.console) as progress:
                total, done = self.recipe.steps, self.learner.steps
                task = progress.add_task("rl", total=total, completed=done, shown="")
                stop = False
                while self.learner.steps < total and not stop:
                    values = await self.step(self.learner.steps + 1)
                    progress.update(task, completed=self.learner.steps, shown=_shown(values))
                    stop = self.report(self.learner.steps, values)
        finally:
            await self.engine.close()
            for tracker in self.trackers:
                tracker.close()
            if self.metrics.path.exists():
                plot_run(self.metrics.path, self.out / "curves.png")

    def report(self, step: int, values: dict[str, float]) -> bool:
        """Tell the trackers and the collapse watch; True if the watch ends the run."""
        for tracker in self.trackers:
            tracker.log(step, values)
        warnings = self.watch.look(step, values)
        for warning in warnings:
            self.console.print(Text(f"warning: {warning}", "bold red"))
            with (self.out / "warnings.txt").open("a", encoding="utf-8") as file:
                file.write(warning + "\n")
        return bool(warnings) and self.recipe.watch.stop

    async def step(self, step: int) -> dict[str, float]:
        started = time.monotonic()
        groups = await self.sample_groups(step)
        sampled = time.monotonic()
        rows = self.rows(groups)
        values = rollout_metrics(groups, self.truth)
        values["rows"] = len(rows)
        learned: StepMetrics | None = self.update(rows) if rows else None
        if learned is None:
            self.learner.steps += 1  # nothing to learn from; the step is counted all the same
        else:
            values |= learner_metrics(learned)
        await self.engine.load_policy(self.learner.steps, None)
        self.metrics.add(step, values)
        self.timings.add(step, {"rollout": sampled - started, "learn": time.monotonic() - sampled})
        if step % self.recipe.episodes_every == 0 or step == 1:
            episodes = [(group.id, episode) for group in groups for episode in group.episodes]
            save_episodes(episodes, self.out / "episodes" / f"step-{step:06d}.jsonl")
        if step % self.recipe.checkpoint_every == 0 or step == self.recipe.steps:
            run = {"cursor": dataclasses.asdict(self.stream.cursor)}
            save_checkpoint(self.out / "checkpoints", self.learner, run, self.recipe.keep_checkpoints)
        return values

    async def sample_groups(self, step: int) -> list[Group]:
        """The groups of a step. With refills, groups without a signal are replaced by those of new prompts, but stay
        in the batch themselves: their anchor marks still teach."""
        groups: list[Group] = []
        config = self.config
        if self.recipe.budget_weights == "pass_rate":
            rates = latest(self.metrics.rows(), [f"accuracy/K{budget}" for budget in self.recipe.frame_budgets])
            config = dataclasses.replace(config, budget_weights=tuple(pass_rate_weights(rates)))
        wanted = self.recipe.rollout.prompts
        for _ in range(1 + self.recipe.rollout.max_refills):
            prompts = self.stream.take(wanted)
            groups += await rollout(prompts, self.engine, self.reader, config, step, self.judge, around=self.around)
            wanted = self.recipe.rollout.prompts - sum(group.informative for group in groups)
            if wanted <= 0:
                break
        return groups

    def rows(self, groups: list[Group]) -> list[Row]:
        centre = batch_marks_mean(
            [(group.episodes, group.totals) for group in groups], self.credit.anchor, self.token_bytes
        )
        make = partial(rows_from_group, config=self.credit, token_bytes=self.token_bytes, center=centre)
        return [row for group in groups for row in make(group.episodes, group.totals, group_id=group.id)]

    def update(self, rows: list[Row]) -> StepMetrics:
        recipe = self.recipe
        longest = recipe.episode.max_turns * recipe.episode.max_tokens
        weights = loss_weights(rows, recipe.subagent_weight, recipe.aggregation, max_tokens=longest)
        # One update on a batch: its own forward pass, before anything changes, gives the old log-probabilities.
        reference = self.learner.reference_logprobs(rows) if recipe.loss.kl_coef else None
        return self.learner.step(rows, weights, None, reference)

    def resume(self, resume: str) -> None:
        chosen = choose_checkpoint(self.out / "checkpoints", resume)
        if chosen is not None:
            run = load_checkpoint(chosen, self.learner)
            self.stream.cursor = Cursor(**run["cursor"])
            self.console.print(f"going on from {chosen}")
        self.metrics.cut(self.learner.steps)
        self.timings.cut(self.learner.steps)


_SHOWN = {
    "reward": "reward/total",
    "acc": "reward/accuracy",
    "f": "f_strict",
    "graded": "f_graded",
    "calls": "kappa",
    "entropy": "entropy",
    "kl": "token/kl_old",
    "clipped": "token/clipped_high",
    "equal": "equal_groups",
    "unscored": "unscored",
}


def _shown(values: dict[str, float]) -> str:
    return " ".join(f"{name} {values[key]:.3g}" for name, key in _SHOWN.items() if key in values)
