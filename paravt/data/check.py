"""What can be used of files of rows, without a model and without decoding anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paravt.data.media import local_path
from paravt.data.messages import ImageRef, VideoRef, parse_row
from paravt.data.skips import RowError
from paravt.data.tables import Rows, find_files, open_groups, read_group


@dataclass(frozen=True)
class FileCheck:
    path: Path
    rows: int
    turns: int
    """Of assistants, in rows that can be used."""
    images: int
    videos: int
    skipped: dict[str, int]
    """Rows that cannot be used, by reason."""
    examples: dict[str, str]
    """The first of each reason: its number and what is wrong."""


def check_files(patterns: Sequence[str], root: Path | None = None) -> list[FileCheck]:
    """Goes through rows of messages: is each a conversation, and are its files there?

    Damaged media, control tokens and rows that are too long are only found when they are read for a model. Raises
    DataError for a file that cannot be read at all.
    """
    return [_check(path, root) for path in find_files(patterns)]


def _check(path: Path, root: Path | None) -> FileCheck:
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for group in open_groups(path, ["messages"]):
        rows = read_group(group, ["messages", "tools"])
        for index in range(len(rows)):
            counts["rows"] += 1
            try:
                counts.update(_shown(rows, index, root))
            except RowError as error:
                skipped[error.reason] += 1
                examples.setdefault(error.reason, f"row {group.first + index}: {error}")
    return FileCheck(path, counts["rows"], counts["turns"], counts["images"], counts["videos"], dict(skipped), examples)


def _shown(rows: Rows, index: int, root: Path | None) -> Counter[str]:
    dialogue = parse_row(rows[index])
    parts = [part for turn in dialogue.turns for part in turn.content]
    for part in parts:
        if isinstance(part, VideoRef) or (isinstance(part, ImageRef) and not part.url.startswith("data:")):
            local_path(part.url, root)
    return Counter(
        turns=sum(turn.role == "assistant" for turn in dialogue.turns),
        images=sum(isinstance(part, ImageRef) for part in parts),
        videos=sum(isinstance(part, VideoRef) for part in parts),
    )
