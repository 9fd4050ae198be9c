"""Samples from JSONL: one object a line with `video`, `question`, and maybe `options`, `answer`, `type`, `id`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paravt.errors import DataError
from paravt.types import AnswerType, Sample

_KNOWN = {"video", "question", "options", "answer", "type", "id"}
_TYPES: tuple[AnswerType, ...] = ("choice", "temporal", "open")


def read_samples(path: str | Path) -> list[Sample]:
    """Read a file of samples; a relative `video` is relative to the file.

    Other keys go to `Sample.metadata`. Raises DataError, with the line's number, for a line that is not a sample and
    for an id that occurs twice.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    samples: list[Sample] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        sample = _sample(row, path, number)
        if sample.id in seen:
            raise DataError(f"{path}:{number}: the id {sample.id!r} occurs twice")
        seen.add(sample.id)
        samples.append(sample)
    if not samples:
        raise DataError(f"{path}: no samples")
    return samples


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _sample(row: Any, path: Path, number: int) -> Sample:
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
    if not isinstance(row.get("id", ""), (str, int)):
        raise bad("`id` must be a text or a number")
    if answer is not None and not isinstance(answer, (str, int, float)):
        raise bad("`answer` must be a text or a number")
    kind = row.get("type") or ("choice" if options else "open")
    if kind not in _TYPES:
        raise bad(f"`type` must be one of {', '.join(_TYPES)}")
    if kind == "choice" and not options:
        raise bad("a multiple-choice sample needs `options`")
    return Sample(
        id=str(row.get("id", number)),
        video=str(path.parent / row["video"]),  # an absolute path stays as it is
        question=row["question"],
        options=tuple(options),
        answer=None if answer is None else str(answer),
        type=kind,
        metadata={key: value for key, value in row.items() if key not in _KNOWN},
    )
