"""The tables of a report: which columns a section shows, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paravt.lab.intervals import Estimate
from paravt.lab.table import RowResult, Table, budgets
from paravt.structure import FORMAT_KINDS

EVALUATED: Mapping[str, str] = {
    "f graded": "f_graded",
    "f strict": "f_strict",
    "kappa": "kappa",
    "kappa, several windows": "kappa/several",
    "attempts": "attempts",
    "accuracy": "accuracy",
    "accuracy, several windows": "accuracy/several",
    "accuracy with calls": "accuracy/tool",
    "accuracy without": "accuracy/direct",
    "true reports": "true_reports",
    "bad reports": "faults",
    "main tokens": "main_tokens",
    "tokens": "tokens",
    "seconds": "seconds",
}
"""Of the evaluation of the last checkpoint: the heading, and the column of the numbers."""
TRAINED: Mapping[str, str] = {
    "f graded": "train/f_graded",
    "f graded, end": "train/f_graded/end",
    "f strict": "train/f_strict",
    "f strict, end": "train/f_strict/end",
    "kappa": "train/kappa",
    "kappa, end": "train/kappa/end",
    "attempts": "train/attempts",
    "accuracy": "train/accuracy",
    "accuracy, end": "train/accuracy/end",
    "junk": "train/junk",
    "true reports": "train/true_reports",
    "entropy": "train/entropy",
    "entropy, end": "train/entropy/end",
    "main tokens": "train/main_tokens",
    "minutes": "train/minutes",
}
PUBLISHED: Mapping[str, str] = {
    "f, published at 8 B": "f",
    "kappa, published at 8 B": "kappa",
    "VideoMME, published at 8 B": "videomme",
    "LVBench, published at 8 B": "lvbench",
    "MLVU, published at 8 B": "mlvu",
}
_FAILURES: Mapping[str, str] = {
    **{kind.replace("_", " "): f"turns/{kind}" for kind in FORMAT_KINDS},
    "junk after the answer (episodes)": "junk",
    "no answer (episodes)": "unanswered",
    "cut off (turns per episode)": "length_stops",
    "unscored (episodes)": "unscored",
}
_WHOLE = ("main_tokens", "tokens", "seconds", "train/main_tokens", "unscored")
"""Columns without decimals."""


@dataclass(frozen=True)
class Shown:
    """A table as text. `published` names the headings of columns that are the paper's."""

    title: str
    heads: list[str]
    lines: list[list[str]]
    published: list[str] = field(default_factory=list)


def cell(value: Estimate | None, column: str) -> str:
    if value is None:
        return "-"
    digits = 0 if column in _WHOLE else 2
    return f"{value.mean:.{digits}f}" + ("" if value.half is None else f" ± {value.half:.{digits}f}")


def section_tables(table: Table, name: str) -> list[Shown]:
    """What a section shows: the evaluation, accuracy and kappa at each K, the training, the kinds of failures."""
    section = table.suite.sections[name]
    rows = [row for row in table.rows.values() if row.row.section == name or row.name in section.also]
    if not any(row.row.section == name for row in rows):
        return []
    runs = trained(rows) if any(row.row.section == name for row in trained(rows)) else []
    by_budget = {f"{what}, K = {k}": f"{what}/K{k}" for what in ("accuracy", "kappa") for k in budgets(rows)}
    found = [
        _with_published(shown("The last checkpoint, all K together", rows, EVALUATED), rows),
        shown("The last checkpoint, by K", rows, by_budget),
        shown("In training: means over all steps, and over the last tenth", runs, TRAINED),
        shown("The last checkpoint: share of turns by what is wrong with them", rows, _seen(rows, _FAILURES)),
    ]
    return [one for one in found if one.lines and len(one.heads) > 2]


def trained(rows: Sequence[RowResult]) -> list[RowResult]:
    """Those with a training of their own: a row that is only evaluated in another way shares that of another row."""
    return [row for row in rows if row.row.recipe is not None and not row.row.evaluation]


def _seen(rows: Sequence[RowResult], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that are not 0 everywhere."""
    return {
        head: column
        for head, column in columns.items()
        if any((found := row.estimate(column)) is not None and any(found.values) for row in rows)
    }


def shown(title: str, rows: Sequence[RowResult], columns: Mapping[str, str]) -> Shown:
    """Columns that no row has are left out, and rows that have none of them."""
    known = {head: column for head, column in columns.items() if any(row.estimate(column) for row in rows)}
    lines = []
    for row in rows:
        cells = [cell(row.estimate(column), column) for column in known.values()]
        if any(text != "-" for text in cells):
            lines.append([row.title, str(len(row.numbers)), *cells])
    return Shown(title, ["row", "seeds", *known], lines)


def _with_published(found: Shown, rows: Sequence[RowResult]) -> Shown:
    """The same with the paper's columns, where there are any."""
    values = {row.title: row.row.published for row in rows}
    known = [head for head, key in PUBLISHED.items() if any(getattr(v, key) is not None for v in values.values() if v)]
    lines = []
    for line in found.lines:
        published = values[line[0]]
        numbers = [None if published is None else getattr(published, PUBLISHED[head]) for head in known]
        lines.append([*line, *("-" if number is None else f"{number:g}" for number in numbers)])
    return Shown(found.title, [*found.heads, *known], lines, known)


def contrast_table(table: Table) -> Shown:
    """Each recipe with both priors, side by side."""
    columns = {"f graded in training": "train/f_graded", "f graded": "f_graded", "kappa in training": "train/kappa",
               "kappa": "kappa", "accuracy": "accuracy"}  # fmt: skip
    heads = ["recipe", *(f"{head}, {prior}" for head in columns for prior in ("strong", "weak"))]
    lines = [
        [
            name,
            *(cell(table.get(row, column), column) for column in columns.values() for row in (pair.strong, pair.weak)),
        ]
        for name, pair in table.suite.contrasts.items()
        if pair.strong in table.rows and pair.weak in table.rows
    ]
    return Shown("", heads, lines)


def collapse_table(table: Table) -> Shown:
    """Every dose: what its start can do directly and with the tool, and where plain reinforcement learning ended."""
    k = max(table.budgets)
    start = {"f strict": "f_strict", "kappa": "kappa", f"direct, K = {k}": f"accuracy/K{k}/direct",
             f"with the tool, K = {k}": f"accuracy/K{k}/tool", "executed / attempted": "executed"}  # fmt: skip
    end = {"kappa": "kappa", "accuracy": "accuracy", "f graded": "f_graded", "f strict": "f_strict"}
    heads = ["dose", *(f"start: {head}" for head in start), *(f"vanilla ends at: {head}" for head in end)]
    lines = [
        [
            name,
            *(cell(table.get(dose.start, column), column) for column in start.values()),
            *(cell(table.get(dose.vanilla, column), column) for column in end.values()),
        ]
        for name, dose in table.suite.doses.items()
        if dose.start in table.rows
    ]
    return Shown("", heads, lines)
