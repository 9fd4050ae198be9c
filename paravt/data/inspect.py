"""What is wrong with one row, and what it would be shown to a model as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paravt.answers import extract_window
from paravt.chat import TokenChat
from paravt.data.layouts import Layout, as_sample, layout_of, listed_options, options_of
from paravt.data.media import local_path, read_image
from paravt.data.messages import Dialogue, ImageRef, RowTurn, VideoRef, parse_row
from paravt.data.probing import VideoProbe
from paravt.data.skips import RowError
from paravt.data.traces import Loaded, RowConfig, TraceBuilder
from paravt.episode_config import EpisodeConfig
from paravt.errors import VideoError
from paravt.protocol import PARAVT, Scene
from paravt.rewards import gold_letter
from paravt.tools import CROP_VIDEO, crop_window
from paravt.turns import parse_turn
from paravt.types import BadToolCall, Frame, Sample
from paravt.video import VideoInfo, distinct, frame_size, overview_times

SLACK = 1.0
"""Seconds by which a window may pass the end of its video: times are rounded, and durations are of containers."""


@dataclass
class Inspected:
    """A row that was looked at."""

    layout: Layout | None = None
    id: str | None = None
    skip: tuple[str, str] | None = None
    """Why training skips it: the reason, and what is wrong."""
    faults: list[tuple[str, str]] = field(default_factory=list)
    """What else is wrong: kind and message."""
    turns: int = 0
    """Of assistants."""
    images: int = 0
    videos: int = 0
    loaded: Loaded | None = None
    """To be rendered; None if the row cannot be used, or if there is no model to render it for."""

    def fault(self, kind: str, message: str) -> None:
        self.faults.append((kind, message))


class Inspector:
    """`look` may run on many threads at once."""

    def __init__(
        self, probe: VideoProbe, config: RowConfig, frames: int = 64, chat: TokenChat | None = None, decode: bool = True
    ) -> None:
        """`frames` is K of questions; `chat` renders for a model, if tokens are to be counted."""
        self.probe, self.config, self.frames, self.decode = probe, config, frames, decode
        self.builder = None if chat is None else TraceBuilder(chat, probe, config)

    def look(self, row: Mapping[str, Any] | RowError, path: Path, number: int) -> Inspected:
        done = Inspected()
        try:
            if isinstance(row, RowError):
                raise row
            done.id = _id(row)
            done.layout = layout_of(row)
            if done.layout == "conversation":
                self._conversation(row, done)
            else:
                self._question(row, path, number, done)
        except RowError as error:
            done.skip = (error.reason, str(error))
        return done

    def _conversation(self, row: Mapping[str, Any], done: Inspected) -> None:
        dialogue = parse_row(row)
        parts = [part for turn in dialogue.turns for part in turn.content]
        done.turns = sum(turn.role == "assistant" for turn in dialogue.turns)
        done.images = sum(isinstance(part, ImageRef) for part in parts)
        videos = [part for part in parts if isinstance(part, VideoRef)]
        done.videos = len(videos)
        infos = [self._video(local_path(video.url, self.config.root)) for video in videos]
        for video, info in zip(videos, infos, strict=True):
            if (start := video.start or 0.0) >= info.duration:
                raise RowError("media_damaged", f"{video.url[:200]}: ends before second {start:g}")
            if problem := past_the_end(video.start or 0.0, video.end or 0.0, info.duration):
                done.fault("window", problem)
        for problem in said_windows(dialogue.turns, infos[0].duration if len(infos) == 1 else None):
            done.fault("window", problem)
        if problem := wrong_option(dialogue):
            done.fault("answer", problem)
        if self.builder is not None:
            done.loaded = self.builder.load(row)
        else:
            self._images(parts)

    def _images(self, parts: Sequence[object]) -> None:
        for part in parts:
            if isinstance(part, ImageRef) and self.decode:
                read_image(part, self.config.root, 32, self.config.max_pixels)
            elif isinstance(part, ImageRef) and not part.url.startswith("data:"):
                local_path(part.url, self.config.root)

    def _question(self, row: Mapping[str, Any], path: Path, number: int, done: Inspected) -> None:
        sample = as_sample(row, path, number, self.config.root)
        done.videos = 1
        info = self._video(local_path(sample.video))
        done.faults += wrong_answer(sample, info.duration)
        if self.builder is not None:
            done.loaded = opening(sample, info, self.builder.chat, self.config, self.frames, self.probe)

    def _video(self, path: Path) -> VideoInfo:
        seen = self.probe.look(path)
        if seen.info is None or seen.fault is not None:
            raise RowError("media_damaged", str(seen.fault))
        return seen.info


def opening(
    sample: Sample, info: VideoInfo, chat: TokenChat, config: RowConfig, frames: int, probe: VideoProbe
) -> Loaded:
    """What an episode about a question begins with, in black frames. Raises RowError."""
    limit = min(config.max_pixels, chat.max_pixels)
    size = frame_size(info.width, info.height, factor=chat.frame_factor, max_pixels=limit)
    shown: tuple[Frame, ...] = distinct(probe.read(Path(sample.video), overview_times(info.duration, frames), size))
    asked = EpisodeConfig(frame_budget=frames, max_frames=max(1024, 2 * frames))
    try:
        messages, tools = PARAVT.first(Scene(sample, asked, chat.clean, info.duration, shown))
    except VideoError as error:  # its subtitles
        raise RowError("media_damaged", str(error)) from error
    return Loaded(tuple(messages), tuple(tools))


def _id(row: Mapping[str, Any]) -> str | None:
    found = row.get("id")
    return str(found) if isinstance(found, (str, int)) and not isinstance(found, bool) else None


def past_the_end(start: float, end: float, duration: float) -> str | None:
    """What is wrong with a window (seconds) of a video; None if nothing is."""
    if start >= duration or end > duration + SLACK:
        return f"the window {start:g} - {end:g} is past the end of the video ({duration:g} seconds)"
    return None


def said_windows(turns: Sequence[RowTurn], duration: float | None) -> Iterator[str]:
    """What is wrong with windows of calls: they are none, or past the end of the row's one video."""
    for turn in turns:
        for call in parse_turn(turn.text).calls if turn.role == "assistant" else ():
            if isinstance(call, BadToolCall):
                if CROP_VIDEO.name in call.raw:  # a row may have tools of its own
                    yield f"a call: {call.error}"
            elif duration is not None:
                window = crop_window(call.arguments)
                if problem := past_the_end(window.start_time, window.end_time, duration):
                    yield f"a call: {problem}"


def wrong_option(dialogue: Dialogue) -> str | None:
    """If the question lists options: is the last turn's answer one of them?"""
    asked = "\n".join(turn.text for turn in dialogue.turns[: dialogue.first_answer] if turn.role == "user")
    options = listed_options(asked)
    last = next(turn for turn in reversed(dialogue.turns) if turn.role == "assistant")
    answer = parse_turn(last.text).answer
    if options and answer is not None and gold_letter(answer, options) is None:
        return f"the answer {answer[:60]!r} is not exactly one of the {len(options)} options"
    return None


def wrong_answer(sample: Sample, duration: float) -> list[tuple[str, str]]:
    """What is wrong with the reference answer of a question about a video of that many seconds: kind and message."""
    gold = (sample.answer or "").strip()
    if not gold:
        return [("answer", "there is no reference answer")]
    if sample.type == "choice":
        options = options_of(sample)
        if gold_letter(gold, options) is None:
            return [("answer", f"the answer {gold[:60]!r} is not exactly one of the {len(options)} options")]
    if sample.type == "temporal":
        window = extract_window(gold)
        if window is None:
            return [("answer", f"the answer {gold[:60]!r} is no window of time")]
        if problem := past_the_end(*window, duration):
            return [("window", problem)]
    return []
