"""A stage of supervised training on rows of files, top to bottom.

The update is the learner's: an advantage of 1 on every token that an assistant said, and weights that sum up to 1, make
its policy gradient that of the mean cross-entropy. So packing, sharding, adapters, accumulation, activation
checkpointing and checkpoints are those of reinforcement learning.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paravt.chat import TokenChat
from paravt.checkpoint import check_room, choose_checkpoint, load_checkpoint, save_checkpoint
from paravt.config import MessageFiles, SFTRecipe, Stage, check_precision
from paravt.data.rows import Position, RowSource, RowStream
from paravt.data.tables import find_files, open_groups
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.engines.base import stable_seed
from paravt.errors import DataError
from paravt.learner import Learner, StepMetrics
from paravt.metrics import MetricsFile
from paravt.models import QwenVL
from paravt.questions import play_episodes, read_questions
from paravt.ranks import Ranks
from paravt.sft_batches import Batches
from paravt.sft_progress import StageProgress
from paravt.types import Row, Trace
from paravt.video import FrameReader

_COLUMNS = ("messages", "tools")
_NEEDED = ("messages",)


class Corpus:
    """The files of a stage, and the questions that are asked meanwhile. Raises DataError if one cannot be read."""

    def __init__(self, data: MessageFiles, seed: int) -> None:
        self.data, self._seed = data, seed
        self._groups = [
            [group for path in find_files(source.files) for group in open_groups(path, _NEEDED)]
            for source in data.sources
        ]
        held_out = find_files(data.validation.files) if data.validation else []
        trained = {os.path.realpath(path) for source in data.sources for path in find_files(source.files)}
        if both := [path for path in held_out if os.path.realpath(path) in trained]:
            raise DataError(f"{both[0]}: is trained on, and cannot be validated on; see `paravt data split`")
        wanted = data.episodes
        self.samples = read_questions(wanted.questions)[: wanted.count] if wanted else []
        self._held_out = [group for path in held_out for group in open_groups(path, _NEEDED)]

    def stream(self, position: Position | None = None) -> RowStream:
        seed = self._seed
        sources = [RowSource(groups, stable_seed(seed, i), _COLUMNS) for i, groups in enumerate(self._groups)]
        return RowStream(sources, [source.weight for source in self.data.sources], seed, position)

    def held_out(self) -> RowStream:
        """The rows to validate on: always in the same order."""
        return RowStream([RowSource(self._held_out, 0, _COLUMNS)], [1.0], 0)

    def builder(self, model: QwenVL, reader: FrameReader) -> TraceBuilder:
        """With a tokenizer of its own: it runs beside the model's and those of other builders."""
        chat = TokenChat(copy.deepcopy(model.processor))
        chat.context_limit = model.chat.context_limit
        data = self.data
        root = None if data.root is None else Path(data.root)
        config = RowConfig(root, data.system, data.fps, data.max_frames, data.max_pixels, data.max_tokens)
        return TraceBuilder(chat, reader, config)


