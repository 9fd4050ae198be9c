"""Pictures of several runs: curves with a band over seeds, and points with names. All give the bytes of a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

Band = tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]
"""x, mean, low and high: equally long; NaN leaves a gap."""


def plot_bands(
    panels: Mapping[str, Mapping[str, Band]], x: str, *, log_x: bool = False, note: str | None = None
) -> bytes:
    """One panel for each title, in it a line with its band for each name; the same name has the same colour. The note
    stands over the names."""
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns) if panels else 1
    figure = Figure(figsize=(4.3 * columns, 3.1 * lines + 0.5), layout="constrained")
    names = list(dict.fromkeys(name for bands in panels.values() for name in bands))
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (title, bands) in zip(axes, panels.items(), strict=False):
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel(x)
        if log_x:
            axis.set_xscale("log", base=2)
        for name, (at, mean, low, high) in bands.items():
            colour = f"C{names.index(name) % 10}"
            style = ("-", "--", ":")[names.index(name) // 10 % 3]
            axis.plot(at, mean, style, color=colour, label=_plain(name), marker="." if len(at) < 8 else "")
            axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    handles = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2 * columns, fontsize="small",
                      title=note, title_fontsize="small")  # fmt: skip
    return _png(figure)


def plot_points(points: Mapping[str, tuple[float, float]], x: str, y: str) -> bytes:
    """Named points, with a line at x = 0. Points with a NaN are left out."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="0.8")
    for name, (at, value) in points.items():
        if math.isfinite(at) and math.isfinite(value):
            axis.plot([at], [value], "o", color="C0")
            axis.annotate(_plain(name), (at, value), textcoords="offset points", xytext=(5, 5), fontsize="small")
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    return _png(figure)


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """The mean of each value and its neighbours, `width` together, without those that are NaN."""
    out = []
    for at in range(len(values)):
        near = [v for v in values[max(0, at - width // 2) : at + width // 2 + 1] if not math.isnan(v)]
        out.append(float(np.mean(near)) if near else math.nan)
    return out


def _plain(name: str) -> str:
    """A name of which no part is taken for a formula, and every character can be drawn."""
    return name.encode("utf-8", "replace").decode().replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100, metadata={"Software": None})
    return out.getvalue()
