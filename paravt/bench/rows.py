"""Rows of a benchmark's files, and what a benchmark's own module makes of one: a question, not resolved yet."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paravt.answers import LETTERS, option_label
from paravt.data.skips import RowError
from paravt.data.tables import open_groups, read_group
from paravt.errors import DataError
from paravt.types import AnswerType

_OPTION_LINE = re.compile(r"^[ \t]*\(([A-Z])\)[ \t]*", re.MULTILINE)


class BadRow(DataError):
    """A row that is no question; whoever reads rows reports it and goes on."""


@dataclass(frozen=True)
class Item:
    """One row as it is written in a file. The getters raise BadRow for what is not there or of another type."""

    values: Mapping[str, Any]
    number: int
    """In its file, from 0."""
    table: str
    """The file's name without suffix."""

    def text(self, *keys: str) -> str:
        """The first of `keys` that the row has. A number is its own text."""
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), None)
        if not _is_plain(value) or not str(value).strip():
            raise BadRow(f"no {' or '.join(f'`{key}`' for key in keys)}")
        return str(value)

    def maybe(self, key: str) -> str | None:
        """A text, or None where there is none: for keys that only a breakdown needs."""
        value = self.values.get(key)
        return str(value) if _is_plain(value) and str(value).strip() else None

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if not isinstance(value, (list, tuple)) or not value or not all(_is_plain(entry) for entry in value):
            raise BadRow(f"`{key}` is not a list of texts")
        return tuple(str(entry) for entry in value)

    def number_of(self, key: str) -> float:
        """Raises BadRow for what is no finite number."""
        number = finite(self.values.get(key))
        if number is None:
            raise BadRow(f"`{key}` is not a number")
        return number


def finite(value: object) -> float | None:
    """A finite number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _is_plain(value: object) -> bool:
    """A text or a number; NaN is how tables write that there is nothing."""
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value == value


@dataclass(frozen=True)
class Question:
    """What a row asks. Names of files are relative, as published; the gold answer is as the row gives it."""

    id: str
    video: str
    text: str
    gold: str
    """A letter or the text of an option for "choice", "start - end" in seconds for "temporal"."""
    gold_may_be_text: bool = False
    options: tuple[str, ...] = ()
    """Without labels."""
    type: AnswerType = "choice"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    subtitles: str | None = None
    subtitles_offset: float = 0.0


def read_items(path: Path) -> Iterator[tuple[int, Item | BadRow]]:
    """The rows of a .parquet, .jsonl or .json file (a list of objects), with their numbers; what is none is a BadRow.

    Raises DataError for a file that can't be read.
    """
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if not isinstance(rows, list):
            raise DataError(f"{path}: is not a list of rows")
        for number, row in enumerate(rows):
            known = isinstance(row, dict)
            yield number, Item(row, number, path.stem) if known else BadRow("a row is a JSON object")
        return
    for group in open_groups(path):
        found = read_group(group)
        for index in range(len(found)):
            number = group.first + index
            try:
                yield number, Item(found[index], number, path.stem)
            except RowError as error:
                yield number, BadRow(str(error))


def split_options(question: str) -> tuple[str, tuple[str, ...]]:
    """The stem of a question and the options that it ends with, lines of "(A) text", "(B) text" and so on.

    () if there are none. An option may go over several lines; of several lists the last one counts.
    """
    found = list(_OPTION_LINE.finditer(question))
    first = max((n for n, match in enumerate(found) if match[1] == "A"), default=len(found))
    listed = found[first:]
    if len(listed) < 2 or [match[1] for match in listed] != list(LETTERS[: len(listed)]):
        return question.strip(), ()
    ends = [match.start() for match in listed[1:]] + [len(question)]
    texts = (question[match.end() : end].strip() for match, end in zip(listed, ends, strict=True))
    return question[: listed[0].start()].strip(), tuple(texts)


def without_labels(options: Sequence[str]) -> tuple[str, ...]:
    """Options without their own labels ("A. text" for the first one); as they are unless every one has its own."""
    found = [option_label(letter).match(option) for letter, option in zip(LETTERS, options, strict=False)]
    if len(found) < len(options) or not all(found):
        return tuple(option.strip() for option in options)
    return tuple(option[match.end() :].strip() for match, option in zip(found, options, strict=True) if match)
