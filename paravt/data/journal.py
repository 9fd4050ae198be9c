"""A JSONL file that grows while a long run works, and that a run which was stopped at any moment goes on with."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from paravt.errors import DataError
from paravt.files import naming


class Journal:
    """A context manager. `rows` are the lines that were there; one that was cut off is removed.

    Raises DataError for another line that is no JSON object and for a file that another process writes, OSError where
    nothing can be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._file: IO[bytes]

    def __enter__(self) -> Journal:
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.path}: another process is writing it") from None
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{self.path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{self.path}:{number}: not a JSON object")
            self.rows.append(row)
            end += len(line)
        self._file.truncate(end)
        return self

    def add(self, row: Mapping[str, Any]) -> None:
        """One write, so that no other line is ever lost with it."""
        with naming(self.path):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with naming(self.path):  # what could not be written is tried once more
            self._file.close()
