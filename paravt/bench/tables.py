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
    names = [f"{Path(one.model).name or one.model}, {one.mode}, K = {one.frames}" for one in summaries]
    return [
        name if names.count(name) == 1 else f"{name} ({one.run})" for name, one in zip(names, summaries, strict=True)
    ]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def number(value: float) -> str:
    return f"{value:.2f}"


def with_interval(block: Block) -> str:
    """ "61.2 (59.0 - 63.4)", and what the reader has to know beside it."""
    if block.accuracy is None:
        return "-"
    text = percent(block.accuracy)
    if block.interval is not None:
        text += f" ({percent(block.interval.low)} - {percent(block.interval.high)})"
    if block.counts.failed:
        text += f", {block.counts.failed} failed"
    if block.asked > block.counts.rows:
        text += f", {block.asked - block.counts.rows} not played"
    return text


def blocks_table(summaries: Sequence[Summary], names: Sequence[str]) -> Table:
    """Every score of every run, with its counts."""
    heads = ["run", "benchmark", "rows of", "score", "95 %", "without failed", "macro", "R@0.3 / 0.5 / 0.7", "right",
             "wrong", "unparsable", "failed", "no reference", "not played"]  # fmt: skip
    lines = []
    for name, one in zip(names, summaries, strict=True):
        for bench in one.benches:
            for block in bench.blocks:
                counts, interval = block.counts, block.interval
                lines.append(
                    (
                        name,
                        block.title,
                        f"{block.type} ({block.measure})",
                        percent(block.accuracy),
                        "-" if interval is None else f"{percent(interval.low)} - {percent(interval.high)}",
                        percent(block.accuracy_played),
                        percent(block.macro),
                        " / ".join(map(percent, block.recalls.values())) if block.recalls else "-",
                        *map(str, (counts.right, counts.wrong, counts.unparsable, counts.failed, counts.no_gold)),
                        str(block.asked - counts.rows),
                    )
                )
    return _without_empty(Table("", tuple(heads), tuple(lines)), ("macro", "R@0.3 / 0.5 / 0.7"))


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


def comparison_table(comparisons: Sequence[Comparison], one: str, other: str) -> Table:
    heads = ("benchmark", "rows of", "pairs", one, other, "difference", "95 %", "gained", "lost", "McNemar p", "failed",
             "in one run only")  # fmt: skip
    lines = tuple(
        (
            row.bench,
            row.type,
            str(row.pairs),
            percent(row.one),
            percent(row.other),
            f"{100 * row.difference:+.1f}",
            "-" if row.interval is None else f"{100 * row.interval.low:+.1f} .. {100 * row.interval.high:+.1f}",
            str(row.gained),
            str(row.lost),
            f"{row.p:.3g}",
            str(row.failed),
            str(row.alone),
        )
        for row in comparisons
    )
    return Table("", heads, lines)


def flips_table(comparisons: Sequence[Comparison], most: int, one: str, other: str) -> Table:
    """The first `most` questions that exactly one of two runs gets right."""
    flips = [flip for row in comparisons for flip in row.flips]
    lines = tuple(
        (
            flip.direction,
            flip.bench,
            flip.id,
            _short(flip.question),
            *map(_short, (flip.reference, flip.one, flip.other)),
        )
        for flip in flips[:most]
    )
    more = f"; {len(flips) - most} more with --flips or --json" if len(flips) > most else ""
    return Table(f"flipped{more}", ("", "benchmark", "id", "question", "reference", one, other), lines)


def _short(text: str | None, most: int = 60) -> str:
    text = "-" if text is None else " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
