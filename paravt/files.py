"""Writing files so that nobody ever finds half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever cannot be written within is this file: a full disk names none, and a file beside it is nobody's."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all, also with several writers; a link is replaced, not followed.
    Raises OSError."""
    with naming(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.chmod(0o644)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def add_line(path: Path, line: str) -> None:
    """To the end of a text file. Raises OSError."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
