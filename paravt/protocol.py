"""How an episode speaks with a model: what it is first shown, how its turns are read, what comes back of its calls.

`PARAVT` is the protocol of models trained here. The loop of the episode is the same for every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from paravt.answers import LETTERS
from paravt.chat import seconds, text_message, timestamp
from paravt.episode_config import EpisodeConfig
from paravt.prompts import fill
from paravt.subtitles import subtitle_text
from paravt.tools import CROP_VIDEO
from paravt.turns import parse_turn
from paravt.types import Crop, Frame, ImagePart, Message, Part, Sample, TextPart, ToolCall, Turn, Window
from paravt.video import window_times


@dataclass(frozen=True)
class Scene:
    """What a protocol can speak of. The duration (seconds) and the overview are empty until they were read."""

    sample: Sample
    config: EpisodeConfig
    clean: Callable[[str], str]
    """Takes control tokens out of untrusted text, whoever wrote it."""
    duration: float = 0.0
    overview: tuple[Frame, ...] = ()


Opening: TypeAlias = tuple[Sequence[Message], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Protocol:
    """Four pure functions. None of them raises: a turn that cannot be read is a turn with bad calls, or with none."""

    first: Callable[[Scene], Opening]
    """The messages before the first turn, and the schemas of the tools that the chat template describes."""
    parse: Callable[[str, EpisodeConfig], Turn]
    """One assistant turn. Windows are asked for by calls of crop_video, in whatever form the model wrote them."""
    look: Callable[[Scene, ToolCall, Window, int, Sequence[float]], tuple[float, ...]]
    """(scene, call, window, most, seen) -> the times (seconds) of one to `most` frames of the window; `seen` are the
    times of all frames before, the overview's included."""
    reply: Callable[[Scene, Sequence[Crop], Sequence[Sequence[Frame]], float], Sequence[Message]]
    """(scene, crops, frames, share) -> what comes back of a turn's calls, at least one message. `frames` are those of
    each crop; if all of it does not fit the context, a smaller `share` (1 to 0) of texts and frames is asked for."""


def timestamped(frames: Sequence[Frame]) -> Iterator[Part]:
    """Frames as a prompt shows them: each after its time."""
    for frame in frames:
        yield TextPart(timestamp(frame.time))
        yield ImagePart(frame)


def spoken(scene: Scene) -> list[str]:
    """The subtitles at the overview's frames, as the text that stands before the question; [] if there are none.
    Raises VideoError if the sample's file of subtitles cannot be read."""
    text = subtitle_text(scene.sample, [frame.time for frame in scene.overview])
    return [scene.clean(text)] if text else []


def lettered(scene: Scene) -> list[str]:
    """The options, each with its letter."""
    return [f"{letter}. {scene.clean(text)}" for letter, text in zip(LETTERS, scene.sample.options, strict=False)]


def _first(scene: Scene) -> Opening:
    prompts, sample, dispatch = scene.config.prompts, scene.sample, scene.config.dispatch
    system = {"parallel": prompts.system, "sequential": prompts.system_sequential, "none": prompts.system_direct}
    lines = [*spoken(scene), fill(prompts.question, question=scene.clean(sample.question)), *lettered(scene)]
    if sample.options:
        lines.append(prompts.choice)
    elif sample.type == "temporal":
        lines.append(prompts.temporal)
    content = (*timestamped(scene.overview), TextPart("\n".join(lines)))
    tools = () if dispatch == "none" else (CROP_VIDEO.schema,)
    return [text_message("system", system[dispatch]), Message("user", content)], tools


def _parse(text: str, config: EpisodeConfig) -> Turn:
    # a tool that was not offered is unknown: calls of it are bad, and run nothing
    return parse_turn(text, {}) if config.dispatch == "none" else parse_turn(text)


def _look(scene: Scene, call: ToolCall, window: Window, most: int, seen: Sequence[float]) -> tuple[float, ...]:
    return window_times(window.start_time, window.end_time, scene.config.crop_fps, most)


def _reply(scene: Scene, crops: Sequence[Crop], frames: Sequence[Sequence[Frame]], share: float) -> Sequence[Message]:
    return [_one_reply(scene, crop, shown, share) for crop, shown in zip(crops, frames, strict=True)]


def _one_reply(scene: Scene, crop: Crop, frames: Sequence[Frame], share: float) -> Message:
    """What the main agent reads about one call: its window, its status, its report or frames."""
    window = crop.window
    label = f"[{seconds(window.start_time)} - {seconds(window.end_time)} seconds] " if window else ""
    if not crop.ran:
        return text_message("tool", scene.clean(f"{label}error: {crop.error or crop.status}"))
    report = crop.report or ""
    text = label + (report if share == 1.0 else report[: int(len(report) * share)] + " [cut]")
    if crop.missing:
        text += f" ({len(crop.missing)} frames could not be read)"
    parts: list[Part] = [TextPart(text)]
    if scene.config.evidence != "report":
        parts += [TextPart("\n"), *timestamped(frames[: int(len(frames) * share)])]
    return Message("tool", tuple(parts))


PARAVT = Protocol(first=_first, parse=_parse, look=_look, reply=_reply)
"""A `<think>`, then calls side by side or an `<answer>`; a report for each call."""
