"""`paravt plot`: the curves of runs as PNGs for papers, one file for each section of metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from paravt.errors import DataError
from paravt.files import write_whole
from paravt.lab.intervals import Estimate, estimate
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
_UNITS = {"tokens_per_second": "tokens/s", "rollout": "s", "learn": "s", "seconds": "s", "staleness/mean": "steps"}

Spread = Literal["95", "range"]
"""What a band is: the 95 % interval of the mean, or from the lowest to the highest seed."""


def plot_runs(paths: Sequence[Path], out: Path | None = None, *, width: int = 5, spread: Spread = "95") -> list[Path]:
    """Draw the curves of runs to `out`, or to `plots` beside the first; returns the files. Runs that differ in nothing
    but the seed are one line, their mean, with a band; values are means over `width` steps.

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
    note = _note(runs, width, spread)
    written = []
    for section, names in sections.items():
        panels = {_title(name): _bands(runs, name, width, spread) for name in names if name in found}
        if panels:
            file = directory / f"{section}.png"
            # never through a link that a run's directory holds
            write_whole(file, plot_bands(panels, "step", note=note))
            written.append(file)
    return written


def _beside(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "plots"


def _budget(name: str) -> tuple[str, int]:
    kind, _, budget = name.partition("/K")
    return kind, int(budget)


def _title(name: str) -> str:
    return f"{name}, {_UNITS[name]}" if name in _UNITS else name


def _note(runs: Sequence[Run], width: int, spread: Spread) -> str | None:
    """How the values came about, in words; None for values as they are."""
    groups = [run["group"] for run in runs]
    band = "the 95 % interval" if spread == "95" else "from the lowest to the highest"
    said = [f"each value the mean of {width} steps"] if width > 1 else []
    said += [f"lines: means over seeds, bands: {band}"] if len(set(groups)) < len(groups) else []
    return "; ".join(said) or None


def _bands(runs: Sequence[Run], name: str, width: int, spread: Spread) -> dict[str, Band]:
    """By group of runs."""
    groups: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        metrics = run["metrics"]
        if metrics is not None and name in metrics["values"]:
            values = [math.nan if value is None else value for value in metrics["values"][name]]
            groups.setdefault(run["group"], []).append(dict(zip(metrics["step"], smooth(values, width), strict=True)))
    return {group: _band(curves, spread) for group, curves in groups.items()}


def _band(curves: Sequence[Mapping[int, float]], spread: Spread) -> Band:
    steps = sorted({step for curve in curves for step in curve})
    found = [estimate([v for c in curves if not math.isnan(v := c.get(step, math.nan))]) for step in steps]
    mean = [math.nan if e is None else e.mean for e in found]
    edges = [_edges(e, spread) for e in found]
    return steps, mean, [low for low, _ in edges], [high for _, high in edges]


def _edges(found: Estimate | None, spread: Spread) -> tuple[float, float]:
    """NaN where a single seed has a value: there is no band."""
    if found is None or found.low is None or found.high is None:
        return math.nan, math.nan
    return (found.low, found.high) if spread == "95" else (min(found.values), max(found.values))
