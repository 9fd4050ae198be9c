"""Rows of published SFT data as conversations: who says what, and which files it shows. Nothing is opened here.

A row has `messages`, a list of turns or the same as a JSON text; a turn has a `role` and a `content`, a text or a list
of parts (`text`, `image_url`, `video_url`; `image` and `video` as Qwen's own tools write them). Files of one corpus
differ in which keys are there and which are null: what is null is not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from paravt.data.json_text import parse
from paravt.data.skips import RowError
from paravt.turns import render_call
from paravt.types import Role, TextPart


@dataclass(frozen=True)
class ImageRef:
    url: str


@dataclass(frozen=True)
class VideoRef:
    """A video, or a stretch of it (seconds), and at how many frames it is seen, where the row says so."""

    url: str
    start: float | None = None
    end: float | None = None
    fps: float | None = None
    frames: int | None = None
    """Exactly so many."""
    max_frames: int | None = None


RefPart: TypeAlias = "TextPart | ImageRef | VideoRef"


@dataclass(frozen=True)
class RowTurn:
    role: Role
    content: tuple[RefPart, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


@dataclass(frozen=True)
class Dialogue:
    turns: tuple[RowTurn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the row's own (`tools`); most rows spell them in their system turn."""

    @property
    def first_answer(self) -> int:
        """The index of the first assistant turn."""
        return next(i for i, turn in enumerate(self.turns) if turn.role == "assistant")


def parse_row(row: Mapping[str, Any]) -> Dialogue:
    """Raises RowError unless the row is a conversation with an assistant turn to learn from."""
    turns = tuple(_turn(turn, number) for number, turn in enumerate(_list(row.get("messages"), "messages")))
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise RowError("no_answer", "no assistant turn")
    if not all(any(isinstance(part, TextPart) and part.text.strip() for part in turn.content) for turn in answers):
        raise RowError("no_answer", "an assistant turn is empty")
    if any(not isinstance(part, TextPart) for turn in answers for part in turn.content):
        raise RowError("messages", "an assistant turn shows an image or a video")
    dialogue = Dialogue(turns, _tools(row["tools"]) if row.get("tools") else ())
    if all(turn.role == "system" for turn in turns[: dialogue.first_answer]):
        raise RowError("no_question", "nothing is asked before the first assistant turn")
    return dialogue


def read_json(value: object, name: str) -> object:
    """A text is decoded; everything else is what it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise RowError("messages", f"`{name}` is a text that is not JSON: {error}") from error


def _list(value: object, name: str) -> list[Any]:
    found = read_json(value, name)
    if not isinstance(found, list) or not found:
        raise RowError("messages", f"`{name}` must be a list that is not empty")
    return found


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    tools = _list(value, "tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError("messages", "`tools` must be a list of schemas")
    try:
        text = _text(json.dumps(tools, ensure_ascii=False))
    except (ValueError, TypeError) as error:  # what a parquet file can hold, and no JSON
        raise RowError("messages", f"`tools`: {error}") from error
    return tuple(json.loads(text))


def _turn(turn: object, number: int) -> RowTurn:
    if not isinstance(turn, dict) or turn.get("role") not in get_args(Role):
        raise RowError("messages", f"turn {number}: no object with a role ({', '.join(get_args(Role))})")
    content = turn.get("content")
    parts: tuple[RefPart, ...]
    if isinstance(content, str):
        parts = (TextPart(_text(content)),)
    elif isinstance(content, list):
        parts = tuple(_part(part, number) for part in content)
    elif content is None and turn.get("tool_calls"):
        parts = ()
    else:
        raise RowError("messages", f"turn {number}: `content` must be a text or a list of parts")
    if turn.get("tool_calls"):
        parts = (*parts, *_calls(turn["tool_calls"], number, "\n" if parts else ""))
    return RowTurn(turn["role"], parts)


def _part(part: object, number: int) -> RefPart:
    if isinstance(part, str):
        return TextPart(_text(part))
    if not isinstance(part, dict):
        raise RowError("messages", f"turn {number}: a part must be an object")
    given = part.get("type")
    there = [key for key in ("text", "image_url", "image", "video_url", "video") if part.get(key) is not None]
    # A row without types is read by what is there; one with a type must hold what it says.
    kind = given if isinstance(given, str) else (there[0] if len(there) == 1 else None)
    family = {"text": ("text",), "image_url": ("image_url", "image"), "image": ("image_url", "image"),
              "video_url": ("video_url", "video"), "video": ("video_url", "video")}.get(str(kind), ())  # fmt: skip
    value = next((part[key] for key in family if part.get(key) is not None), None)
    if family == ("text",) and isinstance(value, str):
        return TextPart(_text(value))
    more = value if isinstance(value, dict) else {}
    url = more.get("url", more.get("path")) if isinstance(value, dict) else value
    if not family or family == ("text",) or not isinstance(url, str) or not url:
        raise RowError("messages", f"turn {number}: a part of type {kind!r} without its content")
    if family[0] == "image_url":
        return ImageRef(url)

    def number_of(*names: str) -> float | None:
        found = next((m[name] for name in names for m in (part, more) if m.get(name) is not None), None)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < math.inf:
            raise RowError("messages", f"turn {number}: `{names[0]}` of a video must be a number that is not negative")
        return float(min(found, 1e9))

    fps, frames, most = number_of("fps"), number_of("nframes"), number_of("max_frames")
    start, end = number_of("video_start"), number_of("video_end")
    if fps == 0 or any(n is not None and n < 1 for n in (frames, most)) or (end is not None and end <= (start or 0.0)):
        raise RowError("messages", f"turn {number}: a video without frames or without length")
    return VideoRef(url, start, end, fps, None if frames is None else int(frames), None if most is None else int(most))


def _calls(calls: object, number: int, separator: str) -> list[TextPart]:
    """Calls in a field of their own (OpenAI style), as the text that the model would write."""
    texts: list[str] = []
    for call in _list(calls, "tool_calls"):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = read_json(function.get("arguments"), "arguments") if isinstance(function, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(arguments, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise RowError("messages", f"turn {number}: a tool call needs a function with name and arguments")
        try:
            texts.append(render_call(function["name"], {k: v for k, v in arguments.items() if v is not None}))
        except (ValueError, TypeError) as error:
            raise RowError("messages", f"turn {number}: a tool call whose arguments are no JSON: {error}") from error
    return [TextPart(_text(separator + "\n".join(texts)))]


def _text(text: str) -> str:
    """Without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
