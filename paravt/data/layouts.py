"""Which of the known layouts a row has, and questions as samples, whatever layout they are written in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from paravt.data.addresses import is_question
from paravt.data.samples import own_sample, read_question_rows, read_samples, row_question, row_sample
from paravt.data.skips import RowError
from paravt.data.tables import find_files, raw_rows
from paravt.errors import DataError
from paravt.types import Sample

Layout = Literal["conversation", "rl", "question"]
_LETTERS = 8
"""As many options a question can have whose options nobody lists."""
_OPTION = re.compile(r"^[ \t]*\(?([A-Z])[.):][ \t]+(\S.*?)[ \t]*$", re.MULTILINE)


def layout_of(row: Mapping[str, Any]) -> Layout:
    """A conversation to learn from (`messages`), a question of published RL data (`prompt`), one of our own. Raises
    RowError for a row that is none of them."""
    if row.get("messages") is not None:
        return "conversation"
    if row.get("prompt") is not None:
        return "rl"
    if is_question(row):
        return "question"
    raise RowError("not_a_row", "has no `messages`, no `prompt`, and not both of `video` and `question`")


def as_sample(row: Mapping[str, Any], path: Path, number: int, root: Path | None) -> Sample:
    """A question with the path of its video. `path` and `number` (from 0) say where it stands. Raises RowError, also if
    there is no such video in published data."""
    return row_sample(row, _name(path, number), root) if layout_of(row) == "rl" else as_question(row, path, number)


def as_question(row: Mapping[str, Any], path: Path, number: int) -> Sample:
    """The same, wherever the video is: nothing is looked for."""
    if layout_of(row) == "rl":
        return row_question(row, _name(path, number))
    given = {key: value for key, value in row.items() if value is not None}  # columns of a parquet file
    try:
        return own_sample(given, path, number + 1)
    except DataError as error:
        raise RowError("sample", str(error).partition(f"{path}:{number + 1}: ")[2]) from error


def read_questions_of(files: Sequence[str], root: Path | None) -> tuple[list[Sample], Counter[str]]:
    """The questions of files in our own layout or in that of published RL data, and how many rows of the latter were
    skipped for which reason. Ids are as training has them. Raises DataError."""
    paths = find_files(files)
    first = {path: next((row for _, row in raw_rows(path) if not isinstance(row, RowError)), {}) for path in paths}
    published = [str(path) for path in paths if first[path].get("prompt") is not None]
    samples, skipped = read_question_rows(published, root) if published else ([], Counter())
    samples += [sample for path in paths if str(path) not in published for sample in read_samples(path)]
    twice = [id for id, count in Counter(sample.id for sample in samples).items() if count > 1]
    if twice:
        raise DataError(
            f"{', '.join(map(str, paths))}: the id {twice[0]!r} occurs twice; give ids or one file at a time"
        )
    return samples, skipped


def _name(path: Path, number: int) -> str:
    return f"{path.name}/{number}"


def options_of(sample: Sample) -> tuple[str, ...]:
    """The options of a multiple-choice question: its own, or those that its text lists, or as many without a text as
    it can have if nobody lists them."""
    return sample.options or listed_options(sample.question) or ("",) * _LETTERS


def listed_options(text: str) -> tuple[str, ...]:
    """The options that stand in a question's text, a line each (`A. ..`, `(A) ..`); () if there are none."""
    options: list[str] = []
    for letter, option in _OPTION.findall(text):
        if letter == "A":
            options = []
        if letter == chr(ord("A") + len(options)):
            options.append(option)
    return tuple(options) if len(options) > 1 else ()
