"""How hard questions are for a policy, as measured at several frame budgets, and which of them still teach something.

A file of measurements has a line for each question and K: `id`, `sample` (a fingerprint of what is asked), `frames`
(K), `samples` (episodes that could be scored), `passed` (those that were right), `accuracy` (their mean), `failed`
(episodes that could not be scored: counted in none of these), and `policy`, what was asked and how.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paravt.data.json_text import parse
from paravt.errors import DataError
from paravt.types import Sample


@dataclass(frozen=True)
class Difficulty:
    """One question at one K."""

    id: str
    sample: str
    frames: int
    samples: int
    passed: int
    accuracy: float | None
    """None if no episode could be scored."""
    failed: int
    policy: Mapping[str, Any]


PassRates = dict[tuple[str, str], dict[int, float]]
"""By (id, fingerprint): the share of right episodes at each K."""


def fingerprint(sample: Sample) -> str:
    """Of everything that makes a question harder or easier, its video's content left out. A measurement is of this
    question, whatever has its id."""
    asked = json.dumps([sample.question, sample.options, sample.answer, sample.type, Path(sample.video).name])
    return blake2b(asked.encode(), digest_size=8).hexdigest()


def read_difficulty(path: str | Path) -> list[Difficulty]:
    """Raises DataError, with the line's number. A last line that was cut off while it was written is left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    out = []
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):  # what stands behind the last newline is unfinished
        try:
            row = parse(line)
        except ValueError as error:
            raise _not_measured(path, number, error) from error
        out.append(measurement(row, path, number))
    return out


def measurement(row: Any, path: str | Path, number: int) -> Difficulty:
    """A line (from 1) of such a file. Raises DataError."""
    try:
        found = Difficulty(**row)
        counts = found.frames, found.samples, found.passed, found.failed
        if not isinstance(found.id, str) or not isinstance(found.sample, str):
            raise TypeError("`id` and `sample` are texts")
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            raise TypeError("`frames`, `samples`, `passed` and `failed` are whole numbers")
        if not 0 <= found.passed <= found.samples:
            raise ValueError(f"{found.passed} of {found.samples} passed")
    except (ValueError, TypeError) as error:
        raise _not_measured(path, number, error) from error
    return found


def _not_measured(path: str | Path, number: int, error: Exception) -> DataError:
    return DataError(f"{path}:{number}: not a measurement of `paravt data difficulty`: {error}")


def pass_rates(rows: Sequence[Difficulty]) -> PassRates:
    """Where nothing could be scored, nothing was measured."""
    rates: PassRates = defaultdict(dict)
    for row in rows:
        if row.samples:
            rates[row.id, row.sample][row.frames] = row.passed / row.samples
    return rates


def sift(
    samples: Sequence[Sample], rates: PassRates, above: float = 0.0, below: float = 1.0
) -> tuple[list[Sample], Counter[str]]:
    """The samples that some K solves more often than `above`, and some K less often than `below`; and how many are
    "unsolved" (left out), "always solved" (left out), "unmeasured" (kept) and "kept"."""
    kept: list[Sample] = []
    counts: Counter[str] = Counter()
    for sample in samples:
        found = rates.get((sample.id, fingerprint(sample)), {}).values()
        if not found:
            counts["unmeasured"] += 1
        elif max(found) <= above:
            counts["unsolved"] += 1
            continue
        elif min(found) >= below:
            counts["always solved"] += 1
            continue
        kept.append(sample)
    counts["kept"] = len(kept)
    return kept, counts
