"""What a step of training looks like in numbers, and the files they go to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paravt.files import add_line, write_whole
from paravt.learner import StepMetrics
from paravt.rewards import logged, turn_kinds
from paravt.rollout import Group
from paravt.structure import FORMAT_KINDS
from paravt.types import Episode

Truth = Callable[[Episode], float | None]
"""The share of an episode's reports that are true, where the task can tell; None without reports."""


def mean(values: Iterable[float | None]) -> float:
    """Of what there is; NaN if there is nothing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def rollout_metrics(groups: Sequence[Group], truth: Truth | None = None) -> dict[str, float]:
    """Means over scored episodes. The same in every ablation, whatever is paid."""
    every = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in every if episode.rewards["total"].scored]
    out: dict[str, float] = {
        "episodes": len(every),
        "unscored": len(every) - len(scored),
        "groups": len(groups),
        "equal_groups": sum(not group.informative for group in groups),
    }
    for name in sorted({name for episode in scored for name in episode.rewards}):
        out[f"reward/{name}"] = mean(episode.rewards[name].value for episode in scored)
    rows = [logged(episode) for episode in scored]
    for name in rows[0] if rows else ():
        out[name] = mean(row[name] for row in rows)
    right = [(episode, episode.rewards["accuracy"].value) for episode in scored]
    kinds = [kind for episode in scored for kind in turn_kinds(episode)]
    for kind in FORMAT_KINDS:
        out[f"turns/{kind}"] = kinds.count(kind)
    out["accuracy/with_calls"] = mean(value for episode, value in right if episode.tool_calls)
    out["accuracy/without_calls"] = mean(value for episode, value in right if not episode.tool_calls)
    for budget, accuracy in budget_accuracies(groups).items():
        out[f"accuracy/K{budget}"] = accuracy
        out[f"kappa/K{budget}"] = mean(e.tool_calls for e in scored if e.frame_budget == budget)
    out["main_tokens"] = mean(len(episode.main.ids) for episode in scored)
    if truth is not None:
        out["true_reports"] = mean(truth(episode) for episode in scored)
    return out


def budget_accuracies(groups: Sequence[Group]) -> dict[int, float]:
    """By frame budget, over the scored episodes; budgets without one are left out. NaN where no answer was graded."""
    every = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in every if episode.rewards["total"].scored]
    return {
        budget: mean(e.rewards["accuracy"].value for e in scored if e.frame_budget == budget)
        for budget in sorted({episode.frame_budget for episode in scored})
    }


def staleness_metrics(groups: Sequence[Group], version: int, dropped: int) -> dict[str, float]:
    """How many versions the policies that sampled are behind the one that learns, by the oldest token of each group."""
    behind = [group.staleness(version) for group in groups]
    return {"staleness/mean": mean(behind), "staleness/max": max(behind, default=math.nan), "stale_groups": dropped}


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Of main traces and sub-agents."""
    return sum(t.sampled_tokens for group in groups for episode in group.episodes for t in episode.traces)


def learner_metrics(step: StepMetrics) -> dict[str, float]:
    return {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
        "entropy": step.entropy,
        "microbatches": step.microbatches,
        "packed_tokens": step.packed_tokens,
        **{f"token/{name}": value for name, value in step.token_means.items()},
    }


class MetricsFile:
    """A JSONL file with a `step` in every line. NaN is written as null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, step: int, values: dict[str, float]) -> None:
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        add_line(self.path, json.dumps(row))

    def cut(self, last_step: int) -> list[dict[str, Any]]:
        """Drop what comes after a step, a line that was cut off included: a resumed run writes it again. What stays."""
        if not self.path.exists():
            return []
        kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step(line) <= last_step]
        write_whole(self.path, "".join(f"{line}\n" for line in kept))
        return [json.loads(line) for line in kept]


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf
