"""Attempts of a teacher at questions, and the files that are made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt.data.cold_start import balance, cell_counts
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.types import Trace


@dataclass
class Cost:
    """Of an attempt, or of many. Tokens as endpoints bill them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    requests: int = 0
    seconds: float = 0.0

    def add(self, traces: Sequence[Trace], seconds: float) -> None:
        used = [segment.usage for trace in traces for segment in trace.segments if segment.usage is not None]
        self.prompt_tokens += sum(usage.prompt_tokens for usage in used)
        self.cached_tokens += sum(usage.cached_tokens for usage in used)
        self.sampled_tokens += sum(usage.completion_tokens for usage in used)
        self.requests += len(used)
        self.seconds += seconds


@dataclass(frozen=True)
class Attempt:
    """A line of attempts.jsonl. `outcome`: good, failed, unscored, wrong, not_strict, unusable."""

    id: str
    attempt: int
    sample: str
    """The question's fingerprint."""
    outcome: str
    why: str
    cost: dict[str, Any]
    key: str = ""
    """Of a good one; see `trace_key`."""
    row: dict[str, Any] | None = None
    reports: tuple[dict[str, Any], ...] = ()

    @property
    def final(self) -> bool:
        """What failed is played again by the next run."""
        return self.outcome != "failed"


def write_rows(
    out: Path, attempts: Sequence[Attempt], cost: dict[str, float], skew: float, count: int | None, seed: int
) -> dict[str, Any]:
    """traces.jsonl, reports.jsonl and summary.json of all attempts. Raises DataError if none is good."""
    good, seen = [], set()
    for attempt in attempts:
        if attempt.outcome == "good" and attempt.key not in seen:
            seen.add(attempt.key)
            good.append(attempt)
    rows = [{"id": f"{attempt.id}#{attempt.attempt}", **(attempt.row or {})} for attempt in good]
    taken = balance(rows, skew, count, seed)
    traces = [rows[number] for number in taken]
    reports = [
        {"id": f"{rows[number]['id']}/{index}", **report}
        for number in taken
        for index, report in enumerate(good[number].reports)
    ]
    outcomes = Counter(attempt.outcome for attempt in attempts)
    summary = {
        "questions": len({(attempt.id, attempt.sample) for attempt in attempts}),
        "attempts": len(attempts),
        "outcomes": dict(outcomes.most_common()),
        "duplicates": outcomes["good"] - len(good),
        "left_out_by_balance": len(good) - len(traces),
        "traces": len(traces),
        "reports": len(reports),
        "cells": cell_counts(traces),
        "merged": sum(row["source"]["merged"] > 0 for row in traces),
        "cost": cost,
        "cost_per_trace": {name: value / len(traces) for name, value in cost.items()} if traces else {},
    }
    for name, lines in (("traces", traces), ("reports", reports)):
        write_whole(out / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_whole(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    if not traces:
        reasons = [attempt for attempt in attempts if attempt.outcome != "good"]
        first = f"; the first: {reasons[0].outcome}: {reasons[0].why}" if reasons else ""
        raise DataError(f"{out}: none of {len(attempts)} attempts is good: {dict(outcomes)}{first}")
    return summary
