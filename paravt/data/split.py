"""Rows to train on and rows to validate on, such that no video and no image is in both.

Rows that share a file belong together, and so do rows that share one with any of these, over all files that are split
at once. Files of one size that begin and end alike are one file, whatever they are called. What belongs together is
dealt out as a whole, in an order that follows from the names and a seed.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paravt.data.addresses import COLUMNS, bare, base_of, find_addresses, identity, is_file, is_question, map_addresses
from paravt.data.copies import KEEP, copy_rows
from paravt.data.same_files import copies_of_files
from paravt.data.skips import RowError
from paravt.data.tables import find_files, raw_rows, relative_names
from paravt.engines.base import stable_seed
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.provenance import lock_directory

PARTS = ("train", "validation")
_NEEDED = (*COLUMNS, "question")


@dataclass(frozen=True)
class Split:
    rows: dict[str, int]
    """By part."""
    media: dict[str, int]
    """Different videos and images, by part."""
    clusters: int
    """Sets of rows that share nothing with each other."""


class _Sets:
    """Disjoint sets of numbers (union by size, paths halved)."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def new(self) -> int:
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, a: int) -> int:
        while self._parents[a] != a:
            self._parents[a] = a = self._parents[self._parents[a]]
        return a

    def join(self, a: int, b: int) -> None:
        self._parents[self.find(a)] = self.find(b)


def split_files(patterns: Sequence[str], out: Path, share: float, seed: int = 0, root: Path | None = None) -> Split:
    """Write `out/train` and `out/validation`, with the files' names, and first `out/split.json`, which tells them.

    `share` is that of all rows in the validation part, which is never larger. Rows that cannot be read go to the
    training part, where they are skipped and counted. Questions of our own get absolute paths, since theirs begin at
    the file. A split that was stopped is finished by the same call; another one is not put into its directory, where a
    video could be on both sides then. Raises DataError for that, and if there is nothing to choose from; RecipeError
    if another process writes there, or nobody can.
    """
    paths = find_files(patterns)
    sets = _Sets()
    places: dict[str, int] = {}
    owners: list[list[int]] = []
    for path in paths:
        found: list[int] = []
        for _, row in raw_rows(path, _NEEDED):
            names = [] if isinstance(row, RowError) else _media(row, path, root)
            owner = sets.new()
            for name in names:
                sets.join(places.setdefault(name, owner), owner)
            found.append(owner)
        owners.append(found)
    for first, *others in copies_of_files(places):
        for other in others:
            sets.join(places[first], places[other])
    rows = Counter(sets.find(owner) for found in owners for owner in found)
    validation = _choose(rows, sets, places, share, seed)
    parts = Counter[str]()
    media = Counter[str]()
    for cluster, count in rows.items():
        parts[PARTS[cluster in validation]] += count
    for owner in places.values():
        media[PARTS[sets.find(owner) in validation]] += 1
    done = Split({part: parts[part] for part in PARTS}, {part: media[part] for part in PARTS}, len(rows))
    about = {"files": [str(path.absolute()) for path in paths], "share": share, "seed": seed, **asdict(done)}
    with lock_directory(out):
        _claim(out / "split.json", about)
        for path, name, found in zip(paths, relative_names(paths), owners, strict=True):
            for part in PARTS:
                copy_rows(path, out / part / name, _NEEDED, _Part(path, found, sets, validation, part == "validation"))
    return done


def _claim(record: Path, about: dict[str, Any]) -> None:
    said = json.dumps(about, indent=1) + "\n"
    try:
        before = record.read_text(encoding="utf-8")
    except FileNotFoundError:
        return write_whole(record, said)
    if before != said:
        raise DataError(f"{record.parent}: holds another split (see {record.name}); remove it, or choose another --out")


def _media(row: dict[str, Any], path: Path, root: Path | None) -> list[str]:
    base = base_of(row, path, root)
    return [identity(address, base) for address in find_addresses(row)]


def _choose(rows: Counter[int], sets: _Sets, places: dict[str, int], share: float, seed: int) -> set[int]:
    """The clusters to validate on. Those of rows without media have no name and are trained on."""
    names: dict[int, str] = {}
    common = os.path.commonpath([os.path.dirname(name) for name in places if name.startswith("/")] or ["/"])
    for name, owner in places.items():
        shown = os.path.relpath(name, common) if name.startswith("/") else name
        cluster = sets.find(owner)
        names[cluster] = min(shown, names.get(cluster, shown))
    room = math.floor(share * rows.total())
    chosen: set[int] = set()
    for cluster in sorted(names, key=lambda cluster: (stable_seed(seed, "split", names[cluster]), names[cluster])):
        if rows[cluster] <= room:
            chosen.add(cluster)
            room -= rows[cluster]
    if not chosen:
        raise DataError(
            f"nothing to validate on: {share:g} of {rows.total()} rows is less than any set of rows that share no video"
            " with the others; choose a larger share"
        )
    return chosen


@dataclass(frozen=True)
class _Part:
    """Which rows of a file are in a part."""

    path: Path
    owners: Sequence[int]
    sets: _Sets
    chosen: set[int]
    validation: bool

    def __call__(self, number: int, row: dict[str, Any] | None) -> dict[str, Any] | None:
        if (self.sets.find(self.owners[number]) in self.chosen) != self.validation:
            return None
        if row is None or not is_question(row):
            return KEEP
        return map_addresses(row, self._absolute)

    def _absolute(self, address: str) -> str:
        return os.path.abspath(self.path.parent / bare(address)) if is_file(address) else address
