"""All that a report shows, from the files of runs: the list at once, episodes chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paravt.errors import DataError
from paravt.report.episode_files import WRONG, Entry, EpisodeFile
from paravt.report.episode_view import episode_view
from paravt.report.evaluations import FILES, FLIPPED, QUESTIONS, Evaluation, flipped, read_evaluation
from paravt.report.reading import Notes
from paravt.report.schema import Chunk, EpisodeView, Report, Run, Table
from paravt.report.sources import Source, find_sources
from paravt.report.videos import FULL, Detail, PictureBook, Shot

MOST_ROWS = 20_000
"""Episodes of the list, over all runs."""
_AGAIN = 15.0
"""Seconds after which the numbers of an evaluation that goes on are computed again, at the earliest."""
_VIEW = TypeAdapter(EpisodeView)


@dataclass
class _Shown:
    """A run and its files as far as they were read."""

    source: Source
    files: dict[Path, EpisodeFile]
    evaluation: Evaluation | None = None
    state: tuple[object, ...] = ()
    """Of the files that `evaluation` was computed from."""
    read: float = 0.0
    told: Notes | None = None
    asked: tuple[object, ...] = ()
    """Of the files that say what was asked, as they were when `source` read them."""


@dataclass(frozen=True)
class Place:
    """Where a chunk is."""

    source: Source
    file: EpisodeFile
    entries: Sequence[Entry]


class Library:
    """The runs of some paths. `refresh` reads what is new in them; it and `chunk` are not for several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises DataError for a path that holds no run."""
        self.paths = list(paths)
        self._shown: list[_Shown] = []
        self._look(Notes())

    def _look(self, notes: Notes) -> None:
        """Look for runs anew; what was read of those that are known stays."""
        known = {(str(one.source.path), one.source.name): one for one in self._shown}
        self._shown = []
        for source in find_sources(self.paths, notes):
            one = known.get((str(source.path), source.name)) or _Shown(source, {})
            asked = tuple(_state(source.path / name) for name in QUESTIONS)
            if source.evaluation is None or asked != one.asked:
                one.files = one.files if source.evaluation is None else {}
                one.source, one.asked = source, asked
            self._shown.append(one)

    @property
    def title(self) -> str:
        names = [Path(path).resolve().name for path in self.paths]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def report(self, notes: Notes, live: bool = False, step: Callable[[str], None] = lambda name: None) -> Report:
        """The list, curves and tables. `step` is told the name of each run that is read."""
        self._look(notes)
        runs: list[Run] = []
        share = max(1, MOST_ROWS // max(1, sum(1 for one in self._shown if one.source.kind != "sft")))
        left = False
        for number, one in enumerate(self._shown):
            step(one.source.name)
            if one.source.evaluation is not None:
                self._evaluate(one)
            left |= self._read_files(number, one, notes, share)
            run = one.source.describe(notes)
            run["id"] = f"r{number}"
            run["tables"] = [*run["tables"], *(one.evaluation.tables if one.evaluation else ())]
            run["episodes"] = [entry.row for file in one.files.values() for entry in file.entries]
            _make_unique(run)
            if one.told is not None:
                for line in one.told.lines:
                    notes.add(line)
            runs.append(run)
        if left:
            notes.add(
                f"The list has {sum(len(run['episodes']) for run in runs):,} episodes: of each run those of the first, "
                "the last and evenly spaced steps. The others are in its directory."
            )
        self._compare(runs)
        return {"format": 1, "title": self.title, "notes": notes.lines, "runs": runs, "live": live}

    def _read_files(self, number: int, one: _Shown, notes: Notes, most: int) -> bool:
        """True if some of the episodes are left out of the list."""
        specs = one.source.files()
        for spec in specs:
            if spec.path not in one.files:
                one.files[spec.path] = EpisodeFile(spec, f"{number}-{len(one.files)}")
        here = {spec.path for spec in specs}
        one.files = {path: file for path, file in one.files.items() if path in here}
        room, left = most, False
        for at in spread(len(specs)):
            file = one.files[specs[at].path]
            if room <= 0:
                left = True
                continue
            left |= file.refresh(notes, room)
            room -= len(file.entries)
        one.files = {spec.path: one.files[spec.path] for spec in specs}  # in their order
        return left

    def _evaluate(self, one: _Shown) -> None:
        """The numbers of an evaluation, if its files have changed; all of its rows are read for them."""
        path, known = one.source.path, one.source.evaluation
        state = tuple(_state(path / name) for name in FILES)
        if known is None or state == one.state or (one.state and time.monotonic() - one.read < _AGAIN):
            return
        notes = Notes()
        try:
            one.evaluation = read_evaluation(path)
        except (*WRONG, OSError) as error:
            where = "" if isinstance(error, DataError) else f"{path}: "
            notes.add(f"{where}{error}. The tables of this evaluation are left out.")
            one.evaluation = None
        one.state, one.told, one.read = state, notes, time.monotonic()
        if one.evaluation is not None:
            known.values.update(one.evaluation.values)
            for file in one.files.values():
                for entry in file.entries:
                    if entry.row["id"] in known.values:
                        entry.row["rewards"] = {"accuracy": known.values[entry.row["id"]]}

    def _compare(self, runs: Sequence[Run]) -> None:
        """Every evaluation against the first one."""
        pairs = [(one.evaluation, run) for one, run in zip(self._shown, runs, strict=True) if one.evaluation]
        for evaluation, run in pairs[1:]:
            run["tables"] += flipped(pairs[0][0], evaluation, pairs[0][1]["name"])

    # ------------------------------------------------------------------ chunks

    def places(self) -> Iterator[tuple[str, Place]]:
        """All chunks of the list, by their names."""
        for one in self._shown:
            for file in one.files.values():
                for name, entries in file.chunks.items():
                    yield name, Place(one.source, file, entries)

    def chunk(
        self,
        place: Place,
        book: PictureBook,
        detail: Detail = FULL,
        *,
        shared: bool = False,
        video_url: Callable[[Place, str], str | None] = lambda place, video: None,
    ) -> tuple[Chunk, set[Shot]]:
        """The episodes of a chunk, and the pictures that they show. What cannot be shown is left out."""
        out: Chunk = {}
        shots: set[Shot] = set()
        for entry in place.entries:
            played = place.file.load(entry)
            if played is None:
                continue
            try:
                pictures = book.of(played.episode, place.source.roots, place.file.spec.path.parent, detail)
                url = video_url(place, played.episode.sample.video)
                view = episode_view(
                    played.episode,
                    pictures.shared if shared else pictures.inside,
                    id=entry.row["id"],
                    credit=played.credit,
                    video_url=url,
                )
                _VIEW.validate_python(view, strict=True)
            except WRONG:
                continue
            out[entry.row["id"]] = view
            shots |= set(pictures.shots.values())
        return out, shots


def spread(count: int) -> list[int]:
    """The numbers below `count`: first, last, and then always the middle of the widest gaps."""
    if count < 3:
        return list(range(count))
    out = [0, count - 1]
    gaps = [(0, count - 1)]
    while gaps:
        narrower = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle:
                out.append(middle)
                narrower += [(low, middle), (middle, high)]
        gaps = narrower
    return out


def linked(runs: Sequence[Run]) -> set[tuple[str, str]]:
    """(run, episode) of the rows that flipped."""
    tables: Iterator[tuple[Run, Table]] = ((run, table) for run in runs for table in run["tables"])
    return {
        (run["id"], id)
        for run, table in tables
        if table["title"].startswith(tuple(FLIPPED.values()))
        for row in table["rows"]
        for id in row.get("link", ())
    }


def _make_unique(run: Run) -> None:
    """Names of episodes that occur twice in a run get a number."""
    seen: dict[str, int] = {}
    for row in run["episodes"]:
        count = seen.get(row["id"], 0)
        seen[row["id"]] = count + 1
        if count:
            row["id"] = f"{row['id']} ~{count + 1}"


def _state(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
