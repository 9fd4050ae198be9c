"""A JSONL file that grows while a long run works, and that a run which was stopped at any moment goes on with."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from paravt.data.json_text import parse
from paravt.errors import DataError
from paravt.files import naming


class Journal:
    """A context manager. `rows` are the lines that were there; the first `add` takes the place of one that was cut off.

    A file to which nothing is added stays as it is: it may be somebody else's, named by mistake. Raises DataError for
    another line that is no JSON object and for a file that another process writes, OSError where nothing can be
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._file: IO[bytes]
        self._end: int | None = None
        """Of the last whole line, while something may stand behind it."""
        self._newline = b""
        """What that line still lacks."""

    def __enter__(self) -> Journal:
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.path}: another process is writing it") from None
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            whole = line.endswith(b"\n")
            try:
                row = parse(line)
            except ValueError as error:
                if not whole and line.startswith(b"{"):
                    break  # cut off while it was written
                raise DataError(f"{self.path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{self.path}:{number}: not a JSON object")
            self.rows.append(row)
            end += len(line)
            self._newline = b"" if whole else b"\n"
        self._end = end
        return self

    def add(self, row: Mapping[str, Any]) -> None:
        """One write, so that no other line is ever lost with it."""
        line = self._newline + json.dumps(row).encode() + b"\n"
        with naming(self.path):
            if self._end is not None:
                self._file.truncate(self._end)
            self._end, self._newline = None, b""
            self._file.write(line)
            self._file.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with naming(self.path):  # what could not be written is tried once more
            self._file.close()
