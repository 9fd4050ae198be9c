"""What the commands on data show. Everything that a row or a file name says is plain text here, never markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paravt.data.check import FileCheck, quantiles
from paravt.data.materialize import Materialized
from paravt.data.show import Shown
from paravt.data.stats import FileStats, shared_media
from paravt.terminal import printable

_LEARNED, _GIVEN = "bold green", "dim"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if number else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(printable(cell)) for cell in line))
    return table


def show_checks(console: Console, checks: Sequence[FileCheck]) -> None:
    """A line for each file, then what is wrong, the first of each kind with its row."""
    heads = ("file", "rows", "good", "usable", "turns", "images", "videos", "tokens (median, 95 %, most)")
    lines = []
    for check in checks:
        tokens = quantiles(check.tokens)
        shown = f"{tokens['p50']}, {tokens['p95']}, {tokens['max']}" if tokens else "not counted"
        numbers = (check.rows, check.good, check.usable, check.turns, check.images, check.videos)
        lines.append((str(check.path), *map(str, numbers), shown))
    console.print(_table(heads, lines))
    for check in checks:
        kinds = (check.skipped, check.examples, "skipped"), (check.faults, check.fault_examples, "used")
        for counts, examples, what in kinds:
            for kind, count in counts.most_common():
                line = f"{check.path}: {count} {kind} ({what}), such as {examples[kind]}"
                console.print(Text(printable(line), "red" if what == "skipped" else "yellow"), soft_wrap=True)


def show_materialized(console: Console, files: Sequence[Materialized]) -> None:
    """A line for each file and one for each bucket with missing files."""
    for file in files:
        done = "copied" if file.made else "was there already"
        line = f"{file.target}: {done}: {file.rows} rows, {file.changed} with new paths"
        for count, what in ((file.unreadable, "unreadable"), (file.remote, "remote"), (file.outside, "outside root")):
            line += f", {count} {what}" if count else ""
        console.print(Text(printable(line)), soft_wrap=True)
    buckets: dict[str, list[int]] = {}
    for file in files:
        for name, count in file.files.items():
            found = buckets.setdefault(name, [0, 0])
            found[0] += count
            found[1] += len(file.missing.get(name, ()))
    first = {name: paths[0] for file in files for name, paths in file.missing.items()}
    lines = [(name, str(count), str(gone), first.get(name, "")) for name, (count, gone) in sorted(buckets.items())]
    if lines:
        console.print(_table(("bucket", "files", "missing", "such as"), lines))


def show_stats(console: Console, stats: Sequence[FileStats]) -> None:
    for one in stats:
        said = quantiles(one.characters)
        rows: dict[str, str] = {
            "rows": f"{one.rows}: {_counted(one.layouts)}",
            "cannot be read": _counted(one.unreadable),
            "media": f"{one.videos} videos and {one.images} images in rows, {len(one.media)} different files",
            "assistant turns": _counted(one.turns),
            "calls": _counted(one.calls),
            "several calls in a turn": str(one.parallel) if one.calls else "",
            "strict throughout": str(one.strict) if one.calls else "",
            "types of answers": _counted(one.types),
            "right letters": _counted(one.letters),
            "characters": f"median {said['p50']}, 95 % {said['p95']}, most {said['max']}" if said else "",
        }
        console.print(Text(printable(str(one.path)), "bold"))
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in rows.items():
            if value:
                table.add_row(Text(f"  {name}"), Text(printable(value)))
        console.print(table)
    if len(stats) > 1:
        console.print(f"{shared_media(stats)} videos and images are in more than one of these files")


def _counted(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    """By key, in order: "3 x 0, 5 x 1"."""
    ranked = sorted(counts.items(), key=lambda item: str(item[0]).zfill(9))
    return ", ".join(f"{count} x {key}" for key, count in ranked)


def show_shown(console: Console, shown: Shown) -> None:
    """What is learned is green, or between ⟦ and ⟧ where there are no colours."""
    coloured = console.is_terminal and console.color_system is not None
    out = Text()
    for piece in shown.pieces:
        text = printable(piece.text)
        out.append(text if coloured or not piece.learned else f"⟦{text}⟧", _LEARNED if piece.learned else _GIVEN)
    console.print(out, soft_wrap=True)
    trace = shown.trace
    line = f"{shown.name}: {len(trace.ids)} tokens, {shown.learned} of them learned, {len(trace.images)} images"
    console.print(Text(printable(line)), soft_wrap=True)