def train_on_rows(
    model: QwenVL, stage: Stage, recipe: SFTRecipe, corpus: Corpus, out: Path, progress: StageProgress, ranks: Ranks
) -> Learner:
    """Train one stage, from its newest checkpoint in `out/checkpoints/<name>` if there is one.

    `out/<name>.jsonl` gets a line for each step, `out/<name>.timings.jsonl` how long it took and how much of that was
    waiting for data. Raises DataError if no row can be used, FloatingPointError if a gradient is not finite,
    RecipeError if one process would train all weights in 16 bits.
    """
    dtype, data = model.module.dtype, corpus.data
    check_precision(str(dtype).removeprefix("torch."), adapters=recipe.lora is not None, processes=ranks.size)
    if recipe.freeze_vision:
        model.module.model.visual.requires_grad_(False)
    mesh = ranks.mesh(str(model.device))
    # what is sharded cannot be played with
    copied = mesh is not None and data.episodes is not None
    player = QwenVL(copy.deepcopy(model.module), copy.deepcopy(model.processor)) if copied else model
    torch.manual_seed(stable_seed(recipe.seed, stage.name))  # adapters begin at random, alike in every process
    learner = Learner(model, recipe.learner_config(stage), mesh)
    checkpoints = out / "checkpoints" / stage.name
    found = choose_checkpoint(checkpoints, "auto")
    saved: dict[str, Any] = load_checkpoint(found, learner) if found is not None else {}
    metrics, timings = MetricsFile(out / f"{stage.name}.jsonl"), MetricsFile(out / f"{stage.name}.timings.jsonl")
    if ranks.first:
        check_room(out, checkpoints, learner, recipe.keep_checkpoints)
        for file in (metrics, timings):
            file.cut(learner.steps)
    progress.update(learner.steps)
    reader = FrameReader(workers=data.workers)
    stream = corpus.stream(Position.from_dict(saved["position"]) if saved else None)
    ahead = data.prefetch * stage.batch_size
    rows = Batches(stream, corpus.builder(model, reader), ranks, data.workers, ahead, saved.get("skipped"))
    try:
        while learner.steps < stage.steps:
            started = time.monotonic()
            batch = rows.take(stage.batch_size)
            step = supervised_step(learner, batch.mine, batch.tokens)
            values = _values(step) | {f"skipped/{reason}": float(n) for reason, n in sorted(batch.skipped.items())}
            last = step.step == stage.steps
            if data.validation and (last or step.step % data.validation.every == 0):
                values |= validate(learner, corpus, reader, stage.batch_size, ranks)
            if data.episodes and (last or step.step % data.episodes.every == 0):
                weights = learner.weights(dtype) if copied else None
                seed = recipe.seed
                played = play_episodes(player, corpus.samples, data.episodes, reader, seed, step.step, ranks, weights)
                values |= {f"episodes/{name}": value for name, value in played.items()}
            seconds = time.monotonic() - started
            spent = {"seconds": seconds, "data_wait": batch.waited, "data_wait_share": batch.waited / seconds}
            if ranks.first:
                metrics.add(step.step, values)
                timings.add(step.step, spent)
            progress.say(step.step, values | spent)
            if step.step % recipe.checkpoint_every == 0 and not last:
                save_checkpoint(checkpoints, learner, batch.to_dict(), recipe.keep_checkpoints)
    finally:
        rows.close()
        reader.close()
    return learner


def supervised_row(trace: Trace) -> Row:
    length = len(trace.ids)
    return Row(
        ids=np.array(trace.ids, np.int64),
        mask=np.array(trace.loss_mask, bool),
        logprobs=np.zeros(length),
        advantages=np.ones(length),
        images=trace.images,
        group_id="",
        episode_id="",
        role=trace.role,
        policy_version=0,
    )


def supervised_step(learner: Learner, traces: Sequence[Trace], tokens: int) -> StepMetrics:
    """One update on the mean cross-entropy of all sampled tokens, of which there are `tokens` in all processes."""
    rows = [supervised_row(trace) for trace in traces]
    return learner.step(rows, [row.mask / tokens for row in rows])


def _values(step: StepMetrics) -> dict[str, float]:
    return {
        # |log-probability - 0|: the rows' `logprobs` are zeros, so the mismatch to the sampler is the cross-entropy
        "loss": step.token_means["mismatch"],
        "tokens": step.token_means["tokens"],
        "entropy": step.entropy,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
        "microbatches": step.microbatches,
        "packed_tokens": step.packed_tokens,
    }


def validate(learner: Learner, corpus: Corpus, reader: FrameReader, at_a_time: int, ranks: Ranks) -> dict[str, float]:
    """Mean cross-entropy over the sampled tokens of the held-out rows, and how many were skipped for those that were
    used. Raises DataError if none can be used."""
    assert corpus.data.validation is not None
    stream, wanted = corpus.held_out(), corpus.data.validation.rows
    # a builder of its own: the other one renders meanwhile, on the thread that reads ahead
    builder = corpus.builder(learner.model, reader)
    held_out = Batches(stream, builder, ranks, corpus.data.workers, at_a_time, logged=False)
    total, rows, tokens = 0.0, 0, 0
    try:
        while rows < wanted and (left := stream.size - held_out.drawn):
            batch = held_out.take(min(at_a_time, wanted - rows), left)
            if batch.rows:
                rows, tokens = rows + batch.rows, tokens + batch.tokens
                logprobs = learner.logprobs([supervised_row(trace) for trace in batch.mine])
                total -= sum(float(row.sum()) for row in logprobs)
    finally:
        held_out.close()
    return {"validation/loss": sum(ranks.exchange(total)) / tokens, "validation/skipped": held_out.drawn - rows}


def export_stage(learner: Learner, directory: Path) -> None:
    """The trained model in the Hugging Face layout, adapters merged, and these by themselves in `adapters`."""
    learner.merge_and_export(directory)
    if learner.peft is not None:
        learner.save_adapters(directory / "adapters")
