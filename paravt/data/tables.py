"""Rows of parquet and JSONL files, read group by group: a corpus is never in memory.

A group is what is read at a time: a row group of a parquet file, or a stretch of lines. Opening a file reads how its
groups are cut and nothing else.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from paravt.data.json_text import parse
from paravt.data.skips import RowError
from paravt.errors import DataError

_LINES = 512
"""In a group of a JSONL file, at most."""
_BYTES = 64 * 1024 * 1024
"""After which a group of lines ends: rows may hold images."""
_ARROW = (pa.ArrowException, OSError, ValueError, OverflowError)


@dataclass(frozen=True)
class Group:
    path: Path
    number: int
    """Of the row group; in a JSONL file the byte at which its first line begins."""
    first: int
    """The number of its first row in the file, from 0."""
    rows: int
    bytes: int
    """About what it takes in memory."""


class Rows(Protocol):
    """The rows of a group. An index gives a row as a dictionary, or raises RowError for what is none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files by name or by pattern (`data/*.parquet`), each once, whatever it is called. Raises DataError for a pattern
    that matches none."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise DataError(f"{pattern}: no such file")
        for name in names:
            found.setdefault(os.path.realpath(name), Path(name))
    return list(found.values())


def open_groups(path: Path, columns: Sequence[str] = ()) -> list[Group]:
    """The groups of a file. `columns` must be there, in a parquet file.

    Raises DataError for a file that cannot be read, is neither .parquet nor .jsonl, or has no rows.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: neither .parquet nor .jsonl")
    with reading(path):
        groups = _parquet_groups(path, columns) if path.suffix == ".parquet" else _line_groups(path)
    if not groups:
        raise DataError(f"{path}: no rows")
    return groups


def read_group(group: Group, columns: Sequence[str] = ()) -> Rows:
    """Raises DataError if the file is damaged or has changed. `columns`: what to read of a parquet file; ()
    is everything, and what the file doesn't have is left out."""
    with reading(group.path):
        return _ParquetRows(group, columns) if group.path.suffix == ".parquet" else _Lines(group)


def raw_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """All rows of a file with their numbers; what is none is given as the error that says why. Raises DataError."""
    for group in open_groups(path):
        rows = read_group(group, columns)
        for index in range(len(rows)):
            try:
                yield group.first + index, rows[index]
            except RowError as error:
                yield group.first + index, error


def relative_names(paths: Sequence[Path]) -> list[str]:
    """The names of files from the directory on that all of them have in common."""
    common = os.path.commonpath([path.absolute().parent for path in paths])
    return [path.absolute().relative_to(common).as_posix() for path in paths]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What fails within is a DataError about this file."""
    try:
        yield
    except _ARROW as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        said = (said.strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: cannot be read: {said}") from error


def column_names(path: Path, file: pq.ParquetFile) -> list[str]:
    """Raises DataError if a row would not know which of two columns is meant."""
    names: list[str] = file.schema_arrow.names
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: the column `{twice[0]}` is there twice; give each a name of its own")
    return names


def _parquet_groups(path: Path, columns: Sequence[str]) -> list[Group]:
    with pq.ParquetFile(path) as file:
        names = column_names(path, file)
        for column in columns:
            if column not in names:
                raise DataError(f"{path}: no column `{column}`; it has {', '.join(names[:20]) or 'none'}")
        groups: list[Group] = []
        first = 0
        for number in range(file.metadata.num_row_groups):
            about = file.metadata.row_group(number)
            if about.num_rows:
                groups.append(Group(path, number, first, about.num_rows, about.total_byte_size))
            first += about.num_rows
        return groups


class _ParquetRows:
    """A row becomes Python objects when it is asked for: these take many times the memory of the table."""

    def __init__(self, group: Group, columns: Sequence[str]) -> None:
        with pq.ParquetFile(group.path) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns or not columns]
            self._table = file.read_row_group(group.number, columns=wanted)
        if self._table.num_rows != group.rows:
            raise DataError(f"{group.path}: has changed while it was used")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        except _ARROW as error:
            raise RowError("not_a_row", f"cannot be decoded: {error}") from error
        return row


def _line_groups(path: Path) -> list[Group]:
    groups: list[Group] = []
    start = end = first = rows = 0
    with path.open("rb") as file:
        for line in file:
            rows += bool(line.strip())
            end += len(line)
            if rows == _LINES or (rows and end - start >= _BYTES):
                groups.append(Group(path, start, first, rows, end - start))
                start, first, rows = end, first + rows, 0
    if rows:
        groups.append(Group(path, start, first, rows, end - start))
    return groups


class _Lines:
    def __init__(self, group: Group) -> None:
        with group.path.open("rb") as file:
            file.seek(group.number)
            self._lines = [line for line in file.read(group.bytes).split(b"\n") if line.strip()]
        if len(self._lines) != group.rows:
            raise DataError(f"{group.path}: has changed while it was used")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = parse(self._lines[index])
        except ValueError as error:
            raise RowError("not_a_row", f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RowError("not_a_row", "a row is a JSON object")
        return row
