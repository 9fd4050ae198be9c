"""A stage of supervised training on the lab's traces, for tiny models and short rows.

Plain next-token loss on the tokens that a policy would have sampled. Left out: packing, sharding, adapters; rows are
padded to the longest of their batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from paravt.config import SFTRecipe, Stage, check_precision
from paravt.files import add_line
from paravt.models import QwenVL
from paravt.optim import learning_rate
from paravt.sft_progress import StageProgress
from paravt.types import Frame, Trace


@dataclass(frozen=True)
class PaddedBatch:
    """Right-padded rows. `targets` is True where the token was sampled, so that its prediction is trained."""

    ids_BT: Tensor
    targets_BT: Tensor
    positions_3BT: Tensor
    frames: tuple[Frame, ...]
    """Of all rows, in the order of their placeholders."""


def collate(model: QwenVL, traces: Sequence[Trace]) -> PaddedBatch:
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
    return PaddedBatch(ids_BT.to(to), targets_BT.to(to), positions_3BT.to(to), frames)


def sft_loss(model: QwenVL, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
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


def train_on_traces(
    model: QwenVL, stage: Stage, recipe: SFTRecipe, traces: Iterator[Trace], metrics: Path, progress: StageProgress
) -> None:
    """Train one stage; the JSONL file `metrics` gets a line every `log_every` steps.

    Raises RecipeError for weights of 16 bits.
    """
    module = model.module
    check_precision(str(module.dtype).removeprefix("torch."), adapters=False)
    optimizer = torch.optim.AdamW(module.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    schedule = recipe.optimizer_config(stage)
    metrics.unlink(missing_ok=True)  # of an attempt that did not finish
    module.train()
    losses: list[float] = []
    hits: list[float] = []
    started = time.monotonic()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step)
        loss, correct = sft_loss(model, collate(model, list(islice(traces, stage.batch_size))))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.clip_grad_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"stage {stage.name}, step {step}: the gradient is not finite")
        optimizer.step()
        losses.append(loss.item())
        hits.append(correct.float().mean().item())
        progress.update(step + 1, losses[-1])
        if (step + 1) % recipe.log_every == 0 or step + 1 == stage.steps:
            recent, good = losses[-recipe.log_every :], hits[-recipe.log_every :]
            values = {
                "loss": round(sum(recent) / len(recent), 4),
                "token_accuracy": round(sum(good) / len(good), 4),
                "grad_norm": round(norm.item(), 3),
                "seconds": round(time.monotonic() - started, 1),
            }
            add_line(metrics, json.dumps({"stage": stage.name, "step": step + 1, **values}))
            progress.say(step + 1, values)
    module.eval()
