"""An episode as a page shows it: JSON values of `paravt.report.schema`. Pure; opens nothing."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paravt.report.pictures import CROP_WIDTH, OVERVIEW_WIDTH, Pictures, frame_picture
from paravt.report.schema import CropView, EpisodeRow, EpisodeView, PieceKind, PieceView, Thumbnail, TurnView
from paravt.rewards import forced_prefix
from paravt.structure import FormatKind, turn_kind, turn_stops
from paravt.types import BadToolCall, Crop, Episode, Frame, Segment, ToolCall, Trace, Turn

FAILURES: Mapping[FormatKind, str] = {
    "think_unclosed": "the reasoning is not closed",
    "think_missing": "no reasoning before the structure",
    "call_malformed": "a call that cannot be read",
    "call_python": "a call in Python style",
    "call_repaired": "a call that had to be repaired",
    "prose_between": "text where only structure may stand",
    "junk_after": "something after the end of the structure",
    "answer_empty": "an empty answer",
    "answer_unclosed": "the answer is not closed",
    "structure_missing": "neither a call nor an answer",
    "length": "cut off at the token limit",
    "forced": "a forced answer",
}
"""The kinds of `paravt.structure` in words."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PLACEHOLDER = re.compile(r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>")


@dataclass(frozen=True)
class Credit:
    """What the sampled tokens of a trace were paid, in their order, and how they are spelled: equally long."""

    advantages: tuple[float, ...] | None
    """None if nothing was learned from the trace."""
    spelled: tuple[str, ...]


def episode_view(
    episode: Episode,
    pictures: Pictures = frame_picture,
    *,
    id: str | None = None,
    credit: Mapping[str, Credit] | None = None,
    video_url: str | None = None,
) -> EpisodeView:
    """`credit` is by the names of traces. Numbers that are not finite are left out (None, or 0 for times)."""
    sample, credit = episode.sample, credit or {}
    frames = {frame.time: frame for trace in episode.traces for frame in trace.images}
    calls = {(n, m): text for n, turn in enumerate(episode.turns) for m, text in enumerate(call_texts(turn))}
    return {
        "id": sample.id if id is None else id,
        "question": sample.question,
        "options": list(sample.options),
        "truth": sample.answer,
        "video": os.path.basename(sample.video.rstrip("/")),
        "video_url": video_url,
        "duration": finite(episode.duration) or 0.0,
        "frame_budget": episode.frame_budget,
        "dispatch": episode.dispatch,
        "answer": episode.answer,
        "forced": episode.forced,
        "end": episode.end,
        "overview": thumbnails(episode.overview_times, frames, pictures, OVERVIEW_WIDTH),
        "turns": _turns(episode, credit.get(episode.main.name)),
        "crops": [
            crop_view(
                crop,
                pictures,
                call=calls.get((crop.turn, crop.index)),
                frames=frames,
                credit=credit.get(crop.trace.name) if crop.trace else None,
            )
            for crop in episode.crops
        ],
        "rewards": {
            name: {"value": finite(score.value), "explanation": score.explanation}
            for name, score in episode.rewards.items()
        },
        "errors": [
            {"kind": error.kind, "where": error.where, "message": error.message, "scored": error.scored}
            for error in episode.errors
        ],
        "timings": {name: finite(value) or 0.0 for name, value in episode.timings.items()},
        "prompt_tokens": sum(trace.prompt_tokens for trace in episode.traces),
        "sampled_tokens": sum(map(_sampled, episode.traces)),
    }


