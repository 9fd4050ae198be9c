"""Reading what runs write, whatever has become of it: what cannot be read is a note, and the rest is shown.

A file is read only if it is a regular one in the directory that it is said to be in, links followed: what a run's
directory holds may have come from anywhere, and must not make a report show other files.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paravt.report.schema import Metrics

_LONGEST = 64 << 20
"""Bytes of a line; no episode has that many."""
_LARGEST = 16 << 20
"""Bytes of a file that is read as a whole."""
_MOST_NOTES = 200
_LAST_STEP = 10**15
"""Beyond it, curves would have numbers that neither a browser nor a plot can count with."""


@dataclass
class Notes:
    """What could not be read, and what was left out: a sentence each, none twice."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        line = " ".join(line.split())
        if line not in self.lines and len(self.lines) <= _MOST_NOTES:
            self.lines.append(line if len(self.lines) < _MOST_NOTES else "... and more that could not be read")


def real_file(path: Path, roots: Iterable[Path]) -> Path | None:
    """Where a regular file is, links followed, if that is in one of the directories; else None. Never raises."""
    try:
        found = Path(os.path.realpath(path, strict=True))
        if not stat.S_ISREG(found.stat().st_mode):
            return None
        inside = any(found.is_relative_to(os.path.realpath(root)) for root in roots)
    except (OSError, ValueError, RuntimeError):  # not there, a zero byte in a name, links in a circle
        return None
    return found if inside else None


def real_directory(path: Path, root: Path, notes: Notes) -> bool:
    """Whether a directory of `root` is in it, links followed; a note if it is not."""
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        return True
    notes.add(f"{path}: a link out of {root}; not read. To show what it leads to, name that.")
    return False


def read_text(path: Path, root: Path, notes: Notes) -> str | None:
    """None, with a note, if a file that is there cannot be read; None if it is not there."""
    if not os.path.lexists(path):
        return None
    found = real_file(path, [root])
    if found is None:
        notes.add(f"{path}: not a file of {root}; not read.")
        return None
    try:
        if found.stat().st_size > _LARGEST:
            notes.add(f"{path}: larger than {_LARGEST >> 20} MB; not read.")
            return None
        return found.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.add(f"{path}: cannot be read: {error.strerror or error}.")
        return None


def read_object(path: Path, root: Path, notes: Notes) -> dict[str, Any]:
    """A file with one JSON object; {} if there is none, with a note if it is there and is none."""
    text = read_text(path, root, notes)
    if text is None:
        return {}
    value = parse(text)
    if not isinstance(value, dict):
        notes.add(f"{path}: not a JSON object; not read.")
        return {}
    return value


def parse(text: str | bytes) -> Any:
    """JSON, or None. Lone surrogates, which no text can be written with, become replacement characters."""
    try:
        value = json.loads(text)
        escapes = "\\ud" if isinstance(text, str) else b"\\ud"
        return _whole_texts(value) if escapes in text.lower() else value  # type: ignore[operator]
    except (ValueError, RecursionError):
        return None


def _whole_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole_texts(key): _whole_texts(item) for key, item in value.items()}
    return [_whole_texts(item) for item in value] if isinstance(value, list) else value


def part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object that an object has under a name; {} if there is none."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def stream(path: Path, root: Path, notes: Notes, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(offset, offset of the next line, object) of each line of a JSONL file from an offset on. Lines that are none
    are counted in a note; a last one without its end is being written, or was when the run was stopped."""
    found = real_file(path, [root])
    if found is None:
        if os.path.lexists(path):
            notes.add(f"{path}: not a file of {root}; not read.")
        return
    bad = 0
    try:
        with found.open("rb") as file:
            file.seek(start)
            at = start
            while line := file.readline(_LONGEST):
                ended = line.endswith(b"\n")
                following = at + len(line)
                value = parse(line) if ended else None
                if isinstance(value, dict):
                    yield at, following, value
                elif ended and line.strip():
                    bad += 1
                elif not ended and len(line) == _LONGEST:
                    bad += 1
                    break
                at = following
    except OSError as error:
        notes.add(f"{path}: cannot be read: {error.strerror or error}.")
    if bad:
        notes.add(f"{path}: {bad} {'line' if bad == 1 else 'lines'} could not be read; the others are shown.")


def line_at(path: Path, root: Path, offset: int) -> dict[str, Any] | None:
    """The object of the line that begins at an offset; None if there is none any more."""
    found = real_file(path, [root])
    if found is None:
        return None
    try:
        with found.open("rb") as file:
            file.seek(offset)
            value = parse(file.readline(_LONGEST))
    except OSError:
        return None
    return value if isinstance(value, dict) else None


def read_metrics(files: Sequence[Path], root: Path, notes: Notes) -> Metrics | None:
    """The columns of several metrics files side by side, by step; of a step that occurs twice, the later line."""
    rows: dict[int, dict[str, float]] = {}
    names: dict[str, None] = {}
    for path in files:
        for _, _, line in stream(path, root, notes):
            step = line.get("step")
            if isinstance(step, bool) or not isinstance(step, int) or abs(step) > _LAST_STEP:
                continue
            found = {name: value for name, value in _numbers(line) if name != "step"}
            names |= dict.fromkeys(name for name in line if name != "step")
            rows.setdefault(step, {}).update(found)
    if not rows:
        return None
    steps = sorted(rows)
    values = {name: [rows[step].get(name) for step in steps] for name in names}
    return {"step": steps, "values": {n: column for n, column in values.items() if any(v is not None for v in column)}}


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        number = number_of(value)
        if number is not None:
            yield name, float(f"{number:.6g}")


def number_of(value: object) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def to_json(value: object) -> bytes:
    """Compact ASCII JSON that every browser can parse: lone surrogates escaped, numbers that JSON lacks as null."""
    try:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
