"""The columns of the tables, computed from the files of a run: episodes of its evaluation, metrics of its training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paravt.metrics import mean
from paravt.rewards import logged, turn_kinds
from paravt.structure import FORMAT_KINDS
from paravt.types import Episode

Numbers = dict[str, float]
"""By the name of the column; what does not exist for a run is not there."""

_TRAINING: Mapping[str, str] = {
    "f_graded": "f_graded",
    "f_strict": "f_strict",
    "kappa": "kappa",
    "attempts": "attempts",
    "accuracy": "reward/accuracy",
    "entropy": "entropy",
    "junk": "junk",
    "true_reports": "true_reports",
    "main_tokens": "main_tokens",
}
"""Columns `train/<name>` (mean over all steps) and `train/<name>/end`, and where in `metrics.jsonl` they come from."""
_END = 0.1
"""The share of the steps that is the end of a training."""


def evaluation_numbers(episodes: Sequence[Episode]) -> Numbers:
    """Means over scored episodes, all K together unless a column says otherwise.

    `accuracy/K64/tool` and `accuracy/K64/direct` are over the episodes with and without executed calls;
    `kappa/several` over questions that need two or more windows, `accuracy/type/..` and `/family/..` as the samples
    say. Tokens are those of all traces of an episode, prompts included.
    """
    scored = [episode for episode in episodes if episode.scored]
    rows = [logged(episode) for episode in scored]
    out: Numbers = {"episodes": len(episodes), "unscored": len(episodes) - len(scored)}
    for name in rows[0] if rows else ():
        out[name] = mean(row[name] for row in rows)
    out["unanswered"] = 1 - out.get("answered", math.nan)
    attempts, calls = sum(row["attempts"] for row in rows), sum(row["kappa"] for row in rows)
    out["executed"] = calls / attempts if attempts else math.nan
    out |= _accuracies("", scored)
    for budget in sorted({episode.frame_budget for episode in scored}):
        some = [episode for episode in scored if episode.frame_budget == budget]
        out |= _accuracies(f"/K{budget}", some)
        out[f"kappa/K{budget}"] = mean(episode.tool_calls for episode in some)
    kinds = Counter(kind for episode in scored for kind in turn_kinds(episode))
    for kind in FORMAT_KINDS:
        out[f"turns/{kind}"] = kinds[kind] / kinds.total() if kinds else math.nan
    several = [episode for episode in scored if episode.sample.metadata.get("windows", 1) > 1]
    out["kappa/several"] = mean(episode.tool_calls for episode in several)
    out["accuracy/several"] = mean(map(_right, several))
    for key, group in _groups(scored):
        out[f"accuracy/{key}"] = mean(map(_right, group))
    for name in ("true_reports", "faults"):
        out[name] = mean(e.rewards[name].value for e in scored if name in e.rewards)
    out["main_tokens"] = mean(len(episode.main.ids) for episode in scored)
    out["tokens"] = mean(sum(len(trace.ids) for trace in episode.traces) for episode in scored)
    out["sampled_tokens"] = mean(sum(trace.sampled_tokens for trace in episode.traces) for episode in scored)
    return {name: value for name, value in out.items() if math.isfinite(value)}


def _accuracies(suffix: str, episodes: Sequence[Episode]) -> Numbers:
    return {
        f"accuracy{suffix}": mean(map(_right, episodes)),
        f"accuracy{suffix}/tool": mean(_right(episode) for episode in episodes if episode.tool_calls),
        f"accuracy{suffix}/direct": mean(_right(episode) for episode in episodes if not episode.tool_calls),
    }


def _right(episode: Episode) -> float | None:
    return episode.rewards["accuracy"].value


def _groups(episodes: Iterable[Episode]) -> list[tuple[str, list[Episode]]]:
    found: dict[str, list[Episode]] = {}
    for episode in episodes:
        family = episode.sample.metadata.get("family")
        for key in (f"type/{episode.sample.type}", f"family/{family}" if family else ""):
            if key:
                found.setdefault(key, []).append(episode)
    return sorted(found.items())


def training_numbers(metrics: Sequence[Mapping[str, Any]], timings: Sequence[Mapping[str, float]]) -> Numbers:
    """Means over the steps of a training; "end" is the last tenth of them. `train/minutes` is its wall time.

    `metrics` and `timings` (seconds) are the rows of the files of these names, one for each step.
    """
    last = max(1, round(_END * len(metrics)))
    out: Numbers = {}
    for name, source in _TRAINING.items():
        out[f"train/{name}"] = mean(row.get(source) for row in metrics)
        out[f"train/{name}/end"] = mean(row.get(source) for row in metrics[-last:])
    out["train/minutes"] = sum(row["rollout"] + row["learn"] for row in timings) / 60
    out["train/steps"] = len(metrics)
    return {name: value for name, value in out.items() if math.isfinite(value)}
