"""The episode: overview frames, parallel crops by sub-agents, an answer.

What fails inside an episode (the video, the engine, a sub-agent) is recorded in `Episode.errors` and never raised. A
failed sub-agent is an error reply in its call's place; a failed overview, engine or transport ends the episode. Each of
them leaves the episode unscored.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from paravt.chat import seconds, text_message, timestamp
from paravt.conversation import Conversation
from paravt.engines.base import Engine, stable_seed
from paravt.errors import EngineError, ParaVTError, VideoError
from paravt.prompts import Prompts, fill
from paravt.tools import CROP_VIDEO, crop_window
from paravt.turns import parse_turn
from paravt.types import (
    BadToolCall,
    CallStatus,
    Crop,
    Dispatch,
    EndReason,
    Episode,
    EpisodeError,
    Evidence,
    Frame,
    ImagePart,
    Message,
    Part,
    Sample,
    TextPart,
    ToolCall,
    Turn,
    Window,
)
from paravt.video import FrameReader, Frames, FrameSource, distinct, frame_size, overview_times, window_times

THINK_PREFIX = "<think>\n"
ANSWER_PREFIX = "<answer>"
# Tokens that a reply block must leave in the context for the turn that answers it, and that all turns must leave for
# a forced final one.
_TURN_ROOM = 64
_FINAL_ROOM = 160


@dataclass(frozen=True)
class EpisodeConfig:
    """Budgets and choices of an episode. Times are in seconds."""

    frame_budget: int = 64
    """K, the number of overview frames."""
    dispatch: Dispatch = "parallel"
    evidence: Evidence = "report"
    max_turns: int = 8
    """Assistant turns of the main agent, a forced final one not counted."""
    max_parallel: int = 8
    """Sub-agents of a turn that run at the same time; further ones wait."""
    max_tokens: int = 1024
    """Per assistant turn."""
    max_report_tokens: int = 256
    max_context_tokens: int = 32_768
    max_frames: int = 1024
    """Overview and crops together."""
    crop_fps: float = 1.0
    crop_max_frames: int = 16
    max_pixels: int = 50_176
    """Per frame; the processor's own limit applies too."""
    call_timeout: float | None = 300.0
    """For the frames and for the report of a call, each; None (reproducible runs) waits for ever."""
    temperature: float = 0.0
    think_prefix: bool = False
    """Put `<think>` into the header of every assistant turn of the main agent (not trained on)."""
    force_answer: bool = True
    """Ask for an answer in a last turn if there is none yet."""
    seed: int = 0
    prompts: Prompts = field(default_factory=Prompts)

    def __post_init__(self) -> None:
        positive = ("frame_budget", "max_turns", "max_parallel", "max_tokens", "max_report_tokens", "crop_fps",
                    "crop_max_frames", "max_pixels", "max_context_tokens", "max_frames")  # fmt: skip
        for name in positive:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.frame_budget > self.max_frames:
            raise ValueError(f"frame_budget {self.frame_budget} is more than max_frames {self.max_frames}")
        if self.call_timeout is not None and not self.call_timeout > 0:
            raise ValueError(f"call_timeout must be positive or None, got {self.call_timeout}")


@dataclass(frozen=True)
class OverviewRead:
    duration: float
    times: tuple[float, ...]


@dataclass(frozen=True)
class TurnTaken:
    index: int
    turn: Turn


@dataclass(frozen=True)
class CropStarted:
    turn: int
    index: int
    window: Window


@dataclass(frozen=True)
class CropDone:
    crop: Crop


Event: TypeAlias = "OverviewRead | TurnTaken | CropStarted | CropDone"


