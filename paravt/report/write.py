"""`paravt report`: everything about some runs in one file, as much as fits into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from paravt.errors import DataError
from paravt.files import write_whole
from paravt.report.library import Library, Place, linked, spread
from paravt.report.page import asset, packed, render
from paravt.report.reading import Notes
from paravt.report.schema import PictureShard, Report
from paravt.report.videos import FULL, NONE, SOME, Detail, PictureBook, Shot, VideoFinder, check_directories
from paravt.terminal import printable

MAX_MB = 40.0
_WANTED = 12
"""Chunks that a file should hold: if fewer fit, pictures are left out."""
_TRIED = 3
"""Chunks from which it is estimated how many fit; and those that must be too large, one after the other, to give up."""
_OVERHEAD = 100
"""Bytes of an element beside its data."""
_SHARES = {FULL: "", SOME: "Fewer pictures of each episode are in this file", NONE: "No pictures are in this file"}


@dataclass
class _Held:
    """What is in the file so far."""

    room: int
    """Bytes that are left."""
    chunks: dict[str, str]
    shots: dict[str, PictureShard]
    """By name."""


def write_report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    max_mb: float = MAX_MB,
    videos: Sequence[str | Path] = (),
    console: Console | None = None,
) -> list[str]:
    """Write a report about runs into one HTML file, whole or not at all; what was left out or could not be read, a
    sentence each.

    `videos` are directories in which videos may be opened for pictures; without any, those of the runs' own data.
    Raises DataError for a path that holds no run and for a size in which not even the list of episodes has room,
    OSError if the file cannot be written.
    """
    console = console or Console(quiet=True)
    out, notes = Path(out), Notes()
    if not out.absolute().parent.is_dir():  # before minutes of work
        raise DataError(f"{out}: there is no directory {out.parent}")
    script, style = asset("report.js"), asset("report.css")
    roots = check_directories(map(Path, videos))
    library = Library([Path(path) for path in paths])
    with Progress(console=console, disable=not console.is_terminal) as progress:
        reading = progress.add_task("reading", total=None)
        report = library.report(notes, step=lambda name: progress.update(reading, description=_short(name), advance=1))
        progress.update(reading, total=1, completed=1, description="the list")
        room = int(max_mb * 2**20) - len(script) - len(style) - len(packed(report)) - _OVERHEAD * 20
        if room < 0:
            needed = max_mb - room / 2**20
            raise DataError(f"--max-mb {max_mb:g}: the list of episodes alone needs {needed:.1f} MB")
        with closing(PictureBook(VideoFinder(roots))) as book:
            bar = progress.add_task("episodes", total=None)

            def told(done: int, of: int) -> None:
                progress.update(bar, completed=done, total=of)

            held = _fill(library, report, book, room, notes, told)
    data = {
        "report": packed({**report, "notes": notes.lines}),
        **{f"chunk-{name}": text for name, text in held.chunks.items()},
        **{f"pictures-{name}": packed(pictures) for name, pictures in held.shots.items()},
    }
    write_whole(out, render(report["title"], data, script, style))
    return notes.lines


def _fill(
    library: Library, report: Report, book: PictureBook, room: int, notes: Notes, told: Callable[[int, int], None]
) -> _Held:
    """Takes chunks in the order of their use for a reader until nothing more fits."""
    places = _in_order(library, report)
    detail = _detail(library, places, book, room)
    held = _Held(room, {}, {})
    misses = 0
    for number, (name, place) in enumerate(places):
        told(number, len(places))
        if misses >= _TRIED or not _add(library, name, place, book, detail, held):
            misses += 1
            for entry in place.entries:
                entry.row["chunk"] = ""
    told(len(places), len(places))
    total = sum(len(place.entries) for _, place in places)
    shown = sum(len(place.entries) for name, place in places if name in held.chunks)
    if shown < total:
        notes.add(
            f"To keep the file small it holds {shown:,} of {total:,} episodes in full: whole groups of the first, the "
            "last and evenly spaced steps. The list has all of them."
        )
    if _SHARES[detail] and total:
        notes.add(f"{_SHARES[detail]}, to keep it small.")
    return held


def _in_order(library: Library, report: Report) -> list[tuple[str, Place]]:
    """Rows that flipped first; then the first group of every step (the first step, the last, and evenly spaced ones),
    the second of every step, and so on, in all runs alike."""
    flipped = linked(report["runs"])
    run_of = {row["chunk"]: run["id"] for run in report["runs"] for row in run["episodes"]}
    by_file: dict[int, list[tuple[str, Place]]] = {}
    files_of: dict[int, list[int]] = {}
    for name, place in library.places():
        mine = by_file.setdefault(id(place.file), [])
        mine.append((name, place))
        files = files_of.setdefault(id(place.source), [])
        if id(place.file) not in files:
            files.append(id(place.file))
    keyed = []
    for files in files_of.values():
        for rank_of_file, at in enumerate(spread(len(files))):
            mine = by_file[files[at]]
            for rank, index in enumerate(spread(len(mine))):
                name, place = mine[index]
                unmarked = not any((run_of.get(name, ""), entry.row["id"]) in flipped for entry in place.entries)
                keyed.append(((unmarked, rank, rank_of_file), name, place))
    keyed.sort(key=lambda one: one[0])
    return [(name, place) for _, name, place in keyed]


def _detail(library: Library, places: Sequence[tuple[str, Place]], book: PictureBook, room: int) -> Detail:
    """The most pictures with which enough chunks fit."""
    tried = places[:_TRIED]
    for detail in (FULL, SOME):
        probe = _Held(1 << 62, {}, {})
        for name, place in tried:
            _add(library, name, place, book, detail, probe)
        used = (1 << 62) - probe.room
        if not tried or used * min(_WANTED, len(places)) <= room * len(tried):
            return detail
    return NONE


def _add(library: Library, name: str, place: Place, book: PictureBook, detail: Detail, held: _Held) -> bool:
    """Put a chunk and its pictures into the file, if there is room."""
    chunk, shots = library.chunk(place, book, detail, shared=True)
    text = packed(chunk)
    new = [shot for shot in shots if shot.key not in held.shots.get(shot.shard, {})]
    size = len(text) + _OVERHEAD + sum(_size(book, shot) for shot in new)
    size += _OVERHEAD * len({shot.shard for shot in new} - held.shots.keys())
    if size > held.room or not chunk:
        book.forget(new)
        return False
    held.room -= size
    held.chunks[name] = text
    for shot in new:
        held.shots.setdefault(shot.shard, {})[shot.key] = book.pictures[shot]
    return True


def _size(book: PictureBook, shot: Shot) -> int:
    """Bytes of a picture in the file: its base64 is unpacked by zlib and packed again."""
    return len(book.pictures[shot]) * 41 // 40 + len(shot.key) + 8


def _short(name: str) -> str:
    shown = Text(printable(name))
    shown.truncate(40, overflow="ellipsis")
    return shown.plain
