"""The numbers of runs as texts in tables, for terminals and reports alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paravt.bench.compare import Comparison
from paravt.bench.summary import Block, Summary


@dataclass(frozen=True)
class Table:
    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    published: tuple[int, ...] = ()
    """Lines that are not ours."""


def run_names(summaries: Sequence[Summary]) -> list[str]:
    """A name for each run that tells them apart: model, mode and K, and the directory where these are not enough."""
    models = model_names(summaries)
    names = [f"{model}, {one.mode}, K = {one.frames}" for one, model in zip(summaries, models, strict=True)]
    return [
        name if names.count(name) == 1 else f"{name} ({one.run})" for name, one in zip(names, summaries, strict=True)
    ]


def model_names(summaries: Sequence[Summary]) -> list[str]:
    """The last part of each model's name, or all of it where others end in the same."""
    last = {model: Path(model).name or model for model in {one.model for one in summaries}}
    ends = list(last.values())
    return [last[one.model] if ends.count(last[one.model]) == 1 else one.model for one in summaries]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def number(value: float) -> str:
    return f"{value:.2f}"


def whole(value: float) -> str:
    return f"{value:.0f}"


def with_interval(block: Block) -> str:
    """ "61.2 (59.0 - 63.4)", and what the reader has to know beside it."""
    text = _score(block)
    if block.counts.failed:
        text += f", {block.counts.failed} failed"
    if block.asked > block.counts.rows:
        text += f", {block.asked - block.counts.rows} not played"
    return text


def _score(block: Block) -> str:
    text = percent(block.accuracy)
    if block.interval is not None:
        text += f" ({percent(block.interval.low)} - {percent(block.interval.high)})"
    return text


_OPTIONAL = ("run", "without failed", "macro", "R@0.3 / 0.5 / 0.7", "no reference", "not played")


def blocks_table(summaries: Sequence[Summary], names: Sequence[str]) -> Table:
    """Every score of every run, with its counts. Columns that say nothing are left out."""
    heads = ("run", "benchmark", "measure", "score, 95 %", *_OPTIONAL[1:4], "right", "wrong", "unparsable", "failed",
             *_OPTIONAL[4:])  # fmt: skip
    lines = [
        (
            name if len(summaries) > 1 else "-",
            bench.title,
            block.measure,
            _score(block),
            percent(block.accuracy_played) if block.counts.failed else "-",
            percent(block.macro),
            " / ".join(map(percent, block.recalls.values())) if block.recalls else "-",
            *map(str, (block.counts.right, block.counts.wrong, block.counts.unparsable, block.counts.failed)),
            *(str(count) if count else "-" for count in (block.counts.no_gold, block.asked - block.counts.rows)),
        )
        for name, one in zip(names, summaries, strict=True)
        for bench in one.benches
        for block in bench.blocks
    ]
    return _without_empty(Table("", heads, tuple(lines)), _OPTIONAL)


def _without_empty(table: Table, columns: Sequence[str]) -> Table:
    """Without those of `columns` that have nothing in them."""
    filled = {at for line in table.lines for at, cell in enumerate(line) if cell != "-"}
    kept = [at for at, head in enumerate(table.heads) if head not in columns or at in filled]
    lines = tuple(tuple(line[at] for at in kept) for line in table.lines)
    return Table(table.title, tuple(table.heads[at] for at in kept), lines)


def failures_table(summaries: Sequence[Summary], names: Sequence[str]) -> Table:
    lines = []
    for name, one in zip(names, summaries, strict=True):
        for bench in one.benches:
            failures = ", ".join(f"{count} {kind}" for kind, count in bench.failures.items())
            faults = ", ".join(f"{count} {kind}" for kind, count in bench.faults.items())
            if failures or faults:
                lines.append((name, bench.title, failures or "-", faults or "-"))
    return Table("", ("run", "benchmark", "failed rows", "faults of the data"), tuple(lines))


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    heads = ("benchmark", "rows of", "measure", "pairs", "first", "second", "difference, 95 %", "gained", "lost",
             "McNemar p", "left out: failed", "left out: in one run only")  # fmt: skip
    lines = tuple(
        (
            row.bench,
            row.type,
            row.measure,
            str(row.pairs),
            percent(row.one),
            percent(row.other),
            _difference(row),
            str(row.gained),
            str(row.lost),
            f"{row.p:.2g}",
            *(str(count) if count else "-" for count in (row.failed, row.alone)),
        )
        for row in comparisons
    )
    return _without_empty(Table("", heads, lines), heads[-2:])


def _difference(row: Comparison) -> str:
    text = f"{100 * row.difference:+.1f}"
    if row.interval is None:
        return text
    return f"{text} ({100 * row.interval.low:+.1f} .. {100 * row.interval.high:+.1f})"


def flip_lines(comparisons: Sequence[Comparison], most: int) -> list[str]:
    """The first `most` questions that exactly one of two runs gets right, a line each."""
    flips = [flip for row in comparisons for flip in row.flips]
    lines = [
        f"{flip.direction} {_short(flip.bench)} {_short(flip.id)}: {_short(flip.question)} "
        f"Right: {_short(flip.reference)}; first: {_short(flip.one)}; second: {_short(flip.other)}"
        for flip in flips[:most]
    ]
    if len(flips) > most:
        lines.append(f"... and {len(flips) - most} more (--flips, --json)")
    return lines


def _short(text: str | None, most: int = 80) -> str:
    text = "-" if text is None else " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
