"""Copies of files of rows with some rows changed or left out: the same layout, the same schema, group by group."""

from __future__ import annotations

import fcntl
import filecmp
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from paravt.data.json_text import parse, write
from paravt.data.tables import column_names, find_files, reading, relative_names
from paravt.errors import DataError
from paravt.files import naming

Change = Callable[["int", "dict[str, Any] | None"], "dict[str, Any] | None"]
"""(number of the row in its file, row) -> the row to write, or None to leave it out. A row that cannot be read is given
as None; what is returned for it only says whether it is copied as it is."""

KEEP: dict[str, Any] = {}
"""Copies a row as it is."""
_BATCH = 256
_SUFFIXES = (".parquet", ".jsonl")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write to; it takes the place of `path` once all of it is there, unless it was removed.

    One that a killed process has left is written anew. Raises OSError, whatever cannot be written within, and DataError
    while another process writes it.
    """
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), partial.open("ab") as lock:
        if not _alone(partial, lock):
            raise DataError(f"{path}: another process is writing it")
        try:
            yield partial
            if partial.exists():
                partial.replace(path)
        except BaseException:  # only then: once it has been renamed, the name may be another process's
            partial.unlink(missing_ok=True)
            raise


def _alone(path: Path, lock: IO[bytes]) -> bool:
    """Whether this open file is locked now and still the one of that name."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path.stat().st_ino == os.fstat(lock.fileno()).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def copy_rows(source: Path, target: Path, columns: Sequence[str], change: Change, *, keep: bool = False) -> int:
    """Copy a file; returns the number of rows written. Where that is 0, there is no file.

    `columns` are all that `change` reads and may change: the others of a parquet file are copied unseen. With `keep`
    nothing takes the place of what is there, unless it is the very same. Raises DataError for that, and for a file that
    cannot be read or has no rows, OSError for one that cannot be written.
    """
    read = 0

    def counted(number: int, row: dict[str, Any] | None) -> dict[str, Any] | None:
        nonlocal read
        read += 1
        return change(number, row)

    with whole_file(target) as partial:
        if source.suffix == ".parquet":
            count = _copy_parquet(source, partial, columns, counted)
        else:
            count = _copy_lines(source, partial, counted)
        if not read:
            raise DataError(f"{source}: no rows")
        if keep and target.exists() and not filecmp.cmp(partial, target, shallow=False):
            raise DataError(f"{target}: is there already, and is no copy of {source}; remove it, or choose another OUT")
        if not count:
            partial.unlink()
            target.unlink(missing_ok=True)  # of another time
    return count


def _copy_parquet(source: Path, target: Path, columns: Sequence[str], change: Change) -> int:
    written = 0
    with reading(source), pq.ParquetFile(source) as file:
        names, schema = column_names(source, file), file.schema_arrow
    with pq.ParquetWriter(target, schema) as out:
        for whole in _changed_groups(source, [name for name in columns if name in names], change):
            out.write_table(whole)
            written += whole.num_rows
    return written


def _changed_groups(source: Path, columns: Sequence[str], change: Change) -> Iterator[pa.Table]:
    first = 0
    with reading(source), pq.ParquetFile(source) as file:
        for group in range(file.metadata.num_row_groups):
            made: list[pa.Table] = []
            for batch in file.iter_batches(_BATCH, row_groups=[group]):
                made += _changed(pa.Table.from_batches([batch]), columns, change, first)
                first += batch.num_rows
            if made and (whole := pa.concat_tables(made)).num_rows:
                yield whole


def _changed(table: pa.Table, columns: Sequence[str], change: Change, first: int) -> list[pa.Table]:
    try:
        rows = table.select(columns).to_pylist()
    except (pa.ArrowException, ValueError, OverflowError):
        if table.num_rows > 1:  # the others can be read
            each = range(table.num_rows)
            return [part for n in each for part in _changed(table.slice(n, 1), columns, change, first + n)]
        return [] if change(first, None) is None else [table]
    made = [change(first + number, row) for number, row in enumerate(rows)]
    kept = [number for number, row in enumerate(made) if row is not None]
    out = table if len(kept) == len(made) else table.take(pa.array(kept, pa.int64()))
    for name in columns:
        values = [(made[number] or rows[number])[name] for number in kept]
        if values != [rows[number][name] for number in kept]:
            field = table.schema.field(name)
            out = out.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return [out]


def _copy_lines(source: Path, target: Path, change: Change) -> int:
    number = written = 0
    with target.open("wb") as out:
        for line in _lines(source):
            try:
                read = parse(line)
            except ValueError:
                read = None
            row = read if isinstance(read, dict) else None
            made = change(number, row)
            number += 1
            if made is None:
                continue
            written += 1
            same = row is None or not made or made == row
            text = line.rstrip(b"\r\n") if same else write(made).encode()
            out.write(text + b"\n")
    return written


def _lines(source: Path) -> Iterator[bytes]:
    with reading(source), source.open("rb") as file:
        yield from (line for line in file if line.strip())


def paired_files(given: str, out: Path) -> list[tuple[Path, Path]]:
    """(file, its copy) for a file, a directory or a pattern. Of several files, the copies lie below `out` as these do
    below the directory that they have in common. Raises DataError if there is no file."""
    if Path(given).is_dir():
        inside = sorted(path for path in Path(given).rglob("*") if path.suffix in _SUFFIXES and path.is_file())
        below = os.path.realpath(out) + os.sep
        if not f"{os.path.realpath(given)}{os.sep}".startswith(
            below
        ):  # copies below the originals are not copied again
            inside = [path for path in inside if not os.path.realpath(path).startswith(below)]
        if not inside:
            raise DataError(f"{given}: no .parquet or .jsonl files in it")
        return [(path, out / path.relative_to(given)) for path in inside]
    found = find_files([given])
    if len(found) == 1 and out.suffix in _SUFFIXES and not out.is_dir():
        if out.suffix != found[0].suffix:
            raise DataError(f"{out}: a copy has the layout of its original, {found[0].suffix}")
        return [(found[0], out)]
    return [(path, out / name) for path, name in zip(found, relative_names(found), strict=True)]
