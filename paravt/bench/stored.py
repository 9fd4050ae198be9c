"""What a run's files must hold when they are read again: whoever wrote them, nothing else gets into a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from paravt.errors import DataError

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Asked:
    id: str
    asked: str


@dataclass(frozen=True)
class _Head:
    """What every line of rows.jsonl has beside the details of its episode."""

    bench: str
    config: str
    tries: int
    place: str
    sample: _Asked
    answer: str | None
    timings: Mapping[str, float]


@dataclass(frozen=True)
class _Grade:
    """A line of grades.jsonl."""

    bench: str
    id: str
    answer: str
    reference: str
    judge: str
    value: Annotated[float, Field(ge=0, le=1)] | None
    explanation: str


@dataclass(frozen=True)
class _Named:
    name: str


@dataclass(frozen=True)
class _Budget:
    frame_budget: int


@dataclass(frozen=True)
class _Recipe:
    """What a recipe has for certain."""

    mode: _Named
    model: _Named
    episode: _Budget


HEAD, GRADE, RECIPE = TypeAdapter(_Head), TypeAdapter(_Grade), TypeAdapter(_Recipe)


def read_json(data: bytes, where: object) -> Any:
    """Raises DataError."""
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error


def checked(kind: TypeAdapter[_T], value: object, where: object) -> _T:
    """What was read, if it has the types that were written. Raises DataError."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "all of it"
        raise DataError(f"{where}: cannot be used: {name}: {first['msg']}") from error
