"""A report about one or more runs, from their files alone: Markdown, JSON and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paravt.bench.published import COLUMNS, NOTES, PUBLISHED
from paravt.bench.results import read_run
from paravt.bench.summary import BenchSummary, Block, Part, Summary, summarise
from paravt.bench.tables import (
    Table,
    blocks_table,
    failures_table,
    model_names,
    number,
    percent,
    run_names,
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
    pictures = _draw(summaries, names)
    files = {name: f"{name}.png" for name in pictures}
    for name, picture in pictures.items():
        (out / files[name]).write_bytes(picture)
    values = {"about": _ABOUT, "sections": _sections(summaries, names, list(pictures))}
    write_whole(out / "report.html", render_html("eval.html.jinja", values, pictures))
    write_whole(out / "report.md", render_markdown("eval.md.jinja", values, files))
    published = [{"model": model, **dict(zip(COLUMNS, row, strict=True))} for model, row in PUBLISHED.items()]
    data = {"runs": [asdict(summary) for summary in summaries], "published": published}
    write_whole(out / "report.json", json.dumps(data, indent=1) + "\n")
    return summaries


def _sections(summaries: Sequence[Summary], names: Sequence[str], pictures: Sequence[str]) -> list[dict[str, Any]]:
    sections = [
        _section("Beside the published table", NOTES, [_beside(summaries, names)]),
        _section("Scores", "", [blocks_table(summaries, names)]),
        _section(
            "Accuracy against the number of overview frames",
            "",
            _against_frames(summaries),
            [name for name in pictures if name == "frames"],
        ),
        _section(
            "Accuracy against the number of crops",
            "Rows sorted by the crops that ran. Harder questions may need more of them: this is no effect of cropping.",
            _against_crops(summaries, names),
            [name for name in pictures if name == "crops"],
        ),
        _section("Tool calls", "Means per row, and shares of rows, without failed rows.", _tools(summaries, names)),
        _section("Cost", _COSTS, [*_costs(summaries, names), *_parallel_against_sequential(summaries)]),
        _section("Breakdowns", "", _breakdowns(summaries, names)),
        _section("What failed, and what is wrong with the data", "", [failures_table(summaries, names)]),
    ]
    return [section for section in sections if section["tables"]]


def _section(title: str, note: str, tables: Sequence[Table | None], pictures: Sequence[str] = ()) -> dict[str, Any]:
    kept = [table for table in tables if table is not None and table.lines]
    return {"title": title, "note": note, "tables": kept, "pictures": list(pictures)}


# ---------------------------------------------------------------------------------------------------- tables


def main_block(bench: BenchSummary) -> Block | None:
    """What a benchmark is known by: its multiple-choice rows, else its windows, else its free answers."""
    return bench.blocks[0] if bench.blocks else None


def _beside(summaries: Sequence[Summary], names: Sequence[str]) -> Table | None:
    lines = []
    for name, one in zip(names, summaries, strict=True):
        blocks = {bench.name: main_block(bench) for bench in one.benches}
        if any(column in blocks for column in COLUMNS):
            cells = [_headline(blocks.get(column)) for column in COLUMNS]
            lines.append((name, *cells))
    if not lines:
        return None
    ours = len(lines)
    lines += [
        (f"{model} (published)", *("-" if value is None else f"{value:.1f}" for value in row))
        for model, row in PUBLISHED.items()
    ]
    return Table("", ("", *COLUMNS.values()), tuple(lines), published=tuple(range(ours, len(lines))))


def _headline(block: Block | None) -> str:
    if block is None:
        return "-"
    return with_interval(block) + ("" if block.macro is None else f", macro {percent(block.macro)}")


def _against_frames(summaries: Sequence[Summary]) -> list[Table | None]:
    """One table for each benchmark that runs of one model and mode have at several K."""
    out: list[Table | None] = []
    for title, curves in _curves(summaries).items():
        budgets = sorted({frames for curve in curves.values() for frames in curve})
        lines = [
            (name, *(with_interval(curve[frames]) if frames in curve else "-" for frames in budgets))
            for name, curve in curves.items()
        ]
        out.append(Table(title, ("", *(f"K = {frames}" for frames in budgets)), tuple(lines)))
    return out


def _curves(summaries: Sequence[Summary]) -> dict[str, dict[str, dict[int, Block]]]:
    """By benchmark, by model and mode, by K; benchmarks with one K only are left out."""
    out: dict[str, dict[str, dict[int, Block]]] = {}
    for one, model in zip(summaries, model_names(summaries), strict=True):
        for bench in one.benches:
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


def _against_crops(summaries: Sequence[Summary], names: Sequence[str]) -> list[Table | None]:
    lines: list[tuple[str, dict[str, Part]]] = []
    for name, one in zip(names, summaries, strict=True):
        for bench in one.benches:
            if bench.tools is not None and bench.tools.calls > 0:
                lines.append((f"{name}: {bench.title}", dict(bench.tools.by_calls)))
    counts = sorted({calls for _, parts in lines for calls in parts}, key=int)
    table = Table("", ("", *counts), tuple((name, *(_part(parts.get(n)) for n in counts)) for name, parts in lines))
    return [table]


def _part(part: Part | None) -> str:
    return "-" if part is None else f"{percent(part.accuracy)} ({part.rows})"


def _tools(summaries: Sequence[Summary], names: Sequence[str]) -> list[Table | None]:
    heads = ("", "calls", "rows with calls %", "most in a turn", "bad calls", "turns", "strict %", "forced %")
    lines = [
        (
            f"{name}: {bench.title}", number(tools.calls), percent(tools.rows_with_calls), number(tools.most_in_a_turn),
            number(tools.bad_calls), number(tools.turns), percent(tools.strict), percent(tools.forced),
        )
        for name, one in zip(names, summaries, strict=True)
        for bench in one.benches
        if (tools := bench.tools) is not None
    ]  # fmt: skip
    return [Table("", heads, tuple(lines))]


def _costs(summaries: Sequence[Summary], names: Sequence[str]) -> list[Table | None]:
    heads = (
        "",
        "prompt tokens",
        "cached",
        "sampled tokens",
        "requests",
        "seconds",
        "median",
        "seconds of crops",
    )
    lines = [
        (
            f"{name}: {bench.title}", f"{cost.prompt_tokens:.0f}", f"{cost.cached_tokens:.0f}",
            f"{cost.sampled_tokens:.0f}", number(cost.requests), number(cost.seconds), number(cost.seconds_median),
            number(cost.seconds_crops),
        )
        for name, one in zip(names, summaries, strict=True)
        for bench in one.benches
        if (cost := bench.cost) is not None
    ]  # fmt: skip
    return [Table("", heads, tuple(lines))]


def _parallel_against_sequential(summaries: Sequence[Summary]) -> list[Table | None]:
    """For each model, K and benchmark that both modes have played: sequential divided by parallel."""
    by_mode: dict[str, dict[tuple[str, int, str], BenchSummary]] = {"agentic": {}, "sequential": {}}
    for one in summaries:
        for bench in one.benches:
            if one.mode in by_mode:
                by_mode[one.mode][one.model, one.frames, bench.name] = bench
    lines = []
    for key, parallel in by_mode["agentic"].items():
        sequential = by_mode["sequential"].get(key)
        if sequential is None or sequential.cost is None or parallel.cost is None:
            continue
        cost, other = parallel.cost, sequential.cost
        lines.append(
            (
                f"{Path(key[0]).name}, K = {key[1]}: {parallel.title}",
                _ratio(other.prompt_tokens, cost.prompt_tokens),
                _ratio(other.sampled_tokens, cost.sampled_tokens),
                _ratio(other.requests, cost.requests),
                _ratio(other.seconds, cost.seconds),
                " / ".join(percent(b.accuracy) if (b := main_block(s)) else "-" for s in (parallel, sequential)),
            )
        )
    heads = ("", "prompt tokens", "sampled tokens", "requests", "seconds", "score, parallel / sequential")
    return [Table("Sequential divided by parallel", heads, tuple(lines))]


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def _breakdowns(summaries: Sequence[Summary], names: Sequence[str]) -> list[Table | None]:
    """One table for each key of each block, a column for each run."""
    tables: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for name, one in zip(names, summaries, strict=True):
        for bench in one.benches:
            for block in bench.blocks:
                for key, breakdown in block.breakdowns.items():
                    parts = tables.setdefault((bench.title, block.type, key), {})
                    for value, part in breakdown.parts.items():
                        parts.setdefault(value, {})[name] = _part(part)
                    parts.setdefault("mean of these", {})[name] = percent(breakdown.macro)
    out: list[Table | None] = []
    for (title, kind, key), parts in tables.items():
        heads = [name for name in names if any(name in cells for cells in parts.values())]
        mean = parts.pop("mean of these")
        lines = [(value, *(cells.get(name, "-") for name in heads)) for value, cells in parts.items()]
        lines.append(("mean of these", *(mean.get(name, "-") for name in heads)))
        out.append(Table(f"{title}, {kind}: by {key}", (key, *heads), tuple(lines)))
    return out


# ---------------------------------------------------------------------------------------------------- pictures


def _draw(summaries: Sequence[Summary], names: Sequence[str]) -> dict[str, bytes]:
    pictures = {}
    if curves := _curves(summaries):
        panels = {title: {name: _band(curve) for name, curve in lines.items()} for title, lines in curves.items()}
        pictures["frames"] = plot_bands(panels, "K, overview frames", log_x=True)
    crops: dict[str, dict[str, Band]] = {}
    for name, one in zip(names, summaries, strict=True):
        for bench in one.benches:
            if bench.tools is not None and len(bench.tools.by_calls) > 1:
                parts = bench.tools.by_calls
                means = [part.accuracy for part in parts.values()]
                crops.setdefault(bench.title, {})[name] = ([int(n) for n in parts], means, means, means)
    if crops:
        pictures["crops"] = plot_bands(crops, "crops that ran")
    return pictures


def _band(curve: Mapping[int, Block]) -> Band:
    budgets = sorted(curve)
    blocks = [curve[frames] for frames in budgets]

    intervals = [block.interval for block in blocks]

    def numbers(values: Iterable[float | None]) -> list[float]:
        return [math.nan if value is None else value for value in values]

    return (
        budgets,
        numbers(block.accuracy for block in blocks),
        numbers(None if interval is None else interval.low for interval in intervals),
        numbers(None if interval is None else interval.high for interval in intervals),
    )
