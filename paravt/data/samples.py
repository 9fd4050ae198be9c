"""Samples: questions from JSONL of our own, and rows of published RL data.

Ours have one object a line with `video`, `question`, and maybe `options`, `answer`, `type`, `id`. The others have
`prompt` (turns, the question in the last one of the user), `videos` and `extra_info` with `answer` and
`question_type`, in parquet or JSONL.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paravt.data.addresses import bare
from paravt.data.json_text import parse
from paravt.data.media import local_path
from paravt.data.messages import read_json
from paravt.data.skips import RowError
from paravt.data.tables import find_files, raw_rows, relative_names
from paravt.errors import DataError
from paravt.types import AnswerType, Sample

_KNOWN = {"video", "question", "options", "answer", "type", "id"}
_TYPES: tuple[AnswerType, ...] = ("choice", "temporal", "open")
_ROW_TYPES: dict[str, AnswerType] = {"mcq": "choice", "tvg": "temporal"}
_PLACEHOLDER = re.compile(r"<(?:video|image)>\s*")


def read_samples(path: str | Path) -> list[Sample]:
    """Read a file of samples; a relative `video` is relative to the file.

    Other keys go to `Sample.metadata`. Raises DataError, with the line's number, for a line that is not a sample and
    for an id that occurs twice.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # texts may hold other characters that end a line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    samples: list[Sample] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse(line, _refuse)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        sample = own_sample(row, path, number)
        if sample.id in seen:
            raise DataError(f"{path}:{number}: the id {sample.id!r} occurs twice")
        seen.add(sample.id)
        samples.append(sample)
    if not samples:
        raise DataError(f"{path}: no samples")
    return samples


def read_question_rows(files: Sequence[str], root: str | Path | None = None) -> tuple[list[Sample], Counter[str]]:
    """Rows of published RL data as samples, and how many were skipped for which reason.

    `root` is where relative paths of videos begin. An id is the file's name (from the directory on that all files have
    in common) and the row's number. The prompt's system turn goes to `Sample.metadata`: the episode has one of its own.
    Raises DataError if no row can be used.
    """
    samples: list[Sample] = []
    skipped: Counter[str] = Counter()
    first = ""
    found = find_files(files)
    for path, name in zip(found, relative_names(found), strict=True):
        for number, row in raw_rows(path):
            try:
                if isinstance(row, RowError):
                    raise row
                samples.append(row_sample(row, f"{name}/{number}", root))
            except RowError as error:
                skipped[error.reason] += 1
                first = first or f"{path}: row {number}: {error}"
    if not samples:
        raise DataError(f"none of {sum(skipped.values())} rows can be used; the first: {first}")
    return samples, skipped


def row_sample(row: Mapping[str, Any], id: str, root: str | Path | None = None) -> Sample:
    """One row of published RL data. Raises RowError, also if its video is not there."""
    asked = row_question(row, id)
    return replace(asked, video=str(local_path(asked.video, None if root is None else Path(root))))


def row_question(row: Mapping[str, Any], id: str) -> Sample:
    """The same with the video as the row has it, wherever it is. Raises RowError."""
    prompt = read_json(row.get("prompt"), "prompt")
    turns = [turn for turn in prompt if isinstance(turn, dict)] if isinstance(prompt, list) else []
    texts = {str(turn.get("role")): _content(turn.get("content")) for turn in turns}
    question = _PLACEHOLDER.sub("", texts.get("user", "")).strip()
    if not question:
        raise RowError("no_question", "`prompt` has no turn of the user with a text")
    extra = read_json(row.get("extra_info"), "extra_info")
    answer = extra.get("answer") if isinstance(extra, dict) else None
    if not _is_answer(answer) or not str(answer).strip():
        raise RowError("answer", "`extra_info` has no `answer`")
    assert isinstance(extra, dict)
    videos = read_json(row.get("videos"), "videos")
    found = [video.get("video") if isinstance(video, dict) else video for video in videos or ()] \
        if isinstance(videos, list) else []  # fmt: skip
    if len(found) != 1 or not isinstance(found[0], str) or not found[0]:
        raise RowError("videos", f"{len(found)} videos; a question is about one")
    kind = extra.get("question_type")
    system = texts.get("system")
    return Sample(
        id=id,
        video=found[0],
        question=question,
        answer=str(answer),
        type=_ROW_TYPES.get(str(kind), "open"),
        metadata={"source": row.get("data_source"), "question_type": kind, **({"system": system} if system else {})},
    )


def _content(content: object) -> str:
    """The text of a turn's content; media stand first in the episode, wherever they stand here."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def _is_answer(value: object) -> bool:
    """A text or a finite number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def own_sample(row: Any, path: Path, number: int) -> Sample:
    """One line of a file of our own. Raises DataError."""

    def bad(reason: str) -> DataError:
        return DataError(f"{path}:{number}: {reason}")

    if not isinstance(row, dict):
        raise bad("a sample is a JSON object")
    for key in ("video", "question"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise bad(f"`{key}` must be a text")
    options = row.get("options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options) or len(options) > 26:
        raise bad("`options` must be a list of at most 26 texts")
    answer = row.get("answer")
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id", ""), (str, int)):
        raise bad("`id` must be a text or a number")
    if answer is not None and not _is_answer(answer):
        raise bad("`answer` must be a text or a number")
    kind = row.get("type") or ("choice" if options else "open")
    if kind not in _TYPES:
        raise bad(f"`type` must be one of {', '.join(_TYPES)}")
    if kind == "choice" and not options:
        raise bad("a multiple-choice sample needs `options`")
    return Sample(
        id=str(row.get("id", number)),
        video=str(path.parent / bare(row["video"])),  # an absolute path stays as it is
        question=row["question"],
        options=tuple(options),
        answer=None if answer is None else str(answer),
        type=kind,
        metadata={key: value for key, value in row.items() if key not in _KNOWN},
    )
