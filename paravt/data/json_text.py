"""JSON in rows. It comes from anywhere, and is gone through by functions that call themselves: what is nested deeper
than any row has to be is refused as what is no JSON is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

DEEPEST = 64
"""Lists and objects within each other."""


def parse(text: str | bytes, constant: Callable[[str], Any] | None = None) -> Any:
    """`constant` makes something of NaN and Infinity. Raises ValueError."""
    try:
        found = json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level: list[Any] = [[found]]
    for _ in range(DEEPEST + 1):
        level = [inside for item in level for inside in _items(item) if isinstance(inside, (dict, list))]
        if not level:
            return found
    raise ValueError("nested too deeply")


def write(value: object) -> str:
    """Characters as they are; but half of one is an escape, since no file can hold it."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
