"""Evaluation runs as a page shows them: their tables, their rows, and what flipped between two of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paravt.bench.compare import Flip, compare
from paravt.bench.loaded import Loaded
from paravt.bench.results import Key, Result, Run, read_benches, read_run, result_from_row
from paravt.bench.scoring import Outcome, verdict
from paravt.bench.stored import HEAD, checked
from paravt.bench.summary import BenchSummary, Summary, kinds_of, summarise, verdicts
from paravt.errors import DataError
from paravt.report.episode_files import Decode, Played
from paravt.report.reading import Notes, real_file
from paravt.report.schema import Cell, Table, TableRow
from paravt.types import Sample, Trace

OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "unparsable", "failed", "no_gold")
FLIPPED = {"gained": "Gained against", "lost": "Lost against"}
"""How the titles of the tables of flipped rows begin."""
QUESTIONS = ("recipe.json", "benches.json", "samples.jsonl")
FILES = ("rows.jsonl", "grades.jsonl", *QUESTIONS)
"""Of a run."""
_MOST_LINKS = 5000
_CALLS = ("calls", "rows_with_calls", "most_in_a_turn", "bad_calls", "turns", "strict", "forced")
_COSTS = ("prompt_tokens", "cached_tokens", "sampled_tokens", "requests", "seconds", "seconds_median", "seconds_crops")


@dataclass(frozen=True)
class Evaluation:
    """What the files of a run say about all of its rows."""

    summary: Summary
    run: Run
    """Its episodes have no traces: they are for comparing answers."""
    values: Mapping[str, float | None]
    """The credit of each row, by its name in the list; None if it failed or cannot be scored."""
    tables: tuple[Table, ...]


@dataclass
class Known:
    """What is known of a run's rows when one is decoded."""

    samples: dict[Key, Sample] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    """Where the benchmarks were read."""
    values: dict[str, float | None] = field(default_factory=dict)


def row_name(bench: str, sample: str) -> str:
    return f"{bench}/{sample}"


def read_known(path: Path, notes: Notes) -> Known:
    """The questions of a run; none, with a note, if they cannot be read."""
    try:
        _check_files(path)
        benches: Mapping[str, Loaded] = read_benches(path)
    except (DataError, OSError) as error:
        notes.add(f"{error}. The run's episodes cannot be shown.")
        return Known()
    samples = {(bench.name, sample.id): sample for bench in benches.values() for sample in bench.samples}
    return Known(samples, tuple(bench.source for bench in benches.values()))


def bench_line(known: Known) -> Decode:
    """Reads the lines of a run's rows.jsonl."""

    def decode(line: Mapping[str, Any]) -> Played:
        head = checked(HEAD, line, "the row")
        sample = known.samples.get((head.bench, head.sample.id))
        if sample is None:
            raise ValueError("a row of a question that is asked no more")
        episode = result_from_row(line, sample).episode
        name = row_name(head.bench, sample.id)
        value = known.values[name] if name in known.values else verdict(episode).value
        return Played(episode, name, name, rewards={"accuracy": value})

    return decode


def _check_files(path: Path) -> None:
    """Raises DataError for a file that is none of the run's own: a link out of it, or a pipe that never ends."""
    for name in FILES:
        if os.path.lexists(path / name) and real_file(path / name, [path]) is None:
            raise DataError(f"{path / name}: not a file of {path}; not read")


def read_evaluation(path: Path) -> Evaluation:
    """All numbers of a run. Raises DataError if one of its files is damaged, or leads out of it."""
    _check_files(path)
    run = read_run(path)
    summary, found = summarise(run), verdicts(run)
    values = {row_name(*key): row.value for key, row in found.items()}
    results = {key: _slim(result) for key, result in run.results.items()}
    outcomes: dict[str, dict[Outcome, list[str]]] = {}
    for key, row in found.items():
        outcomes.setdefault(key[0], {}).setdefault(row.outcome, []).append(row_name(*key))
    tables = [_scores(summary), _outcomes(summary, outcomes), *_means(summary), *_by_calls(summary, run)]
    tables += [table for bench in summary.benches for table in _breakdowns(bench, run)]
    kept = tuple(table for table in tables if table["rows"])
    return Evaluation(summary, replace(run, results=results), values, kept)


def flipped(one: Evaluation, other: Evaluation, first: str) -> list[Table]:
    """What changed from the first run, by its name, to the other, whose rows are linked to. The other's columns do not
    have its name: the page joins the tables of all runs that are compared with the first."""
    try:
        found = compare(one.run, other.run)
    except (ValueError, ZeroDivisionError):  # nothing that could be paired
        return []
    numbers = [
        _line([row.bench, row.type, row.measure, row.pairs, _percent(row.one), _percent(row.other),
               _percent(row.difference), *_interval(row.interval), row.gained, row.lost, round(row.p, 4),
               row.failed])
        for row in found
    ]  # fmt: skip
    columns = ["benchmark", "rows of", "measure", "pairs", f"{first}, %", "this run, %", "difference", "from", "to",
               "gained", "lost", "McNemar p", "left out: failed"]  # fmt: skip
    flips = [flip for row in found for flip in row.flips]
    out: list[Table] = [{"title": f"Compared with {first}, 95 %", "columns": columns, "rows": numbers}]
    heads = ["benchmark", "question", "right answer", first, "this run"]
    for direction, title in FLIPPED.items():
        rows = [_flip(flip) for flip in flips if flip.direction == direction]
        out.append({"title": f"{title} {first}", "columns": heads, "rows": rows})
    return [table for table in out if table["rows"]]


