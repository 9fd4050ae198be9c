"""Subtitles as a part of the question: what is said at the frames that the model is shown.

`Sample.metadata["subtitles"]` names a file, .srt or .json; `metadata["subtitles_offset"]` is the second of the file's
clock at which the video begins (0 without it). Two shapes of JSON are known: a list of {"timestamp": [start, end],
"text"}, and one of {"start": "HH:MM:SS.f", "end", "line"}. An end that is null lasts as long as the video.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from paravt.chat import seconds
from paravt.errors import VideoError
from paravt.prompts import SUBTITLES, fill
from paravt.tools import clock_seconds
from paravt.types import Sample

_ARROW = re.compile(r"^\s*([\d:.,]+)\s*-->\s*([\d:.,]+)")
_TAG = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")
_SHORTEST = 1.0
"""Seconds. A shorter cue counts as one of this length around its middle, so that a frame can fall into it."""


@dataclass(frozen=True)
class Cue:
    """A line of subtitles; times in seconds of the video. `end` is infinite where the file gives none."""

    start: float
    end: float
    text: str


def subtitle_text(sample: Sample, times: Sequence[float]) -> str:
    """The block that stands before the question: what is said at `times` (the frames' own, in seconds).

    "" if the sample has no subtitles, or nothing is said then. Raises VideoError if the file can't be read.
    """
    path = sample.metadata.get("subtitles")
    if not isinstance(path, str):
        return ""
    cues = cues_at(read_cues(path, float(sample.metadata.get("subtitles_offset", 0.0))), times)
    lines = [f"[{_window(cue)}] {cue.text}" for cue in cues]
    return fill(SUBTITLES, lines="\n".join(lines)) if lines else ""


def _window(cue: Cue) -> str:
    if math.isinf(cue.end):
        return f"from {seconds(cue.start)} seconds"
    return f"{seconds(cue.start)} - {seconds(cue.end)} seconds"


def cues_at(cues: Iterable[Cue], times: Iterable[float]) -> list[Cue]:
    """The cues that cover one of the times, each once, in order. Of cues in a row with the same text (captions that
    roll repeat their lines) the first is kept."""
    moments = sorted(times)
    out: list[Cue] = []
    for cue in cues:
        start, end = cue.start, cue.end
        if end - start < _SHORTEST:
            middle = (start + end) / 2
            start, end = middle - _SHORTEST / 2, middle + _SHORTEST / 2
        if any(start <= time <= end for time in moments) and not (out and out[-1].text == cue.text):
            out.append(cue)
    return out


@lru_cache(maxsize=64)
def read_cues(path: str, offset: float = 0.0) -> tuple[Cue, ...]:
    """The cues of a file, by their starts; without tags, and without those that end before the video begins.

    Raises VideoError if it can't be read, or holds no cue.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig", errors="replace")
    except (OSError, ValueError) as error:
        raise VideoError(path, f"subtitles cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found = _json_cues(path, text) if path.lower().endswith(".json") else _srt_cues(text)
    cues = []
    for start, end, said in found:
        line = " ".join(html.unescape(_TAG.sub(" ", said.replace("\\N", " "))).split())
        if line and start <= end and end > offset:
            cues.append(Cue(max(0.0, start - offset), end - offset, line))
    if not cues:
        raise VideoError(path, "holds no subtitles in a form that is known (.srt, or a .json list)")
    return tuple(sorted(cues, key=lambda cue: (cue.start, cue.end)))


def _srt_cues(text: str) -> list[tuple[float, float, str]]:
    out: list[tuple[float, float, str]] = []
    said: list[str] = []
    window: tuple[float, float] | None = None
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines):
        arrow = _ARROW.match(line)
        following = _ARROW.match(lines[number + 1]) if number + 1 < len(lines) else None
        if arrow:
            start, end = _clock(arrow[1]), _clock(arrow[2])
            window, said = (None if start is None or end is None else (start, end)), []
        elif line.strip() and not (following and line.strip().isdigit()):  # a number before a time is the cue's own
            said.append(line)
        elif window is not None:
            out.append((*window, " ".join(said)))
            window, said = None, []
    return out


def _json_cues(path: str, text: str) -> list[tuple[float, float, str]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VideoError(path, f"subtitles are not JSON: {error}") from error
    out = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            continue
        pair = row.get("timestamp")
        start, end = pair if isinstance(pair, list) and len(pair) == 2 else (row.get("start"), row.get("end"))
        said, begins, ends = row.get("text", row.get("line")), _clock(start), _clock(end)
        if isinstance(said, str) and begins is not None:
            out.append((begins, math.inf if ends is None else ends, said))
    return out


def _clock(value: Any) -> float | None:
    """Seconds of a number or a clock; None if it is neither."""
    if isinstance(value, str):
        return clock_seconds(value.strip().replace(",", "."))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None
