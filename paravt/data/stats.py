"""What is in files of rows: lengths, calls, answers, media. Nothing is opened but the files themselves."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paravt.data.addresses import base_of, find_addresses, identity
from paravt.data.check import quantiles
from paravt.data.layouts import as_question, layout_of, options_of
from paravt.data.messages import parse_row
from paravt.data.skips import RowError
from paravt.data.tables import find_files, raw_rows
from paravt.rewards import gold_letter
from paravt.turns import parse_turn


@dataclass
class FileStats:
    path: Path
    rows: int = 0
    layouts: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    """Rows that nothing else here is about, by reason."""
    turns: Counter[int] = field(default_factory=Counter)
    """Rows by their number of assistant turns."""
    calls: Counter[int] = field(default_factory=Counter)
    """Conversations by their number of calls."""
    parallel: int = 0
    """Conversations with several calls in one turn."""
    strict: int = 0
    """Conversations whose every assistant turn is strict, the last one with an answer."""
    types: Counter[str] = field(default_factory=Counter)
    """Questions by type of answer."""
    letters: Counter[str] = field(default_factory=Counter)
    """Right answers of multiple choice: a model that always says one letter should not do well."""
    images: int = 0
    videos: int = 0
    """In all rows."""
    media: set[str] = field(default_factory=set, repr=False)
    characters: array[int] = field(default_factory=lambda: array("L"), repr=False)
    """Of what assistants say, or of the question."""

    def to_dict(self) -> dict[str, Any]:
        values = {key: dict(sorted(value.items())) if isinstance(value, Counter) else value
                  for key, value in vars(self).items()}  # fmt: skip
        return values | {
            "path": str(self.path), "media": len(self.media), "characters": quantiles(self.characters)
        }  # fmt: skip


def file_stats(patterns: Sequence[str], root: Path | None = None) -> list[FileStats]:
    """Raises DataError for a file that cannot be read at all."""
    return [_stats(path, root) for path in find_files(patterns)]


def shared_media(stats: Sequence[FileStats]) -> int:
    """How many videos and images are in more than one of the files."""
    return sum(count > 1 for count in Counter(name for one in stats for name in one.media).values())


def _stats(path: Path, root: Path | None) -> FileStats:
    done = FileStats(path)
    for number, row in raw_rows(path):
        done.rows += 1
        try:
            if isinstance(row, RowError):
                raise row
            layout = layout_of(row)
            done.layouts[layout] += 1
            done.media.update(identity(address, base_of(row, path, root)) for address in find_addresses(row))
            if layout == "conversation":
                _conversation(row, done)
            else:
                _question(row, path, number, done)
        except RowError as error:
            done.unreadable[error.reason] += 1
    return done


def _conversation(row: Mapping[str, Any], done: FileStats) -> None:
    dialogue = parse_row(row)
    parts = [part for turn in dialogue.turns for part in turn.content]
    said = [turn.text for turn in dialogue.turns if turn.role == "assistant"]
    turns = [parse_turn(text) for text in said]
    kinds = Counter(type(part).__name__ for part in parts)
    done.images += kinds["ImageRef"]
    done.videos += kinds["VideoRef"]
    done.turns[len(turns)] += 1
    done.calls[sum(len(turn.calls) for turn in turns)] += 1
    done.parallel += any(len(turn.calls) > 1 for turn in turns)
    done.strict += all(turn.strict for turn in turns) and turns[-1].answer is not None
    done.characters.append(sum(map(len, said)))


def _question(row: Mapping[str, Any], path: Path, number: int, done: FileStats) -> None:
    sample = as_question(row, path, number)
    done.videos += 1
    done.types[sample.type] += 1
    done.characters.append(len(sample.question))
    if sample.type == "choice" and sample.answer:
        done.letters[gold_letter(sample.answer, options_of(sample)) or "none"] += 1
