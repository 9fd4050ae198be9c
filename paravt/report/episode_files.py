"""Files of episodes: an index of what is in them, and single episodes when they are asked for.

An index keeps a line for the list and a place in the file for each episode, and never the episodes themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import mode
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from paravt.algo import group_advantages
from paravt.episodes import episode_from_dict
from paravt.errors import DataError
from paravt.report.episode_view import Credit, episode_row
from paravt.report.reading import Notes, line_at, number_of, read_object, real_file, stream
from paravt.report.schema import EpisodeRow
from paravt.types import Episode

CHUNK = 4
"""Episodes of a chunk, or more: groups are whole."""
_MOST_IN_CHUNK = 64
_ROW = TypeAdapter(EpisodeRow)
WRONG = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, DataError)
"""What a line raises that is JSON and no episode, absurd numbers and nesting included."""


@dataclass(frozen=True)
class Played:
    """What a line says."""

    episode: Episode
    group: str
    """"" if the line names none."""
    name: str = ""
    """Of the episode, where it has one."""
    credit: Mapping[str, Credit] = field(default_factory=dict)
    rewards: Mapping[str, float | None] | None = None
    """In place of the episode's own."""


Decode: TypeAlias = Callable[[Mapping[str, Any]], Played]
"""Raises what `episode_from_dict` does, or DataError."""


@dataclass
class Entry:
    row: EpisodeRow
    offset: int
    """Of its line in the file."""
    total: float | None
    """What was paid, before it is compared with the others of its group."""
    scored: bool


@dataclass(frozen=True)
class Spec:
    """A file of episodes of a run."""

    path: Path
    root: Path
    """The run's directory."""
    step: int | None
    decode: Decode
    std: bool | None = None
    """Divide advantages by the group's standard deviation; None: there are no advantages."""
    from_credit: bool = False
    """Are advantages only known from the credit of tokens?"""
    last_counts: bool = False
    """Of episodes with the same name, does the last one that did not fail count alone?"""


