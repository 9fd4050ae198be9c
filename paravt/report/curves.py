"""Training curves of a run as a PNG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/total", "reward/accuracy")),
    ("format", ("f_strict", "f_graded", "f_release", "junk")),
    ("calls", ("kappa", "attempts")),
    ("accuracy", ("accuracy/with_calls", "accuracy/without_calls")),
    ("entropy", ("entropy",)),
    ("sampler and learner", ("token/mismatch", "token/kl_old", "token/kl_ref")),
)


def plot_run(metrics: Path, out: Path) -> None:
    """Draw `metrics.jsonl` into `out` (PNG). Values that are missing leave gaps."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        axes.set_title(title)
        axes.set_xlabel("step")
        for name in names:
            if any(row.get(name) is not None for row in rows):
                axes.plot([row["step"] for row in rows], _values(rows, name), label=name)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(out, dpi=110)


def _values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]
