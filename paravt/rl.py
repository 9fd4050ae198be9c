"""PARA-GRPO: the training loop, top to bottom.

Every step takes groups of episodes, pays them, turns pay and anchor marks into per-token credit, and makes one update.
The groups are sampled with the weights that are updated, or with slightly older ones (`rollout.max_staleness`). Under
torchrun or Ray every process does the same on its share of the prompts, and the update is that of one process with all
of them. Left out: more than one update on a batch.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from paravt.algo import CreditConfig, LossCounts, batch_marks_mean, loss_counts, loss_weights, rows_from_group
from paravt.checkpoint import check_room, choose_checkpoint, load_checkpoint, save_checkpoint
from paravt.config import RLRecipe, VLLMEngineRecipe, check_precision
from paravt.credit import TraceCredit, group_credit
from paravt.data import Cursor, SampleStream
from paravt.learner import Learner, StepMetrics
from paravt.metrics import Truth, learner_metrics, rollout_metrics, sampled_tokens, staleness_metrics
from paravt.models import QwenVL, load_model
from paravt.provenance import claim_run
from paravt.ranks import Ranks
from paravt.record import Record
from paravt.rollout import Group, check_scored
from paravt.run_engine import Hosts, open_rollout, open_vllm
from paravt.sampler import Batch, Sampler
from paravt.spans import byte_reader
from paravt.trackers import check_trackers
from paravt.types import Row, Sample
from paravt.video import FrameSource
from paravt.watch import check_mismatch


def run_rl(
    recipe: RLRecipe,
    out: Path,
    console: Console,
    samples: list[Sample],
    reader: FrameSource,
    ranks: Ranks,
    truth: Truth | None = None,
    resume: str = "auto",
    hosts: Hosts | None = None,
) -> None:
    """Train by a recipe; `out` gets checkpoints, `metrics.jsonl`, `timings.jsonl`, `curves.png` and episodes.

    A run that was stopped at any moment goes on from its newest complete checkpoint, on any number of processes;
    `resume` can be "never" (it is an error if there is one) or the path of a checkpoint to start from. `truth` tells
    whether sub-agents' reports are true, where the task knows. Servers that the run starts are put on `hosts`, or on
    this machine. All `ranks` call this, with the same arguments.
    Raises RecipeError if `out` holds a run of another recipe or cannot hold this one, and where one process would
    train all weights in 16 bits.
    """
    check_trackers(recipe.trackers)
    check_precision(recipe.model.dtype, adapters=recipe.lora is not None, processes=ranks.size)
    with claim_run(out, recipe.model_dump_json(indent=1)) if ranks.first else nullcontext():
        asyncio.run(_Run(recipe, out, console, samples, reader, ranks, truth, hosts).train(resume))


class _Run:
    def __init__(
        self,
        recipe: RLRecipe,
        out: Path,
        console: Console,
        samples: list[Sample],
        reader: FrameSource,
        ranks: Ranks,
        truth: Truth | None,
        hosts: Hosts | None,
    ) -> None:
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        self.recipe, self.out, self.ranks, self.truth = recipe, out, ranks, truth
        self.console = console if ranks.first else Console(quiet=True)
        self.stream = SampleStream(samples, recipe.seed)
        device = ranks.device(recipe.model.device)
        model = sampled = load_model(recipe.model.path, recipe.model.dtype, device)
        self.dtype = model.module.dtype
        loaded = str(self.dtype).removeprefix("torch.")  # of `auto` it is known only now
        check_precision(loaded, adapters=recipe.lora is not None, processes=ranks.size)
        mesh = ranks.mesh(device)
        # A learner that is sharded, or that works while episodes run, leaves the engine a model of its own.
        served = isinstance(recipe.engine, VLLMEngineRecipe)
        self.copied = served or mesh is not None or recipe.rollout.max_staleness > 0
        if self.copied and not served:
            sampled = QwenVL(copy.deepcopy(model.module), copy.deepcopy(model.processor))
        torch.manual_seed(recipe.seed)  # adapters begin at random, alike in every process
        self.learner = Learner(model, recipe.learner_config(), mesh)
        self.credit = CreditConfig(recipe.anchor, std=recipe.std, subagents=recipe.subagents)
        self.token_bytes = byte_reader(model.chat.tokenizer)
        servers = None
        if isinstance(recipe.engine, VLLMEngineRecipe):
            servers = open_vllm(recipe, recipe.engine, model, out, ranks, self.learner, hosts)
        rollout = open_rollout(recipe, sampled, reader, servers)
        self.engine, self.sampler = rollout.engine, Sampler(rollout, self.stream, recipe, ranks)

    async def train(self, resume: str) -> None:
        try:
            await self.ranks.call(self.resume, resume)
            await self.engine.load_policy(self.learner.steps, await self.ranks.call(self.weights))
            written = (
                Record(self.recipe, self.out, self.console, self.learner.steps) if self.ranks.first else nullcontext()
            )
            with written as record:
                stop = False
                while self.learner.steps < self.recipe.steps and not stop:
                    stop = await self.step(self.learner.steps + 1, record)
        finally:
            await self.sampler.close()
            await self.engine.close()

    async def step(self, step: int, record: Record | None) -> bool:
        """One update, and all that goes with it. True if the run is to end."""
        started = time.monotonic()
        batch = await self.sampler.batch(self.learner.steps)
        if step == 1:
            check_scored(batch.everyone)
        sampled = time.monotonic()
        make = self.row_maker(batch)
        rows, learned = await self.learn(batch, make)
        if learned is not None:
            check_mismatch(self.recipe.watch, step, learned.token_means)
        await self.engine.load_policy(self.learner.steps, await self.ranks.call(self.weights))
        ended = time.monotonic()
        stop = False
        if record is not None:
            values = rollout_metrics(batch.everyone, self.truth) | {"rows": rows}
            values |= learner_metrics(learned) if learned is not None else {}
            values |= staleness_metrics(batch.everyone, step - 1, batch.stale)
            speed = sampled_tokens(batch.everyone) / (ended - started)
            timings = {"rollout": sampled - started, "learn": ended - sampled, "tokens_per_second": speed}
            credit = self.credits(batch, make) if record.saves(step) else ()
            stop = record.add(step, values, timings, batch.everyone, credit)
        stop = (await self.ranks.gather(stop))[0]
        if stop or step % self.recipe.checkpoint_every == 0 or step == self.recipe.steps:
            await self.save()
        return stop

    def row_maker(self, batch: Batch) -> Callable[[Group], list[Row]]:
        """Makes the rows of a group of the batch, whoever's it is."""
        groups = [(group.episodes, group.totals) for group in batch.everyone]
        centre = batch_marks_mean(groups, self.credit.anchor, self.token_bytes)
        make = partial(rows_from_group, config=self.credit, token_bytes=self.token_bytes, center=centre)
        return lambda group: make(group.episodes, group.totals, group_id=group.id)

    def credits(self, batch: Batch, make: Callable[[Group], list[Row]]) -> list[dict[str, TraceCredit]]:
        """Of all episodes of a batch, for people to look at."""
        paid = (group_credit(group.episodes, make(group), group.id, self.token_bytes) for group in batch.everyone)
        return [credit for group in paid for credit in group]

    async def learn(self, batch: Batch, make: Callable[[Group], list[Row]]) -> tuple[int, StepMetrics | None]:
        """The number of rows in all processes, and what the update did; None if there is nothing to learn from."""
        rows = [row for group in batch.mine for row in make(group)]
        counts = sum(await self.ranks.gather(loss_counts(rows)), LossCounts())
        if not counts.rows:
            self.learner.steps += 1  # the step is counted all the same
            return 0, None
        return counts.rows, await self.ranks.call(self.update, rows, counts)

    def update(self, rows: list[Row], counts: LossCounts) -> StepMetrics:
        recipe = self.recipe
        longest = recipe.episode.max_turns * recipe.episode.max_tokens
        weights = loss_weights(rows, recipe.subagent_weight, recipe.aggregation, counts=counts, max_tokens=longest)
        # One update on a batch: its own forward pass, before anything changes, gives the old log-probabilities. The
        # sampler's, of older weights maybe, are in the rows.
        reference = self.learner.reference_logprobs(rows) if recipe.loss.kl_coef else None
        return self.learner.step(rows, weights, None, reference)

    def weights(self) -> dict[str, Tensor] | None:
        """For the engine; None if it shares the learner's model."""
        return self.learner.weights(self.dtype) if self.copied else None

    async def save(self) -> None:
        run = {"cursor": dataclasses.asdict(await self.sampler.cursor()), "accuracies": self.sampler.accuracies}
        directory, keep = self.out / "checkpoints", self.recipe.keep_checkpoints
        await self.ranks.call(save_checkpoint, directory, self.learner, run, keep)

    def resume(self, resume: str) -> None:
        chosen = choose_checkpoint(self.out / "checkpoints", resume)
        if chosen is not None:
            run = load_checkpoint(chosen, self.learner)
            self.stream.cursor = Cursor.restored(run["cursor"])
            self.sampler.accuracies = {int(budget): value for budget, value in run["accuracies"].items()}
            self.console.print(f"going on from {chosen}")
        if self.ranks.first:
            check_room(self.out, self.out / "checkpoints", self.learner, self.recipe.keep_checkpoints)


if __name__ == "__main__":  # `torchrun -m paravt.rl RECIPE --out DIR`
    sys.argv.insert(1, "rl")
    runpy.run_module("paravt", run_name="__main__")