class EpisodeFile:
    """The index of one file; `refresh` reads on where the last one ended."""

    def __init__(self, spec: Spec, prefix: str) -> None:
        """`prefix` begins the names of its chunks."""
        self.spec, self.prefix = spec, prefix
        self.entries: list[Entry] = []
        self.chunks: dict[str, list[Entry]] = {}
        self._end = 0
        self._inode: int | None = None

    def refresh(self, notes: Notes, most: int | None = None) -> bool:
        """Read what is new, up to `most` episodes in all; True if there is more that was left."""
        path, root = self.spec.path, self.spec.root
        found = real_file(path, [root])
        if found is None:
            list(stream(path, root, notes))  # says why
            return False
        state = os.stat(found)
        if state.st_ino != self._inode or state.st_size < self._end:  # another file, of the same name
            self.entries, self._end, self._inode = [], 0, state.st_ino
        if state.st_size == self._end:
            return False
        left = self._read(notes, most)
        self._pay()
        self._make_chunks()
        return left

    def _read(self, notes: Notes, most: int | None) -> bool:
        spec, bad, first = self.spec, 0, ""
        counts: dict[str, int] = {}
        for entry in self.entries:
            counts[entry.row["group"]] = counts.get(entry.row["group"], 0) + 1
        for offset, following, line in self._lines(notes):
            if most is not None and len(self.entries) >= most and line.get("group") != self._last_group():
                return True
            self._end = following
            try:
                played = spec.decode(line)
                group = played.group or played.name or f"{spec.path.stem}:{offset}"
                number = counts.get(group, 0)
                name = played.name or f"{group}/{number}"
                row = episode_row(played.episode, id=name, group=group, step=spec.step, rewards=played.rewards)
                _ROW.validate_python(row, strict=True)
            except WRONG as error:
                bad += 1
                first = first or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
                continue
            counts[group] = number + 1
            total = row["rewards"].get("total")
            if spec.from_credit:
                paid = played.credit.get("main")
                row["advantage"] = mode(paid.advantages) if paid and paid.advantages else None
            self.entries.append(Entry(row, offset, total, played.episode.scored))
        if bad:
            notes.add(f"{spec.path}: {bad} {'line is' if bad == 1 else 'lines are'} no episode; the first: {first}.")
        return False

    def _last_group(self) -> str | None:
        return self.entries[-1].row["group"] if self.entries else None

    def _lines(self, notes: Notes) -> Iterator[tuple[int, int, dict[str, Any]]]:
        spec = self.spec
        if spec.path.suffix == ".json":
            self._end = spec.path.stat().st_size
            value = read_object(spec.path, spec.root, notes)
            if value:
                yield 0, self._end, value
        else:
            yield from stream(spec.path, spec.root, notes, self._end)

    def _pay(self) -> None:
        if self.spec.std is None or self.spec.from_credit:
            return
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.row["group"], []).append(entry)
        for members in groups.values():
            found = group_advantages([entry.total for entry in members], std=self.spec.std)
            for entry, advantage in zip(members, found.advantages, strict=True):
                entry.row["advantage"] = None if entry.total is None else advantage

    def _make_chunks(self) -> None:
        if self.spec.last_counts:
            self.entries = _last_counting(self.entries)
        self.chunks = {}
        waiting: list[Entry] = []
        for _, members in groupby(self.entries, key=lambda entry: entry.row["group"]):
            for entry in members:
                if len(waiting) >= _MOST_IN_CHUNK:
                    self._chunk(waiting)
                    waiting = []
                waiting.append(entry)
            if len(waiting) >= CHUNK:
                self._chunk(waiting)
                waiting = []
        if waiting:
            self._chunk(waiting)

    def _chunk(self, entries: list[Entry]) -> None:
        name = f"{self.prefix}-{len(self.chunks)}"
        self.chunks[name] = entries
        for entry in entries:
            entry.row["chunk"] = name

    def load(self, entry: Entry) -> Played | None:
        """The episode of an entry; None if it is not there any more."""
        spec = self.spec
        whole = spec.path.suffix == ".json"
        line = read_object(spec.path, spec.root, Notes()) if whole else line_at(spec.path, spec.root, entry.offset)
        try:
            return spec.decode(line) if line else None
        except WRONG:
            return None


def _last_counting(entries: list[Entry]) -> list[Entry]:
    kept: dict[str, Entry] = {}
    for entry in entries:
        old = kept.get(entry.row["id"])
        if old is None or entry.scored or not old.scored:
            kept[entry.row["id"]] = entry
    return list(kept.values())


def plain_line(line: Mapping[str, Any]) -> Played:
    """A line of `save_episodes`, or a file of `save_episode`."""
    group = line.get("group", "")
    if not isinstance(group, str):
        raise ValueError("a group's name is a text")
    episode = episode_from_dict(line)
    credit = {name: found for name, paid in _mapping(line.get("credit")).items() if (found := _credit(paid))}
    return Played(episode, group, credit=credit)


def evaluated_line(line: Mapping[str, Any]) -> Played:
    """A line of the lab's evaluation, whose groups are frame budgets: no rollouts of one prompt."""
    played = plain_line(line)
    name = f"{played.episode.sample.id} K{played.episode.frame_budget}"
    return Played(played.episode, name, name)


def _credit(value: Any) -> Credit | None:
    paid = _mapping(value)
    spelled, advantages = paid.get("spelled"), paid.get("advantages")
    if not isinstance(spelled, list) or not all(isinstance(token, str) for token in spelled):
        return None
    if advantages is None:
        return Credit(None, tuple(spelled))
    numbers = [number_of(value) for value in advantages] if isinstance(advantages, list) else [None]
    if any(number is None for number in numbers):
        return None
    return Credit(tuple(number for number in numbers if number is not None), tuple(spelled))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
