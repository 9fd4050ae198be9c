"""A report about one or more runs, from their files alone: Markdown, JSON and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from paravt.bench.published import COLUMNS, NOTES, PUBLISHED
from paravt.bench.results import read_run
from paravt.bench.summary import BenchSummary, Block, Part, Summary, macro_mean, summarise
from paravt.bench.tables import (
    Table,
    blocks_table,
    failures_table,
    model_names,
    number,
    percent,
    run_names,
    whole,
    with_interval,
)
from paravt.files import write_whole
from paravt.report.bands import Band, plot_bands
from paravt.report.pages import render_html, render_markdown

_ABOUT = (
    "Scores are percent of all rows with a usable reference answer, with 95 % intervals (whole videos resampled). "
    "Wrong, unparsable and failed rows are counted apart; failed ones get no credit and are no wrong answers: the "
    "score without them stands beside the other. Scores of free answers are token F1, or a judge's grade."
)
_CROPS = "Rows sorted by the crops that ran. Harder questions may need more of them: this is no effect of cropping."
_COSTS = (
    "Means per question. Tokens are summed over all requests: a context that is sent again counts again. Seconds are "
    "wall time while other questions were played at the same time, so only runs on the same machine with the same "
    "concurrency can be compared."
)


def write_report(paths: Sequence[str | Path], out: Path) -> list[Summary]:
    """Write `report.md`, `report.json`, `report.html` and their pictures to `out`. Raises DataError if a directory has
    no run, OSError if `out` cannot be written to."""
    summaries = [summarise(read_run(path)) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    names = run_names(summaries)
    rows = [(name, one, bench) for name, one in zip(names, summaries, strict=True) for bench in one.benches]
    pictures = _draw(rows)
    files = {name: f"{name}.png" for name in pictures}
    for name, picture in pictures.items():
        (out / files[name]).write_bytes(picture)
    sections = [
        ("Beside the published table", NOTES, [_beside(summaries, names)], ""),
        ("Scores", "", [blocks_table(summaries, names)], ""),
        ("Accuracy against the number of overview frames", "", _against_frames(rows), "frames"),
        ("Accuracy against the number of crops", _CROPS, [_against_crops(rows)], "crops"),
        ("Tool calls", "Means per row, and shares of rows, without failed rows.", [_means(rows, _CALLS)], ""),
        ("Cost", _COSTS, [_means(rows, _TOKENS), _parallel_against_sequential(rows)], ""),
        ("Breakdowns", "", _breakdowns(rows), ""),
        ("What failed, and what is wrong with the data", "", [failures_table(summaries, names)], ""),
    ]
    shown = [
        {"title": title, "note": note, "tables": kept, "pictures": [name for name in pictures if name == picture]}
        for title, note, tables, picture in sections
        if (kept := [table for table in tables if table.lines])
    ]
    values = {"about": _ABOUT, "sections": shown}
    write_whole(out / "report.html", render_html("eval.html.jinja", values, pictures))
    write_whole(out / "report.md", render_markdown("eval.md.jinja", values, files))
    published = [{"model": model, **dict(zip(COLUMNS, row, strict=True))} for model, row in PUBLISHED.items()]
    data = {"runs": [asdict(summary) for summary in summaries], "published": published}
    write_whole(out / "report.json", json.dumps(data, indent=1) + "\n")
    return summaries


Rows = Sequence[tuple[str, Summary, BenchSummary]]
"""Each benchmark of each run, with the run's name."""

# ---------------------------------------------------------------------------------------------------- tables


def main_block(bench: BenchSummary) -> Block | None:
    """What a benchmark is known by: its multiple-choice rows, else its windows, else its free answers."""
    return bench.blocks[0] if bench.blocks else None


def _beside(summaries: Sequence[Summary], names: Sequence[str]) -> Table:
    lines = []
    for name, one in zip(names, summaries, strict=True):
        blocks = {bench.name: main_block(bench) for bench in one.benches}
        if any(column in blocks for column in COLUMNS):
            lines.append((name, *(_headline(blocks.get(column)) for column in COLUMNS)))
    published = [
        (f"{model} (published)", *("-" if value is None else f"{value:.1f}" for value in row))
        for model, row in PUBLISHED.items()
    ]
    marked = tuple(range(len(lines), len(lines) + len(published)))
    return Table("", ("", *COLUMNS.values()), (*lines, *published) if lines else (), marked)


def _headline(block: Block | None) -> str:
    if block is None:
        return "-"
    return with_interval(block) + ("" if block.macro is None else f", macro {percent(block.macro)}")


def _against_frames(rows: Rows) -> list[Table]:
    """One table for each benchmark that runs of one model and mode have at several K."""
    out = []
    for title, curves in _curves(rows).items():
        budgets = sorted({frames for curve in curves.values() for frames in curve})
        lines = [
            (name, *(with_interval(curve[frames]) if frames in curve else "-" for frames in budgets))
            for name, curve in curves.items()
        ]
        out.append(Table(title, ("", *(f"K = {frames}" for frames in budgets)), tuple(lines)))
    return out


