"""Supervised training: plain next-token loss on the tokens that a policy would have sampled.

A recipe is a list of stages. Those on files of rows are `sft_rows`; those on the lab's traces are here, for tiny models
and short rows: no packing, no sharding, no adapters, rows are padded to the longest of their batch.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from paravt.config import MessageFiles, PretrainedModel, SFTRecipe, Stage, check_precision
from paravt.engines.base import stable_seed
from paravt.models import QwenVL, load_model
from paravt.provenance import claim_run
from paravt.sft_rows import Corpus, export_stage, train_on_rows
from paravt.types import Frame, Trace


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. `targets` is True where the token was sampled, so that its prediction is trained."""

    ids_BT: Tensor
    targets_BT: Tensor
    positions_3BT: Tensor
    frames: tuple[Frame, ...]
    """Of all rows, in the order of their placeholders."""


def collate(model: QwenVL, traces: Sequence[Trace]) -> Batch:
    longest = max(len(trace.ids) for trace in traces)
    shape = (len(traces), longest)
    ids_BT = torch.full(shape, model.chat.end_id)
    targets_BT = torch.zeros(shape, dtype=torch.bool)
    positions_3BT = torch.zeros((3, *shape), dtype=torch.long)
    for row, trace in enumerate(traces):
        length = len(trace.ids)
        ids_BT[row, :length] = torch.tensor(trace.ids)
        targets_BT[row, :length] = torch.tensor(trace.loss_mask)
        positions_3BT[:, row, :length] = torch.from_numpy(model.positions(trace.ids, trace.images)[0])
    to = model.device
    frames = tuple(frame for trace in traces for frame in trace.images)
    return Batch(ids_BT.to(to), targets_BT.to(to), positions_3BT.to(to), frames)


def sft_loss(model: QwenVL, batch: Batch) -> tuple[Tensor, Tensor]:
    """`(mean cross-entropy over target tokens, whether each was the most likely token)`.

    The vocabulary head runs at the positions that predict a target and nowhere else.
    """
    features = {"image": model.encode_images(batch.frames)} if batch.frames else None
    hidden_BTD = model.module.model(
        input_ids=batch.ids_BT, position_ids=batch.positions_3BT, mm_encoder_outputs=features, use_cache=False
    ).last_hidden_state
    predicts = batch.targets_BT[:, 1:]
    logits_NV = linear(hidden_BTD[:, :-1][predicts], model.module.lm_head.weight).float()
    targets_N = batch.ids_BT[:, 1:][predicts]
    return cross_entropy(logits_NV, targets_N), logits_NV.argmax(-1) == targets_N


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then a cosine from the peak down to `final_lr_ratio` of it at the last step."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, stage.steps - 1 - stage.warmup_steps)
    low = stage.final_lr_ratio
    return stage.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train_stage(
    model: QwenVL,
    stage: Stage,
    recipe: SFTRecipe,
    traces: Iterator[Trace],
    metrics: Path,
    on_step: Callable[..., None] = lambda *, loss: None,
) -> None:
    """Train one stage; a line of metrics every `log_every` steps is added to the JSONL file `metrics`.

    Raises RecipeError for weights of 16 bits.
    """
    module = model.module
    check_precision(str(module.dtype).removeprefix("torch."), adapters=False)
    optimizer = torch.optim.AdamW(module.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    module.train()
    losses: list[float] = []
    hits: list[float] = []
    started = time.monotonic()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, step)
        loss, correct = sft_loss(model, collate(model, list(islice(traces, stage.batch_size))))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.clip_grad_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"stage {stage.name}, step {step}: the gradient is not finite")
        optimizer.step()
        losses.append(loss.item())
        hits.append(correct.float().mean().item())
        on_step(loss=losses[-1])
        if (step + 1) % recipe.log_every == 0 or step + 1 == stage.steps:
            recent, good = losses[-recipe.log_every :], hits[-recipe.log_every :]
            row = {
                "stage": stage.name,
                "step": step + 1,
                "loss": round(sum(recent) / len(recent), 4),
                "token_accuracy": round(sum(good) / len(good), 4),
                "grad_norm": round(norm.item(), 3),
                "seconds": round(time.monotonic() - started, 1),
            }
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    module.eval()


def run_sft(
    recipe: SFTRecipe,
    out: Path,
    console: Console,
    new_model: Callable[[], QwenVL],
    lab_traces: Callable[[QwenVL, int], Iterator[Trace]],
) -> None:
    """Train all stages of a recipe; each leaves a checkpoint in `out/<name>`, `out/last.txt` names the newest.

    `new_model` gives what the first stage starts from, `lab_traces` the endless data of stage number i, always the same
    for the same i. A run that was stopped goes on after its last finished stage, or within a stage on files from its
    newest checkpoint, to the same weights as if it had not been stopped. Raises RecipeError if `out` holds a run of
    another recipe, DataError if files cannot be read.
    """
    torch.set_num_threads(recipe.threads)
    model: QwenVL | None = None
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with claim_run(out, recipe.model_dump_json(indent=1)), Progress(*columns, console=console) as progress:
        # before a model is loaded: a wrong path should not take a minute to say so
        corpora = {
            s.name: Corpus(s.data, stable_seed(recipe.seed, s.name))
            for s in recipe.stages
            if isinstance(s.data, MessageFiles)
        }
        for number, stage in enumerate(recipe.stages):
            target, unfinished = out / stage.name, out / f"{stage.name}.partial"
            checkpoints = out / "checkpoints" / stage.name
            task = progress.add_task(stage.name, total=stage.steps, loss=math.nan)
            if target.is_dir():
                (out / "last.txt").write_text(stage.name + "\n", encoding="utf-8")  # a killed run may not have said it
                progress.update(task, completed=stage.steps)
                shutil.rmtree(checkpoints, ignore_errors=True)
                continue
            if model is None:
                model = new_model() if number == 0 else _reload(out / recipe.stages[number - 1].name, recipe)
            if stage.name in corpora:
                learner = train_on_rows(model, stage, recipe, corpora[stage.name], out, partial(progress.update, task))
                shutil.rmtree(unfinished, ignore_errors=True)
                export_stage(learner, unfinished)
                model = None  # sharing its layers with the learner's adapters; the next stage takes what was written
            else:
                metrics = out / f"{stage.name}.jsonl"
                metrics.unlink(missing_ok=True)  # of an attempt that did not finish
                train_stage(
                    model, stage, recipe, lab_traces(model, number), metrics, partial(progress.update, task, advance=1)
                )
                shutil.rmtree(unfinished, ignore_errors=True)
                model.save(unfinished)
            unfinished.rename(target)
            (out / "last.txt").write_text(stage.name + "\n", encoding="utf-8")
            shutil.rmtree(checkpoints, ignore_errors=True)


def _reload(checkpoint: Path, recipe: SFTRecipe) -> QwenVL:
    """A finished stage's model, where and as the recipe wants it."""
    if isinstance(recipe.model, PretrainedModel):
        return load_model(checkpoint, recipe.model.dtype, recipe.model.device)
    return load_model(checkpoint, "float32")