def crop_view(
    crop: Crop,
    pictures: Pictures = frame_picture,
    *,
    call: str | None = None,
    frames: Mapping[float, Frame] | None = None,
    credit: Credit | None = None,
) -> CropView:
    """`call` is the call as it was written, where its turn is known. `frames` by time: those that are not in the
    crop's own trace (`evidence: frames` shows them to the main agent alone)."""
    own = {} if crop.trace is None else {frame.time: frame for frame in crop.trace.images}
    start, end = (crop.window.start_time, crop.window.end_time) if crop.window else _asked(crop.call)
    return {
        "turn": crop.turn,
        "index": crop.index,
        "status": crop.status,
        "start": finite(start),
        "end": finite(end),
        "call": _call_text(crop.call) if call is None else call,
        "report": crop.report,
        "error": crop.error,
        "missing": list(crop.missing),
        "frames": thumbnails(crop.frame_times, {**(frames or {}), **own}, pictures, CROP_WIDTH),
        "pieces": [] if crop.trace is None else pieces(crop.trace, credit=credit),
        "seconds": finite(crop.seconds) or 0.0,
        "sampled_tokens": 0 if crop.trace is None else _sampled(crop.trace),
    }


def thumbnails(
    times: Iterable[float], frames: Mapping[float, Frame], pictures: Pictures, widest: int
) -> list[Thumbnail]:
    """One for each time (seconds); `frames` are the frames that are known, by their times."""
    return [thumbnail(time, frames.get(time), pictures, widest) for time in times]


def thumbnail(time: float, frame: Frame | None, pictures: Pictures, widest: int) -> Thumbnail:
    if frame is None:
        return {"time": finite(time) or 0.0, "picture": None, "why": "no request was made with this frame"}
    picture = pictures(frame, widest)
    if picture.uri is None:
        return {"time": finite(time) or 0.0, "picture": None, "why": picture.why}
    return {"time": finite(time) or 0.0, "picture": picture.uri}


def turn_failures(episode: Episode) -> list[FormatKind]:
    """The kind of each turn, "ok" if it is strict. Unlike `rewards.turn_kinds` it also reads what a file holds: turns
    and stop reasons that don't match."""
    stops = turn_stops(episode.main)
    kinds = [turn_kind(turn, stops[n] if n < len(stops) else "stop") for n, turn in enumerate(episode.turns)]
    if episode.forced and kinds:
        kinds[-1] = "forced"
    return kinds


def episode_row(
    episode: Episode,
    *,
    id: str,
    group: str,
    step: int | None = None,
    advantage: float | None = None,
    rewards: Mapping[str, float | None] | None = None,
) -> EpisodeRow:
    """An episode's line of the list. `rewards` take the place of the episode's own."""
    own = {name: score.value for name, score in episode.rewards.items()} if rewards is None else rewards
    return {
        "id": id,
        "chunk": "",
        "step": step,
        "group": group,
        "sample": episode.sample.id,
        "question": episode.sample.question,
        "frame_budget": episode.frame_budget,
        "dispatch": episode.dispatch,
        "calls": episode.tool_calls,
        "turns": len(episode.turns),
        "answer": episode.answer,
        "truth": episode.sample.answer,
        "rewards": {name: finite(value) for name, value in own.items()},
        "advantage": finite(advantage),
        "failures": [kind for kind in dict.fromkeys(turn_failures(episode)) if kind != "ok"],
        "end": episode.end,
        "errors": len(episode.errors),
        "seconds": finite(episode.timings.get("total")) or 0.0,
    }


# ---------------------------------------------------------------------------------------------------- traces


def pieces(trace: Trace, prefixes: Sequence[str] = (), credit: Credit | None = None) -> list[PieceView]:
    """The segments of a trace, in order. `prefixes` are what was forced before each sampled turn (default: nothing):
    it ends the context before it, and is shown apart, its tokens counted with the context."""
    out: list[PieceView] = []
    paid = _Payer(credit, sum(len(segment.ids) for segment in trace if segment.sampled))
    turn = 0
    for segment in trace:
        if segment.sampled:
            out.append(_sampled_piece(segment, paid))
            turn += 1
            continue
        prefix = prefixes[turn] if turn < len(prefixes) else ""
        text = segment.text
        if prefix and text.endswith(prefix):
            text = text.removesuffix(prefix)
        else:
            prefix = ""
        out.append(_context(text, "context", len(segment.images), len(segment.ids)))
        if prefix:
            out.append(_context(prefix, "forced", 0, 0))
    return out


