"""A stage of supervised training on rows of files, top to bottom.

The update is the learner's: an advantage of 1 on every token that an assistant said, and weights that sum up to 1, make
its policy gradient that of the mean cross-entropy. So packing, adapters, accumulation, activation checkpointing and
checkpoints are those of reinforcement learning.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paravt.chat import TokenChat
from paravt.checkpoint import check_room, choose_checkpoint, load_checkpoint, save_checkpoint
from paravt.config import MessageFiles, SFTRecipe, Stage, check_precision
from paravt.data.batches import Prefetch, batches
from paravt.data.rows import Position, RowSource, RowStream
from paravt.data.skips import RowError
from paravt.data.tables import find_files, open_groups
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.engines.base import stable_seed
from paravt.learner import Learner, StepMetrics
from paravt.metrics import MetricsFile
from paravt.models import QwenVL
from paravt.questions import play_episodes, read_questions
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
    model: QwenVL, stage: Stage, recipe: SFTRecipe, corpus: Corpus, out: Path, on_step: Callable[..., None]
) -> Learner:
    """Train one stage, from its newest checkpoint in `out/checkpoints/<name>` if there is one.

    `out/<name>.jsonl` gets a line for each step, `out/<name>.timings.jsonl` how long it took and how much of that was
    waiting for data. Raises DataError if no row can be used, FloatingPointError if a gradient is not finite,
    RecipeError if all weights are to be trained in 16 bits.
    """
    check_precision(str(model.module.dtype).removeprefix("torch."), adapters=recipe.lora is not None)
    if recipe.freeze_vision:
        model.module.model.visual.requires_grad_(False)
    torch.manual_seed(stable_seed(recipe.seed, stage.name))  # adapters begin at random
    learner = Learner(model, recipe.learner_config(stage))
    checkpoints = out / "checkpoints" / stage.name
    found = choose_checkpoint(checkpoints, "auto")
    saved: dict[str, Any] = load_checkpoint(found, learner) if found is not None else {}
    check_room(out, learner, recipe.keep_checkpoints)
    metrics, timings = MetricsFile(out / f"{stage.name}.jsonl"), MetricsFile(out / f"{stage.name}.timings.jsonl")
    for file in (metrics, timings):
        file.cut(learner.steps)
    on_step(completed=learner.steps)
    reader = FrameReader(workers=corpus.data.workers)
    builder = corpus.builder(model, reader)
    held_out = corpus.builder(model, reader)  # validation renders while `builder` does on the thread that reads ahead
    stream = corpus.stream(Position.from_dict(saved["position"]) if saved else None)
    made = batches(stream, builder, stage.batch_size, corpus.data.workers, saved.get("skipped"))
    ahead = Prefetch(made, corpus.data.prefetch)
    try:
        while learner.steps < stage.steps:
            started, waited = time.monotonic(), ahead.waited
            batch = ahead.take()
            step = supervised_step(learner, batch.traces)
            values = _values(step) | {f"skipped/{reason}": float(n) for reason, n in sorted(batch.skipped.items())}
            if corpus.data.validation and step.step % corpus.data.validation.every == 0:
                values["validation/loss"] = validation_loss(learner, corpus, held_out)
            wanted = corpus.data.episodes
            if wanted is not None and step.step % wanted.every == 0:
                played = play_episodes(model, corpus.samples, wanted, reader, recipe.seed, step.step)
                values |= {f"episodes/{name}": value for name, value in played.items()}
            metrics.add(step.step, values)
            seconds, wait = time.monotonic() - started, ahead.waited - waited
            timings.add(step.step, {"seconds": seconds, "data_wait": wait, "data_wait_share": wait / seconds})
            on_step(completed=step.step, loss=values["loss"])
            if step.step % recipe.checkpoint_every == 0 and step.step < stage.steps:
                save_checkpoint(checkpoints, learner, batch.to_dict(), recipe.keep_checkpoints)
    finally:
        ahead.close()
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


def supervised_step(learner: Learner, traces: tuple[Trace, ...]) -> StepMetrics:
    """One update on the mean cross-entropy of all sampled tokens."""
    rows = [supervised_row(trace) for trace in traces]
    tokens = sum(int(row.mask.sum()) for row in rows)
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


def validation_loss(learner: Learner, corpus: Corpus, builder: TraceBuilder) -> float:
    """Mean cross-entropy over the sampled tokens of the held-out rows. Raises DataError if none can be used."""
    assert corpus.data.validation is not None
    total, tokens = 0.0, 0
    for trace in usable(corpus.held_out(), builder, corpus.data.validation.rows):
        (logprobs,) = learner.logprobs([supervised_row(trace)])
        total -= float(logprobs.sum())
        tokens += sum(trace.loss_mask)
    return total / tokens


def usable(stream: RowStream, builder: TraceBuilder, count: int) -> Iterator[Trace]:
    """The first `count` rows of a pass that can be used, or as many as there are. Raises RowError if there is none."""
    found, last = 0, None
    for _ in range(stream.size):
        drawn = stream.take()
        try:
            if isinstance(drawn.row, RowError):
                raise drawn.row
            trace = builder.build(drawn.row)
        except RowError as error:
            last = error
            continue
        yield trace
        found += 1
        if found == count:
            return
    if not found and last is not None:
        raise last


def export_stage(learner: Learner, directory: Path) -> None:
    """The trained model in the Hugging Face layout, adapters merged, and these by themselves in `adapters`."""
    learner.merge_and_export(directory)
    if learner.peft is not None:
        learner.save_adapters(directory / "adapters")
