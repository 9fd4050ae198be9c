"""Conan: every turn is `<score>..</score><think>..</think><clip>..</clip><answer>..</answer>`, where either the clip
(HH:MM:SS-HH:MM:SS) or the answer is empty.

Every frame comes after its time as HH:MM:SS. A retrieval gives `crop_max_frames` (8 there) frames of seconds that were
not shown before, shared among its clips by their lengths; fewer if the clips have no more such seconds. An answer goes
before a clip: it is where the model's own loop would end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paravt.bench.protocols.common import first_body, follow_up, kept_frames, opening, plain_answer, read_blocks
from paravt.episode_config import EpisodeConfig
from paravt.protocol import Opening, Protocol, Scene
from paravt.tools import CROP_VIDEO, ToolArgumentError
from paravt.types import BadToolCall, Crop, Frame, ImagePart, Message, Part, TextPart, ToolCall, Turn, Window
from paravt.video import window_times

_TAGS = ("score", "think", "clip", "answer")
_MAX_CHARS = 1000
_DAY = 86_400.0


def _first(scene: Scene) -> Opening:
    return opening(scene, options="Options:", frames=_labelled(scene.overview))


def _reply(scene: Scene, crops: Sequence[Crop], frames: Sequence[Sequence[Frame]], share: float) -> Sequence[Message]:
    parts: list[Part] = []
    for crop, shown in zip(crops, frames, strict=True):
        if crop.ran:
            parts += kept_frames(crop, shown, share, _labelled)
        else:
            parts.append(TextPart(scene.clean(f"\nNo frames: {crop.error or crop.status}")))
    return [Message("user", (*parts, TextPart(follow_up(scene, crops))))]


def _parse(text: str, config: EpisodeConfig) -> Turn:
    blocks, tidy = read_blocks(text, _TAGS)
    answer, clip = first_body(blocks, "answer"), first_body(blocks, "clip")
    calls: tuple[ToolCall | BadToolCall, ...] = ()
    if answer is None and clip is not None:
        calls = _calls(clip, config.crop_max_frames)
    elif answer is None and all(block.tag == "think" for block in blocks):
        answer = plain_answer(text)
    ran = all(isinstance(call, ToolCall) for call in calls)
    strict = tidy and ran and [block.tag for block in blocks] == list(_TAGS) and (clip is None) != (answer is None)
    return Turn(text, first_body(blocks, "think"), calls, answer, strict)


def _calls(clip: str, frames: int) -> tuple[ToolCall | BadToolCall, ...]:
    """The windows of a `<clip>`, with commas between them; `frames` are shared among those that can be read."""
    if len(clip) > _MAX_CHARS:
        return (BadToolCall(clip[:_MAX_CHARS], f"the clip has more than {_MAX_CHARS} characters"),)
    calls = [_call(part.strip()) for part in clip.split(",") if part.strip()]
    good = [(n, call) for n, call in enumerate(calls) if isinstance(call, ToolCall)]
    for n, _ in good[frames:]:
        calls[n] = BadToolCall(clip, f"more than {frames} clips at once")
    shares = _quotas([_length(call) for _, call in good[:frames]], frames)
    for (n, call), share in zip(good, shares, strict=False):
        calls[n] = replace(call, arguments={**call.arguments, "frames": share})
    return tuple(calls) or (BadToolCall(clip, "the clip is empty: write HH:MM:SS-HH:MM:SS"),)


def _call(part: str) -> ToolCall | BadToolCall:
    start, dash, end = part.replace("–", "-").partition("-")
    if not dash:
        return BadToolCall(part, "a clip has a start and an end: write HH:MM:SS-HH:MM:SS")
    try:
        arguments, _ = CROP_VIDEO.normalise({"start_time": start.strip(), "end_time": end.strip()})
    except ToolArgumentError as error:
        return BadToolCall(part, str(error))
    return ToolCall(CROP_VIDEO.name, arguments)


def _length(call: ToolCall) -> float:
    return min(float(call.arguments["end_time"] - call.arguments["start_time"]), _DAY)


def _quotas(lengths: Sequence[float], frames: int) -> list[int]:
    """One frame for each clip, and the others by length: the largest remainders are rounded up."""
    if not lengths:
        return []
    spare, whole = frames - len(lengths), sum(lengths)
    exact = [spare * length / whole for length in lengths]
    out = [1 + math.floor(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda n: (math.floor(exact[n]) - exact[n], n))
    for n in order[: frames - sum(out)]:
        out[n] += 1
    return out


def _look(scene: Scene, call: ToolCall, window: Window, most: int, seen: Sequence[float]) -> tuple[float, ...]:
    """The middles of seconds that were not shown yet, evenly; where all were, evenly over the window."""
    count = min(int(call.arguments["frames"]), most)
    known = {math.floor(time) for time in seen}
    start, end = window.start_time, window.end_time
    new = [second for second in range(math.floor(start), math.ceil(end)) if second not in known]
    if not new:
        return window_times(start, end, 1.0, count)
    picked = new if len(new) <= count else [new[int((n + 0.5) * len(new) / count)] for n in range(count)]
    return tuple((max(second, start) + min(second + 1, end)) / 2 for second in picked)


def _labelled(frames: Sequence[Frame]) -> list[Part]:
    parts: list[Part] = []
    for frame in frames:
        minutes, second = divmod(int(frame.time), 60)
        parts += [TextPart(f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"), ImagePart(frame)]
    return parts


CONAN = Protocol(first=_first, parse=_parse, look=_look, reply=_reply)
