"""Reading what a run writes while it may still be writing, and where an evaluation writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, without a last line that is half written; [] if there is no file."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def last_words(log: Path) -> str:
    """The last line that says something; "" if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def episodes_file(evaluation: Path, budget: int) -> Path:
    """Where an evaluation has its episodes of one K."""
    return evaluation / "episodes" / f"K{budget}.jsonl"
