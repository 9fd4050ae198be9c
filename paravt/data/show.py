"""One row as a model sees it: the text of its very tokens, and which of them are learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt.chat import TokenChat
from paravt.data.inspect import opening
from paravt.data.layouts import as_sample, layout_of
from paravt.data.probing import VideoProbe
from paravt.data.skips import RowError
from paravt.data.tables import find_files, raw_rows
from paravt.data.traces import TraceBuilder
from paravt.errors import DataError, VideoError
from paravt.types import Frame, Trace

_PADS = re.compile(r"(?:<\|image_pad\|>)+")
_PAD = "<|image_pad|>"


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens that are all learned, or all not."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Shown:
    name: str
    """File and number."""
    trace: Trace
    pieces: tuple[Piece, ...]

    @property
    def learned(self) -> int:
        return sum(self.trace.loss_mask)


def find_row(path: Path, wanted: str) -> tuple[int, dict[str, Any]]:
    """A row by its number (from 0) or else, if it has not as many rows, by its `id`. Raises DataError."""
    named: tuple[int, dict[str, Any]] | None = None
    for number, row in raw_rows(path):
        if wanted == str(number):
            if isinstance(row, RowError):
                raise DataError(f"{path}: row {number}: {row}")
            return number, row
        if named is None and not isinstance(row, RowError) and str(row.get("id")) == wanted:
            named = number, row
            if not wanted.isdecimal():
                break
    if named is not None:
        return named
    raise DataError(f"{path}: no row {wanted}; rows are counted from 0")


def show_row(file: str, wanted: str, builder: TraceBuilder, frames: int = 64) -> Shown:
    """A conversation as it is trained on, or a question as an episode with K = `frames` begins (in black frames: what
    is shown of them is their number, size and time). Raises DataError, RowError included, if it cannot be used."""
    (path, *more) = find_files([file])
    if more:
        raise DataError(f"{file}: {1 + len(more)} files; show a row of one")
    number, row = find_row(path, wanted)
    name = f"{path}: row {number}"
    try:
        if layout_of(row) == "conversation":
            trace = builder.build(row)
        else:
            sample = as_sample(row, path, number, builder.config.root)
            probe = VideoProbe(1, decode=False)
            try:
                info = probe.info(Path(sample.video))
                loaded = opening(sample, info, builder.chat, builder.config, frames, probe)
            except VideoError as error:
                raise RowError("media_damaged", str(error)) from error
            finally:
                probe.close()
            trace = Trace("main", "main").append(builder.chat.open(loaded.messages, loaded.tools))
    except RowError as error:
        raise DataError(f"{name}: would be skipped ({error.reason}): {error}") from error
    return Shown(name, trace, tuple(pieces(trace, builder.chat)))


def pieces(trace: Trace, chat: TokenChat) -> list[Piece]:
    """The text that the ids of each segment spell; the placeholders of an image are one note each."""
    return [
        Piece(_with_notes(chat.tokenizer.decode(list(segment.ids)), segment.images, chat), segment.sampled)
        for segment in trace.segments
    ]


def _with_notes(text: str, images: Sequence[Frame], chat: TokenChat) -> str:
    waiting = iter(images)

    def note(pads: re.Match[str]) -> str:
        frame = next(waiting)
        height, width = frame.pixels.shape[:2]
        count = len(pads[0]) // len(_PAD)
        assert count == chat.image_tokens(frame), "placeholders and frames do not agree"
        return f"{_PAD}\N{MULTIPLICATION SIGN}{count}({width}\N{MULTIPLICATION SIGN}{height})"

    return _PADS.sub(note, text)