async def run_episode(
    sample: Sample,
    engine: Engine,
    config: EpisodeConfig | None = None,
    *,
    reader: FrameSource | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Episode:
    """Let the agent answer one question. `on_event` is called in the event loop as things happen.

    Share one `reader` between episodes: it caches frames. Raises ValueError if the engine cannot do what the config
    asks for.
    """
    episode = _Run(sample, engine, config or EpisodeConfig(), reader or FrameReader(), on_event)
    started = time.monotonic()
    try:
        await episode.run()
    except (VideoError, EngineError) as error:
        episode.note(error, "episode")
    episode.timings["total"] = time.monotonic() - started
    return episode.result()


@dataclass(frozen=True)
class _Plan:
    """A call before it runs: what to read, or why there is nothing to read."""

    call: ToolCall | BadToolCall
    window: Window | None = None
    times: tuple[float, ...] = ()
    status: CallStatus = "ran"
    error: str | None = None


class _Run:
    """The state of one episode while it runs."""

    def __init__(
        self, sample: Sample, engine: Engine, config: EpisodeConfig, reader: FrameSource, emit: Callable[[Event], None]
    ) -> None:
        self.sample, self.engine, self.config, self.reader, self.emit = sample, engine, config, reader, emit
        self.chat = engine.chat
        self.seed = stable_seed(config.seed, sample.id)
        self.main = Conversation(engine, "main", "main", config.temperature, self.seed)
        if config.think_prefix and not self.chat.takes_prefix:
            raise ValueError("think_prefix: this engine cannot continue a forced prefix")
        self.prefix = THINK_PREFIX if config.think_prefix else ""
        self.limit = min(config.max_context_tokens, self.chat.context_limit or config.max_context_tokens)
        self.end: EndReason = "failed"
        self.turns: list[Turn] = []
        self.crops: list[Crop] = []
        self.errors: list[EpisodeError] = []
        self.timings = {"overview": 0.0, "main": 0.0, "crops": 0.0}
        self.answer: str | None = None
        self.forced = False
        self.duration = 0.0
        self.overview: tuple[Frame, ...] = ()
        self.size: tuple[int, int] | None = None
        self.frames_used = 0
        self.slots = asyncio.Semaphore(config.max_parallel)

    # ------------------------------------------------------------------ the episode, top to bottom

    async def run(self) -> None:
        with self.clock("overview"):
            await self.read_overview()
        self.main.open(self.first_messages(), self.tools(), self.prefix)
        if (size := self.main.tokens()) >= self.limit - _FINAL_ROOM:
            raise EngineError(f"the overview takes {size} of {self.limit} tokens; ask for fewer frames")
        pending: list[Message] = []  # what the next turn has to answer
        for index in range(self.config.max_turns):
            if pending:
                self.main.reply(pending, self.prefix)
            turn = await self.take_turn(index, _FINAL_ROOM if self.config.force_answer else 0)
            pending = []
            if turn is None:
                self.end = "budget"
                break
            if turn.answer is not None:
                self.end = "answered"
                return
            if not turn.calls or self.config.dispatch == "none":
                self.end = "no_call"
                break
            self.end = "max_turns"
            if index + 1 == self.config.max_turns and not self.config.force_answer:
                break  # nobody would read the replies
            with self.clock("crops"):
                pending = self.fit(*await self.run_calls(index, turn))
            if not pending:
                self.end = "budget"
                break
        if self.config.force_answer:
            await self.force_answer(pending)

    async def read_overview(self) -> None:
        info = await self.reader.ainfo(self.sample.video)
        limit = min(self.config.max_pixels, self.chat.max_pixels)
        self.size = frame_size(info.width, info.height, factor=self.chat.frame_factor, max_pixels=limit)
        self.duration = info.duration
        times = overview_times(info.duration, self.config.frame_budget)
        read = await self.reader.aread(self.sample.video, times, self.size)
        self.overview = distinct(read)
        for reason in (*info.warnings, *read.reasons):
            self.errors.append(EpisodeError(VideoError.kind, "overview", reason, scored=True))
        if not self.overview:
            raise VideoError(self.sample.video, "none of the overview frames could be decoded")
        self.frames_used = len(self.overview)
        self.emit(OverviewRead(self.duration, tuple(frame.time for frame in self.overview)))

    def first_messages(self) -> list[Message]:
        prompts, sample = self.config.prompts, self.sample
        system = {"parallel": prompts.system, "sequential": prompts.system_sequential, "none": prompts.system_direct}
        lines = [fill(prompts.question, question=self.chat.clean(sample.question))]
        lines += [f"{letter}. {self.chat.clean(text)}" for letter, text in zip(_LETTERS, sample.options, strict=False)]
        if sample.options:
            lines.append(prompts.choice)
        elif sample.type == "temporal":
            lines.append(prompts.temporal)
        content = (*_timestamped(self.overview), TextPart("\n".join(lines)))
        return [text_message("system", system[self.config.dispatch]), Message("user", content)]

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return () if self.config.dispatch == "none" else (CROP_VIDEO.schema,)

    async def take_turn(self, index: int, reserve: int) -> Turn | None:
        """The next assistant turn, or None if there is no room left for one and the reserve."""
        room = min(self.config.max_tokens, self.limit - self.main.tokens() - reserve)
        if room < 1:
            return None
        with self.clock("main"):
            text = await self.main.turn(room)
        # a tool that was not offered is unknown: calls of it are bad, and run nothing
        turn = parse_turn(text, {}) if self.config.dispatch == "none" else parse_turn(text)
        self.turns.append(turn)
        self.answer = turn.answer
        self.emit(TurnTaken(index, turn))
        return turn

    async def force_answer(self, pending: Sequence[Message]) -> None:
        """One more turn that can only answer. It is recorded as forced, and never strict."""
        prefix = ANSWER_PREFIX if self.chat.takes_prefix else ""
        self.main.reply([*pending, text_message("user", self.config.prompts.final)], prefix)
        turn = await self.take_turn(len(self.turns), 0)
        if turn is not None:
            self.forced = True
            self.turns[-1] = replace(turn, strict=False)
            if turn.answer is None and not turn.calls:
                said = turn.text.removeprefix(prefix)
                self.answer = said.rpartition("</think>")[2].strip() or None

    # ------------------------------------------------------------------ the calls of a turn

    async def run_calls(self, turn_index: int, turn: Turn) -> tuple[list[Crop], list[tuple[Frame, ...]]]:
        plans = [self.plan(call, position) for position, call in enumerate(turn.calls)]
        reads = await self.read_windows(plans)
        tasks = [
            asyncio.ensure_future(self.run_call(turn_index, position, plan, read))
            for position, (plan, read) in enumerate(zip(plans, reads, strict=True))
        ]
        try:
            crops = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if the episode is cancelled, its sub-agents are too
                task.cancel()
        self.crops.extend(crops)
        return crops, [read.present if isinstance(read, Frames) else () for read in reads]

    def plan(self, call: ToolCall | BadToolCall, position: int) -> _Plan:
        if isinstance(call, BadToolCall):
            return _Plan(call, status="bad", error=call.error)
        if self.config.dispatch == "sequential" and position > 0:
            return _Plan(call, status="skipped", error="not run: one call in each turn")
        name = call.arguments.get("video_path")
        if name and not _names(str(name), self.sample.video):
            known = os.path.basename(self.sample.video)
            return _Plan(call, status="bad", error=f"there is no such video here; the video is {known}")
        asked = crop_window(call.arguments)
        if asked.start_time >= self.duration:
            error = f"start_time is past the end of the video ({seconds(self.duration)} seconds)"
            return _Plan(call, status="bad", error=error)
        window = Window(asked.start_time, min(asked.end_time, self.duration))
        room = self.config.max_frames - self.frames_used
        if room < 1:
            return _Plan(call, window, status="skipped", error="not run: no frames are left in the budget")
        most = min(self.config.crop_max_frames, room)
        times = window_times(window.start_time, window.end_time, self.config.crop_fps, most)
        self.frames_used += len(times)
        return _Plan(call, window, times, status="repaired" if call.repaired else "ran")

    async def read_windows(self, plans: Sequence[_Plan]) -> list[Frames | ParaVTError | None]:
        """The frames of all windows, read as one union; for each plan its frames, or why there are none."""
        wanted = [plan.times for plan in plans if plan.times]
        if not wanted:
            return [None] * len(plans)
        try:
            found = iter(
                await asyncio.wait_for(
                    self.reader.aread_many(self.sample.video, wanted, self.size), self.config.call_timeout
                )
            )
        except VideoError as error:
            return [error if plan.times else None for plan in plans]
        except asyncio.TimeoutError:
            late = _TimedOut(f"reading the frames took longer than {self.config.call_timeout:g} seconds")
            return [late if plan.times else None for plan in plans]
        return [next(found) if plan.times else None for plan in plans]

    async def run_call(self, turn: int, index: int, plan: _Plan, read: Frames | ParaVTError | None) -> Crop:
        """One sub-agent, from its window to its report. Failures become the crop's status, never an exception."""
        crop = Crop(turn, index, plan.status, plan.call, plan.window, None, None, error=plan.error)
        if plan.window is None or not plan.times:
            return self.done(crop)
        started = time.monotonic()
        conversation = Conversation(self.engine, f"crop/{turn}/{index}", "crop", self.config.temperature, self.seed)
        try:
            if read is None or isinstance(read, ParaVTError):
                raise read or VideoError(self.sample.video, "no frames were read")
            frames = distinct(read)
            if not frames:
                raise VideoError(self.sample.video, "no frame of the window could be decoded")
            crop = replace(crop, frame_times=tuple(frame.time for frame in frames), missing=read.reasons)
            if self.config.evidence != "frames":
                async with self.slots:
                    self.emit(CropStarted(turn, index, plan.window))
                    conversation.open([self.crop_message(plan.window, frames)])
                    text = await asyncio.wait_for(
                        conversation.turn(self.config.max_report_tokens), self.config.call_timeout
                    )
                crop = replace(crop, report=self.chat.clean(text).strip(), trace=conversation.trace)
        except asyncio.TimeoutError:
            late = _TimedOut(f"no report within {self.config.call_timeout:g} seconds")
            crop = self.failed(crop, late, conversation)
        except (VideoError, EngineError) as error:
            crop = self.failed(crop, error, conversation)
        return self.done(replace(crop, seconds=time.monotonic() - started))

    def crop_message(self, window: Window, frames: Sequence[Frame]) -> Message:
        text = fill(
            self.config.prompts.crop,
            start=seconds(window.start_time),
            end=seconds(window.end_time),
            question=self.chat.clean(self.sample.question),
        )
        return Message("user", (*_timestamped(frames), TextPart(text)))

    def failed(self, crop: Crop, error: ParaVTError, conversation: Conversation) -> Crop:
        self.note(error, f"crop/{crop.turn}/{crop.index}")
        status: CallStatus = "timed_out" if isinstance(error, _TimedOut) else "failed"
        trace = conversation.trace if conversation.trace.segments else None
        # the reply says what went wrong, not where on this machine the file is
        shown = error.reason if isinstance(error, VideoError) else str(error)
        return replace(crop, status=status, error=shown, trace=trace)

    def done(self, crop: Crop) -> Crop:
        self.emit(CropDone(crop))
        return crop

    # ------------------------------------------------------------------ replies

    def fit(self, crops: Sequence[Crop], frames: Sequence[tuple[Frame, ...]]) -> list[Message]:
        """The replies of a turn, cut until they fit the context, text and images together; [] if nothing fits."""
        room = self.limit - _TURN_ROOM - (_FINAL_ROOM if self.config.force_answer else 0)
        for share in (1.0, 0.5, 0.25, 0.125, 0.0):
            replies = [self.reply(crop, shown, share) for crop, shown in zip(crops, frames, strict=True)]
            if self.main.tokens(self.main.preview_reply(replies, self.prefix)) <= room:
                return replies
        return []

    def reply(self, crop: Crop, frames: Sequence[Frame], share: float) -> Message:
        """What the main agent reads about one call: its window, its status, its report or frames."""
        window = crop.window
        label = f"[{seconds(window.start_time)} - {seconds(window.end_time)} seconds] " if window else ""
        if not crop.ran:
            return text_message("tool", self.chat.clean(f"{label}error: {crop.error or crop.status}"))
        report = crop.report or ""
        text = label + (report if share == 1.0 else report[: int(len(report) * share)] + " [cut]")
        if crop.missing:
            text += f" ({len(crop.missing)} frames could not be read)"
        parts: list[Part] = [TextPart(text)]
        if self.config.evidence != "report":
            parts += [TextPart("\n"), *_timestamped(frames[: int(len(frames) * share)])]
        return Message("tool", tuple(parts))

    # ------------------------------------------------------------------ bookkeeping

    def note(self, error: ParaVTError, where: str) -> None:
        self.errors.append(EpisodeError(error.kind, where, str(error), scored=False))

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.timings[part] += time.monotonic() - started

    def result(self) -> Episode:
        return Episode(
            sample=self.sample,
            frame_budget=self.config.frame_budget,
            dispatch=self.config.dispatch,
            main=self.main.trace,
            turns=tuple(self.turns),
            crops=tuple(self.crops),
            answer=self.answer,
            end=self.end,
            forced=self.forced,
            duration=self.duration,
            overview_times=tuple(frame.time for frame in self.overview),
            errors=tuple(self.errors),
            timings=dict(self.timings),
        )


class _TimedOut(EngineError):
    kind = "timeout"


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _timestamped(frames: Sequence[Frame]) -> Iterator[Part]:
    for frame in frames:
        yield TextPart(timestamp(frame.time))
        yield ImagePart(frame)


def _names(given: str, video: str) -> bool:
    """Does the model's name for a video mean this one? A comparison of texts; nothing is opened."""
    base = os.path.basename(video)
    return given in (video, base, os.path.splitext(base)[0])
