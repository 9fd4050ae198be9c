"""What can be used of files of rows, and what is wrong with the rest."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paravt.chat import TokenChat
from paravt.data.inspect import Inspected, Inspector
from paravt.data.json_text import parse
from paravt.data.probing import VideoProbe
from paravt.data.skips import RowError
from paravt.data.tables import find_files, raw_rows
from paravt.data.traces import RowConfig
from paravt.errors import DataError

_AHEAD = 8
"""Rows for each worker that are being looked at while the first of them is waited for."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a row."""

    file: str
    row: int
    """From 0."""
    id: str | None
    kind: str
    message: str
    usable: bool
    """Whether the row is used all the same."""


@dataclass
class FileCheck:
    path: Path
    rows: int = 0
    good: int = 0
    """Rows without any fault."""
    turns: int = 0
    """Of assistants, in rows that can be used."""
    images: int = 0
    videos: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows that cannot be used, by reason."""
    faults: Counter[str] = field(default_factory=Counter)
    """Of rows that are used all the same, by kind."""
    examples: dict[str, str] = field(default_factory=dict)
    """Of rows that cannot be used, the first of each kind: its number and what is wrong."""
    fault_examples: dict[str, str] = field(default_factory=dict)
    """The same of rows that are used all the same: a kind can be both."""
    tokens: array[int] = field(default_factory=lambda: array("L"))
    """Of each row that can be used (questions: what the episode begins with), if there is a model to count them for."""

    @property
    def usable(self) -> int:
        return self.rows - self.skipped.total()

    def to_dict(self) -> dict[str, Any]:
        values = {**vars(self), "path": str(self.path), "usable": self.usable}
        return values | {"tokens": quantiles(self.tokens), "skipped": dict(self.skipped), "faults": dict(self.faults)}


def quantiles(values: Sequence[int]) -> dict[str, int] | None:
    """Median, 95th percentile, largest and sum; None of nothing."""
    if not values:
        return None
    ranked = sorted(values)
    return {
        "p50": ranked[len(ranked) // 2],
        "p95": ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))],
        "max": ranked[-1],
        "sum": sum(ranked),
    }


def check_files(
    patterns: Sequence[str],
    config: RowConfig | None = None,
    *,
    frames: int = 64,
    workers: int | None = None,
    decode: bool = True,
    chat: TokenChat | None = None,
    on_fault: Callable[[Fault], None] = lambda fault: None,
    on_row: Callable[[], None] = lambda: None,
) -> list[FileCheck]:
    """Look at every row of files of any layout: conversations, published RL rows, questions of our own.

    Of every video the first and the last of `frames` overview frames are decoded, each video once (`decode=False`
    reads the container alone); reference answers are compared with the options, windows with the duration of the
    video; ids and whole rows that occur twice are found, over all files. `chat` counts tokens, as an episode or
    training would have them. Faults are told in the order of the rows. Raises DataError for a file that cannot be read
    at all.
    """
    workers = workers or os.cpu_count() or 1
    paths = find_files(patterns)
    probe = VideoProbe(workers, frames, decode)
    inspector = Inspector(probe, config or RowConfig(), frames, chat, decode)
    twice = _Twice()
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="paravt-check") as pool:
            return [_check(path, inspector, pool, workers * _AHEAD, twice, on_fault, on_row) for path in paths]
    finally:
        probe.close()


def _check(
    path: Path,
    inspector: Inspector,
    pool: ThreadPoolExecutor,
    ahead: int,
    twice: _Twice,
    on_fault: Callable[[Fault], None],
    on_row: Callable[[], None],
) -> FileCheck:
    done = FileCheck(path)
    for number, row, looked in _inspected(path, inspector, pool, ahead):
        done.rows += 1
        if looked.loaded is not None:
            _count_tokens(looked, inspector, done)
        if not isinstance(row, RowError):
            looked.faults += twice.seen(looked.id, row, f"{path}: row {number}")
        if looked.skip is None:
            done.turns += looked.turns
            done.images += looked.images
            done.videos += looked.videos
        done.good += looked.skip is None and not looked.faults
        for counts, examples, (kind, message) in _named(looked, done):
            counts[kind] += 1
            examples.setdefault(kind, f"row {number}: {message}")
            on_fault(Fault(str(path), number, looked.id, kind, message, looked.skip is None))
        on_row()
    return done


def _named(looked: Inspected, done: FileCheck) -> Iterator[tuple[Counter[str], dict[str, str], tuple[str, str]]]:
    """What is wrong with a row, and where it is counted. One that is skipped has one reason."""
    if looked.skip is not None:
        yield done.skipped, done.examples, looked.skip
        return
    for fault in looked.faults:
        yield done.faults, done.fault_examples, fault


def _inspected(
    path: Path, inspector: Inspector, pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[int, dict[str, Any] | RowError, Inspected]]:
    """Rows in order, looked at on threads ahead of their turn."""
    waiting: deque[tuple[int, dict[str, Any] | RowError, Future[Inspected]]] = deque()
    for number, row in raw_rows(path):
        waiting.append((number, row, pool.submit(inspector.look, row, path, number)))
        if len(waiting) >= ahead:
            first, shown, looked = waiting.popleft()
            yield first, shown, looked.result()
    for number, row, looked in waiting:
        yield number, row, looked.result()


def _count_tokens(looked: Inspected, inspector: Inspector, done: FileCheck) -> None:
    builder, loaded = inspector.builder, looked.loaded
    assert builder is not None
    assert loaded is not None
    try:
        if looked.layout == "conversation":
            count = len(builder.render(loaded).ids)
        else:
            count = len(builder.chat.open(loaded.messages, loaded.tools).ids)
            if (most := builder.config.max_tokens or builder.chat.context_limit) is not None and count > most:
                looked.fault("too_long", f"{count} tokens before the first turn; at most {most}")
        done.tokens.append(count)
    except RowError as error:
        looked.skip = (error.reason, str(error))
    looked.loaded = None


class _Twice:
    """Where ids and rows were first seen."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._rows: dict[bytes, str] = {}

    def seen(self, id: str | None, row: dict[str, Any], where: str) -> list[tuple[str, str]]:
        faults = []
        if id is not None and (first := self._ids.setdefault(id, where)) != where:
            faults.append(("duplicate_id", f"the id {id[:60]!r} is also that of {first}"))
        content = json.dumps(_plain({k: v for k, v in row.items() if k != "id"}), sort_keys=True, default=str)
        key = blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if (first := self._rows.setdefault(key, where)) != where:
            faults.append(("duplicate_row", f"the same as {first}"))
        return faults


def _plain(value: Any) -> Any:
    """The same for the same row in another layout: texts that are JSON are decoded, what is null is not there."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return _plain(parse(value))
        except (ValueError, RecursionError):  # a text in a text in a text ...
            return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def require_usable(checks: Sequence[FileCheck]) -> None:
    """Raises DataError for a file without a row that can be used."""
    for check in checks:
        if not check.usable:
            reason, count = check.skipped.most_common(1)[0]
            raise DataError(f"{check.path}: none of {check.rows} rows can be used: {count} {reason}")
