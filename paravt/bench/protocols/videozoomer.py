"""VideoZoomer: one `<video_zoom> {"segment": [start, end], "fps": n} </video_zoom>` in a turn, seconds and frames per
second; its frames come back; the answer is `<answer>\\boxed{..}</answer>`.

Every frame comes after a tag with its number and time; the numbers begin anew with each reply. A request for more
frames than `crop_max_frames` (16 there) is an error. Generation ends with `</video_zoom>`: see `StopAt`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from paravt.bench.protocols.common import (
    first_body,
    follow_up,
    kept_frames,
    opening,
    plain_answer,
    read_blocks,
    unboxed,
)
from paravt.episode_config import EpisodeConfig
from paravt.prompts import fill
from paravt.protocol import Opening, Protocol, Scene
from paravt.tools import CROP_VIDEO, ToolArgumentError
from paravt.types import BadToolCall, Crop, Frame, ImagePart, Message, Part, TextPart, ToolCall, Turn, Window
from paravt.video import window_times

STOP = "</video_zoom>"
_TAGS = ("think", "video_zoom", "answer")
_FORM = 'write one object {"segment": [start, end], "fps": n}'
_MAX_CHARS, _MAX_RAW = 4096, 1000


def _first(scene: Scene) -> Opening:
    return opening(scene, frames=_tagged(scene.overview))


def _reply(scene: Scene, crops: Sequence[Crop], frames: Sequence[Sequence[Frame]], share: float) -> Sequence[Message]:
    parts: list[Part] = []
    for crop, shown in zip(crops, frames, strict=True):
        parts.append(TextPart("<tool_response>\n"))
        if crop.ran:
            parts += kept_frames(crop, shown, share, _tagged)
        else:
            parts.append(TextPart(fill(scene.config.prompts.error, error=scene.clean(crop.error or crop.status))))
        parts.append(TextPart("\n</tool_response>\n"))
    return [Message("user", (*parts, TextPart(follow_up(scene, crops))))]


def _parse(text: str, config: EpisodeConfig) -> Turn:
    """The first of a zoom and an answer decides what the turn is. All zooms of a turn are calls; the first one runs."""
    blocks, tidy = read_blocks(text, _TAGS)
    acts = [block for block in blocks if block.tag == "video_zoom" or (block.tag == "answer" and block.body)]
    calls: tuple[ToolCall | BadToolCall, ...] = ()
    answer = None
    if acts and acts[0].tag == "answer":
        answer = unboxed(acts[0].body)
    elif acts:
        calls = tuple(_call(block.body, block.closed, config) for block in acts if block.tag == "video_zoom")
    elif all(block.tag == "think" for block in blocks):
        answer = unboxed(plain_answer(text))
    clean = all(isinstance(call, ToolCall) and not call.repaired for call in calls)
    strict = tidy and clean and [block.tag for block in blocks] in (["think", "video_zoom"], ["think", "answer"])
    return Turn(text, first_body(blocks, "think"), calls, answer, strict and bool(calls or answer))


def _call(body: str, closed: bool, config: EpisodeConfig) -> ToolCall | BadToolCall:
    raw = body[:_MAX_RAW]
    if len(body) > _MAX_CHARS:
        return BadToolCall(raw, f"the request has more than {_MAX_CHARS} characters")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return BadToolCall(raw, f"the request is not valid JSON: {_FORM}")
    segment = value.get("segment") if isinstance(value, dict) else None
    if not isinstance(segment, list) or len(segment) != 2:
        return BadToolCall(raw, f"the request has no segment of two times: {_FORM}")
    try:
        arguments, repaired = CROP_VIDEO.normalise({"start_time": segment[0], "end_time": segment[1]})
        fps = _rate(value.get("fps"))
    except ToolArgumentError as error:
        return BadToolCall(raw, str(error))
    count = fps * (arguments["end_time"] - arguments["start_time"])
    if count >= config.crop_max_frames + 1:  # whole frames count
        return BadToolCall(raw, f"the request is for more than {config.crop_max_frames} frames")
    return ToolCall(
        CROP_VIDEO.name, {**arguments, "fps": fps}, repaired or not closed or set(value) != {"segment", "fps"}
    )


def _rate(value: object) -> float:
    """Frames per second. Raises ToolArgumentError."""
    try:
        rate = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        rate = math.inf
    if not 0 < rate < math.inf:
        raise ToolArgumentError("fps must be a positive number")
    return rate


def _look(scene: Scene, call: ToolCall, window: Window, most: int, seen: Sequence[float]) -> tuple[float, ...]:
    return window_times(window.start_time, window.end_time, call.arguments["fps"], most)


def _tagged(frames: Sequence[Frame]) -> list[Part]:
    parts: list[Part] = []
    for number, frame in enumerate(frames):
        parts += [TextPart(f"<frame{number}_time{frame.time:.2f}s>"), ImagePart(frame)]
    return parts


VIDEOZOOMER = Protocol(first=_first, parse=_parse, look=_look, reply=_reply)
