"""`paravt plot`: the curves of runs as PNGs for papers, one file for each section of metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from paravt.errors import DataError
from paravt.files import write_whole
from paravt.lab.intervals import estimate
from paravt.report.bands import Band, plot_bands, smooth
from paravt.report.reading import Notes
from paravt.report.schema import Run
from paravt.report.sources import find_sources

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/total", "reward/accuracy", "reward/format", "reward/tool"),
    "format": ("f_strict", "f_graded", "f_release", "junk"),
    "calls": ("kappa", "attempts"),
    "accuracy": ("accuracy/with_calls", "accuracy/without_calls", "true_reports"),
    "learning": ("loss", "entropy", "token/kl_old", "token/kl_ref", "token/mismatch", "grad_norm"),
    "speed": ("tokens_per_second", "rollout", "learn", "staleness/mean", "tokens", "seconds"),
    "supervised": ("loss", "token_accuracy", "validation/loss", "learning_rate"),
}
"""By the name of the file; a section without any of its metrics has none."""
_BY_K = re.compile(r"(accuracy|kappa)/K[0-9]{1,6}")


def plot_runs(paths: Sequence[Path], out: Path | None = None, *, width: int = 5) -> list[Path]:
    """Draw the curves of runs to `out`, or to `plots` beside the first; returns the files. Runs that differ in nothing
    but the seed are one line, their mean, with its 95 % interval; values are means over `width` steps.

    Raises DataError for paths without curves, OSError.
    """
    notes = Notes()
    runs = [source.describe(notes) for source in find_sources(paths, notes) if source.metrics]
    runs = [run for run in runs if run["metrics"] is not None]
    if not runs:
        raise DataError(f"{', '.join(map(str, paths))}: no curves to plot; they are in the metrics of a training")
    supervised = all(run["kind"] == "sft" for run in runs)
    sections = dict(SECTIONS)
    sections.pop("learning" if supervised else "supervised")
    found = {name for run in runs if run["metrics"] for name in run["metrics"]["values"]}
    sections["budgets"] = tuple(sorted((name for name in found if _BY_K.fullmatch(name)), key=_budget))
    directory = out or _beside(paths[0])
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for section, names in sections.items():
        panels = {name: _bands(runs, name, width) for name in names if name in found}
        if panels:
            file = directory / f"{section}.png"
            write_whole(file, plot_bands(panels, "step"))  # never through a link that a run's directory holds
            written.append(file)
    return written


def _beside(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "plots"


def _budget(name: str) -> tuple[str, int]:
    kind, _, budget = name.partition("/K")
    return kind, int(budget)


def _bands(runs: Sequence[Run], name: str, width: int) -> dict[str, Band]:
    """By group of runs."""
    groups: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        metrics = run["metrics"]
        if metrics is not None and name in metrics["values"]:
            values = [math.nan if value is None else value for value in metrics["values"][name]]
            groups.setdefault(run["group"], []).append(dict(zip(metrics["step"], smooth(values, width), strict=True)))
    return {group: _band(curves) for group, curves in groups.items()}


def _band(curves: Sequence[Mapping[int, float]]) -> Band:
    steps = sorted({step for curve in curves for step in curve})
    found = [estimate([v for c in curves if not math.isnan(v := c.get(step, math.nan))]) for step in steps]
    mean = [math.nan if e is None else e.mean for e in found]
    low = [math.nan if e is None or e.low is None else e.low for e in found]
    high = [math.nan if e is None or e.high is None else e.high for e in found]
    return steps, mean, low, high