def _context(text: str, kind: PieceKind, images: int, tokens: int) -> PieceView:
    return {
        "text": _PLACEHOLDER.sub("", text),
        "kind": kind,
        "images": images,
        "tokens": tokens,
        "spelled": None,
        "logprobs": None,
        "advantages": None,
    }


def _sampled_piece(segment: Segment, paid: _Payer) -> PieceView:
    spelled, advantages = paid.next(len(segment.ids))
    tokens = len(segment.ids) or (segment.usage.completion_tokens if segment.usage else 0)
    logprobs = segment.logprobs
    return {
        "text": segment.text,
        "kind": "sampled",
        "images": 0,
        "tokens": tokens,
        "spelled": spelled,
        "logprobs": None if logprobs is None else [round(_number(value), 4) for value in logprobs],
        "advantages": advantages,
    }


class _Payer:
    """Deals the credit of a trace out to its segments; credit of another number of tokens is no credit."""

    def __init__(self, credit: Credit | None, tokens: int) -> None:
        lengths = (
            set() if credit is None else {len(kept) for kept in (credit.advantages, credit.spelled) if kept is not None}
        )
        self._credit = credit if lengths == {tokens} else None
        self._at = 0

    def next(self, tokens: int) -> tuple[list[str] | None, list[float] | None]:
        if self._credit is None:
            return None, None
        part = slice(self._at, self._at + tokens)
        self._at += tokens
        advantages = self._credit.advantages
        paid = None if advantages is None else [round(_number(value), 4) for value in advantages[part]]
        return list(self._credit.spelled[part]), paid


def _turns(episode: Episode, credit: Credit | None) -> list[TurnView]:
    said = [segment for segment in episode.main if segment.sampled]
    prefixes = [forced_prefix(turn, segment.text) for turn, segment in zip(episode.turns, said, strict=False)]
    shown = pieces(episode.main, prefixes, credit)
    parts: list[list[PieceView]] = [[]]
    for piece in shown:
        parts[-1].append(piece)
        if piece["kind"] == "sampled":
            parts.append([])
    rest = parts.pop()
    if parts:
        parts[-1] += rest  # replies that no turn followed
    kinds = turn_failures(episode)
    return [
        {
            "index": n,
            "strict": turn.strict,
            "failure": None if kinds[n] == "ok" else FAILURES[kinds[n]],
            "text": turn.text,
            "pieces": parts[n] if n < len(parts) else [],
        }
        for n, turn in enumerate(episode.turns)
    ]


def _sampled(trace: Trace) -> int:
    return trace.sampled_tokens or sum(len(segment.ids) for segment in trace if segment.sampled)


# ---------------------------------------------------------------------------------------------------- calls


def call_texts(turn: Turn) -> list[str]:
    """Each call as it was written, where blocks and calls match; else as it was understood."""
    written = [body.strip() for body in _blocks(turn.text)]
    return written if len(written) == len(turn.calls) else [_call_text(call) for call in turn.calls]


def _blocks(text: str) -> Iterator[str]:
    """What is between `<tool_call>` and the next `</tool_call>`; a text with many that never end costs no more."""
    at = 0
    while (start := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        yield text[start + len(_OPEN) : end]
        at = end + len(_CLOSE)


def _call_text(call: ToolCall | BadToolCall) -> str:
    if isinstance(call, BadToolCall):
        return call.raw
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def _asked(call: ToolCall | BadToolCall) -> tuple[float | None, float | None]:
    """The window (seconds) that a call asked for, of which nothing was read."""
    if isinstance(call, BadToolCall):
        return None, None
    start, end = (call.arguments.get(name) for name in ("start_time", "end_time"))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (start, end))
    return (start, end) if numbers else (None, None)


# ---------------------------------------------------------------------------------------------------- numbers


def finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinities."""
    return None if value is None or not math.isfinite(value) else value


def _number(value: float) -> float:
    return value if math.isfinite(value) else math.copysign(1e9, value) if value == value else 0.0