def _flip(flip: Flip) -> TableRow:
    link = [row_name(flip.bench, flip.id)]
    return _line([flip.bench, flip.question, flip.reference, flip.one, flip.other], link)


def _slim(result: Result) -> Result:
    empty = Trace("main", "main")
    crops = tuple(replace(crop, trace=None) for crop in result.episode.crops)
    return replace(result, episode=replace(result.episode, main=empty, crops=crops, turns=()))


# ---------------------------------------------------------------------------------------------------- tables


def _scores(summary: Summary) -> Table:
    rows = []
    for bench in summary.benches:
        for block in bench.blocks:
            counts = block.counts
            recalls = ", ".join(f"{name} {100 * value:.1f}" for name, value in (block.recalls or {}).items())
            rows.append(_line([
                bench.title or bench.name, block.type, block.measure, _percent(block.accuracy),
                *_interval(block.interval), _percent(block.accuracy_played), _percent(block.macro), recalls or None,
                counts.right, counts.wrong, counts.unparsable or None, counts.failed or None, counts.no_gold or None,
                block.asked - counts.rows or None,
            ]))  # fmt: skip
    columns = ["benchmark", "rows of", "measure", "score, %", "from", "to", "without failed, %", "macro, %", "recalls",
               "right", "wrong", "unparsable", "failed", "no reference", "not played"]  # fmt: skip
    return without_empty({"title": "Scores, with 95 % intervals", "columns": columns, "rows": rows})


def _outcomes(summary: Summary, outcomes: Mapping[str, Mapping[Outcome, Sequence[str]]]) -> Table:
    rows = [
        _line([bench.title or bench.name, outcome.replace("no_gold", "no reference"), len(ids)], ids)
        for bench in summary.benches
        for outcome in OUTCOMES
        if (ids := outcomes.get(bench.name, {}).get(outcome, []))
    ]
    return {"title": "What became of the questions", "columns": ["benchmark", "outcome", "rows"], "rows": rows}


def _means(summary: Summary) -> list[Table]:
    out: list[Table] = []
    for title, fields in (("Calls, per question", _CALLS), ("Costs, per question", _COSTS)):
        rows = [
            _line([bench.title or bench.name, *(round(float(getattr(bench.means, name)), 3) for name in fields)])
            for bench in summary.benches
            if bench.means is not None
        ]
        columns = ["benchmark", *(name.replace("_", " ") for name in fields)]
        out.append({"title": title, "columns": columns, "rows": rows})
    return out


def _by_calls(summary: Summary, run: Run) -> list[Table]:
    """One table for all benchmarks; failed rows are in none of its lines, and are linked to all the same."""
    rows = []
    for bench in summary.benches:
        for calls, part in bench.by_calls.items():
            ids = [row_name(*key) for key, result in run.results.items()
                   if key[0] == bench.name and str(result.episode.tool_calls) == calls]  # fmt: skip
            rows.append(_line([bench.title or bench.name, int(calls), part.rows, _percent(part.accuracy)], ids))
    return [{"title": "By crops that ran", "columns": ["benchmark", "crops", "rows", "score, %"], "rows": rows}]


def _breakdowns(bench: BenchSummary, run: Run) -> Iterable[Table]:
    for block in bench.blocks:
        mine = [(row_name(*key), sample) for key, sample in run.samples.items()
                if key[0] == bench.name and sample.type == block.type and key in run.results]  # fmt: skip
        for key, parts in block.breakdowns.items():
            named: dict[str, list[str]] = {}
            for name, sample in mine:
                for kind in kinds_of(sample, key):
                    named.setdefault(kind, []).append(name)
            rows = [_line([v, part.rows, _percent(part.accuracy)], named.get(v, [])) for v, part in parts.items()]
            title = f"{bench.title or bench.name}, {block.type}: by {key}"
            yield {"title": title, "columns": [key, "rows", "score, %"], "rows": rows}


def _line(cells: list[Any], link: Sequence[str] = ()) -> TableRow:
    shown: list[Cell] = [
        None if cell is None else cell if isinstance(cell, int | float) else str(cell) for cell in cells
    ]
    return {"cells": shown, "link": list(link[:_MOST_LINKS])} if link else {"cells": shown}


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def _interval(interval: Any) -> list[float | None]:
    return [None, None] if interval is None else [_percent(interval.low), _percent(interval.high)]


def without_empty(table: Table) -> Table:
    """Without columns that have nothing in them."""
    kept = [at for at in range(len(table["columns"])) if any(row["cells"][at] is not None for row in table["rows"])]
    rows: list[TableRow] = [{**row, "cells": [row["cells"][at] for at in kept]} for row in table["rows"]]
    return {"title": table["title"], "columns": [table["columns"][at] for at in kept], "rows": rows}