def _curves(rows: Rows) -> dict[str, dict[str, dict[int, Block]]]:
    """By benchmark, by model and mode, by K; benchmarks with one K only are left out."""
    out: dict[str, dict[str, dict[int, Block]]] = {}
    for (_, one, bench), model in zip(rows, model_names([one for _, one, _ in rows]), strict=True):
        if (block := main_block(bench)) is not None and block.accuracy is not None:
            curves, name = out.setdefault(bench.title, {}), f"{model}, {one.mode}"
            if one.frames in curves.get(name, {}):  # they differ in something else
                name = f"{name} ({one.run})"
            curves.setdefault(name, {})[one.frames] = block
    return {
        title: curves
        for title, curves in out.items()
        if len({frames for curve in curves.values() for frames in curve}) > 1
    }


def _against_crops(rows: Rows) -> Table:
    parts = {f"{name}: {bench.title}": bench.by_calls for name, _, bench in rows if set(bench.by_calls) - {"0"}}
    counts = sorted({calls for by_calls in parts.values() for calls in by_calls}, key=int)
    lines = tuple((name, *(_part(by_calls.get(n)) for n in counts)) for name, by_calls in parts.items())
    return Table("", ("", *counts), lines)


def _part(part: Part | None) -> str:
    return "-" if part is None else f"{percent(part.accuracy)} ({part.rows})"


_CALLS = {"calls": number, "rows_with_calls": percent, "most_in_a_turn": number, "bad_calls": number, "turns": number,
          "strict": percent, "forced": percent}  # fmt: skip
_TOKENS = {"prompt_tokens": whole, "cached_tokens": whole, "sampled_tokens": whole, "requests": number,
           "seconds": number, "seconds_median": number, "seconds_crops": number}  # fmt: skip


def _means(rows: Rows, columns: Mapping[str, Callable[[float], str]]) -> Table:
    """`columns` are fields of `Means`, and how they are written."""
    heads = [name.replace("_", " ") + " %" * (written is percent) for name, written in columns.items()]
    lines = [
        (f"{name}: {bench.title}", *(written(getattr(bench.means, field)) for field, written in columns.items()))
        for name, _, bench in rows
        if bench.means is not None
    ]
    return Table("", ("", *heads), tuple(lines))


def _parallel_against_sequential(rows: Rows) -> Table:
    """For each model, K and benchmark that both modes have played: sequential divided by parallel."""
    by_mode = {(one.mode, one.model, one.frames, bench.name): bench for _, one, bench in rows}
    columns = ("prompt_tokens", "sampled_tokens", "requests", "seconds")
    lines = []
    for (mode, model, frames, name), parallel in by_mode.items():
        sequential = by_mode.get(("sequential", model, frames, name))
        if mode != "agentic" or sequential is None or sequential.means is None or parallel.means is None:
            continue
        ratios = [_ratio(getattr(sequential.means, field), getattr(parallel.means, field)) for field in columns]
        scores = " / ".join(percent(b.accuracy) if (b := main_block(s)) else "-" for s in (parallel, sequential))
        lines.append((f"{Path(model).name}, K = {frames}: {parallel.title}", *ratios, scores))
    heads = ("", *(column.replace("_", " ") for column in columns), "score, parallel / sequential")
    return Table("Sequential divided by parallel", heads, tuple(lines))


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def _breakdowns(rows: Rows) -> list[Table]:
    """One table for each key of each block, a column for each run."""
    tables: dict[tuple[str, str, str], dict[str, Mapping[str, Part]]] = {}
    for name, _, bench in rows:
        for block in bench.blocks:
            for key, parts in block.breakdowns.items():
                tables.setdefault((bench.title, block.type, key), {})[name] = parts
    out = []
    for (title, kind, key), runs in tables.items():
        values = dict.fromkeys(value for parts in runs.values() for value in parts)
        lines = [(value, *(_part(parts.get(value)) for parts in runs.values())) for value in values]
        lines.append(("mean of these", *(percent(macro_mean(parts)) for parts in runs.values())))
        out.append(Table(f"{title}, {kind}: by {key}", (key, *runs), tuple(lines)))
    return out


# ---------------------------------------------------------------------------------------------------- pictures


def _draw(rows: Rows) -> dict[str, bytes]:
    pictures = {}
    if curves := _curves(rows):
        panels = {title: {name: _band(curve) for name, curve in lines.items()} for title, lines in curves.items()}
        pictures["frames"] = plot_bands(panels, "K, overview frames", log_x=True)
    crops: dict[str, dict[str, Band]] = {}
    for name, _, bench in rows:
        if len(bench.by_calls) > 1:
            means = [part.accuracy for part in bench.by_calls.values()]
            crops.setdefault(bench.title, {})[name] = ([int(n) for n in bench.by_calls], means, means, means)
    if crops:
        pictures["crops"] = plot_bands(crops, "crops that ran")
    return pictures


def _band(curve: Mapping[int, Block]) -> Band:
    budgets = sorted(curve)
    blocks = [curve[frames] for frames in budgets]
    bounds = [(block.interval.low, block.interval.high) if block.interval else (math.nan, math.nan) for block in blocks]
    lows, highs = zip(*bounds, strict=True)
    return budgets, [math.nan if block.accuracy is None else block.accuracy for block in blocks], lows, highs
