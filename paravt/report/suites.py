"""Suites of the lab: every stage is a run, and a run without steps holds the tables of the suite's summary."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paravt.lab.columns import EVALUATED, TRAINED
from paravt.report.reading import Notes, number_of, part, read_object, real_directory
from paravt.report.schema import Cell, Table, TableRow
from paravt.report.sources import Source, lab_source, rl_source, sft_sources

_MADE = ("mode", "seeds")
_KAPPA = re.compile(r"kappa/K([0-9]{1,9})")


def suite_sources(path: Path, notes: Notes) -> list[Source]:
    """The suite itself, then its stages as far as they have begun, in the order of its plan."""
    plan = read_object(path / "plan.json", path, notes)
    made = {name: str(plan[name]) for name in _MADE if name in plan}
    versions = {name: str(value) for name, value in part(plan, "versions").items()}
    out = [
        Source("evaluation", path.resolve().name, path, made={**made, **versions}, tables=_tables(path, plan, notes))
    ]
    for name, label in part(plan, "labels").items():
        stage = path / "stages" / name
        if (
            Path(name).name == name
            and isinstance(label, str)
            and os.path.isdir(stage)
            and real_directory(stage, path, notes)
        ):
            out += _stage(stage, label, notes)
    return out


def _stage(path: Path, label: str, notes: Notes) -> list[Source]:
    """The run of a stage; none if it has not begun."""
    recipe = read_object(path / "recipe.json", path, notes)
    row = label.rpartition(", seed")[0]
    if "stages" in recipe:
        return sft_sources(path, label, recipe)
    if "evaluation" in recipe:
        source = lab_source(path, f"{label}, evaluated", recipe)
        source.group = f"{row}, evaluated" if row else ""
    elif recipe or (path / "metrics.jsonl").is_file():
        source = rl_source(path, label, recipe)
        source.group = row
    else:
        return []
    return [source]


def _tables(path: Path, plan: Mapping[str, Any], notes: Notes) -> list[Table]:
    """Those of `summary.json`, which the suite writes when it ends."""
    if not (path / "summary.json").exists():
        notes.add(f"{path}: no summary.json yet; `paravt lab report {path}` writes it.")
        return []
    summary = read_object(path / "summary.json", path, notes)
    suite = part(plan, "suite")
    titles = {name: part(part(suite, "rows"), name).get("title") or name for name in part(suite, "rows")}
    summed = {name: part(part(summary, "rows"), name) for name in part(summary, "rows")}
    out: list[Table] = []
    for section in dict.fromkeys(str(row.get("section")) for row in summed.values()):
        rows = {name: row for name, row in summed.items() if str(row.get("section")) == section}
        title = str(part(part(suite, "sections"), section).get("title") or section)
        columns_of = {column for row in rows.values() for column in part(row, "means")}
        budgets = sorted({int(found[1]) for column in columns_of if (found := _KAPPA.fullmatch(column))})
        by_budget = {f"{what}, K = {k}": f"{what}/K{k}" for what in ("accuracy", "kappa") for k in budgets}
        for what, columns in (("evaluated", EVALUATED), ("by K", by_budget), ("in training", TRAINED)):
            out.append(_table(f"{title}: {what}", rows, titles, columns))
    for name in ("claims", "targets"):
        listed = summary.get(name)
        claims = [claim for claim in listed if isinstance(claim, dict)] if isinstance(listed, list) else []
        cells = [[_text(claim.get(key)) for key in ("statement", "verdict", "numbers")] for claim in claims]
        rows_of = [TableRow(cells=list[Cell](row)) for row in cells]
        out.append({"title": name.capitalize(), "columns": ["statement", "verdict", "numbers"], "rows": rows_of})
    return [table for table in out if table["rows"] and len(table["columns"]) > 1]


def _table(title: str, rows: Mapping[str, Any], titles: Mapping[str, Any], columns: Mapping[str, str]) -> Table:
    """Means with the half width of their 95 % intervals; columns that no row has are left out."""
    means = {name: part(row, "means") for name, row in rows.items()}
    known = {head: column for head, column in columns.items() if any(column in mean for mean in means.values())}
    lines: list[TableRow] = []
    for name, mean in means.items():
        if any(column in mean for column in known.values()):
            seeds = len(part(rows[name], "by_seed"))
            cells: list[Cell] = [str(titles.get(name, name)), seeds]
            lines.append({"cells": cells + [_mean(part(mean, column)) for column in known.values()]})
    return {"title": title, "columns": ["row", "seeds", *known], "rows": lines if known else []}


def _mean(value: Mapping[str, Any]) -> Cell:
    mean, low, high = (number_of(value.get(name)) for name in ("mean", "low", "high"))
    if mean is None:
        return None
    digits = 2 if abs(mean) < 100 else 0
    half = "" if low is None or high is None else f" ± {(high - low) / 2:.{digits}f}"
    return f"{mean:.{digits}f}{half}"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
