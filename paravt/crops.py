"""The calls of a turn: windows read as one union, a sub-agent for each, a crop for every call whatever became of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import anyio

from paravt.chat import seconds
from paravt.conversation import Conversation
from paravt.engines.base import Engine
from paravt.episode_config import CropDone, CropStarted, Event
from paravt.errors import EngineError, ParaVTError, VideoError
from paravt.prompts import fill
from paravt.protocol import Scene, timestamped
from paravt.tools import crop_window
from paravt.types import (
    BadToolCall,
    CallStatus,
    Crop,
    EpisodeError,
    Frame,
    Message,
    TextPart,
    ToolCall,
    Turn,
    Window,
)
from paravt.video import Frames, FrameSource, distinct

# Seconds at the end of a video that no window begins in: there may be no frame there, and that is the call's fault.
_SHORTEST = 1e-3


class TimedOut(EngineError):
    kind = "timeout"


@dataclass(frozen=True)
class _Plan:
    """A call before it runs: what to read, or why there is nothing to read."""

    call: ToolCall | BadToolCall
    window: Window | None = None
    times: tuple[float, ...] = ()
    status: CallStatus = "ran"
    error: str | None = None


class CropRunner:
    """Runs the calls of one episode. `size` is that of the video's frames; `look` is the protocol's."""

    def __init__(
        self,
        scene: Scene,
        engine: Engine,
        reader: FrameSource,
        emit: Callable[[Event], None],
        *,
        look: Callable[[Scene, ToolCall, Window, int, Sequence[float]], tuple[float, ...]],
        size: tuple[int, int],
        seed: int,
    ) -> None:
        self.scene, self.engine, self.reader, self.emit, self.look = scene, engine, reader, emit, look
        self.sample, self.config, self.duration = scene.sample, scene.config, scene.duration
        self.size, self.seed = size, seed
        self.seen = [frame.time for frame in scene.overview]
        """The times of all frames so far, those that are to be read included."""
        self.chat = engine.chat
        self.errors: list[EpisodeError] = []
        self.slots = asyncio.Semaphore(self.config.max_parallel)

    async def run(self, turn_index: int, turn: Turn) -> tuple[list[Crop], list[tuple[Frame, ...]]]:
        """All calls of a turn: for each its crop and the frames of its window, in call order."""
        plans = [self.plan(call, position) for position, call in enumerate(turn.calls)]
        reads = await self.read_windows(plans)
        tasks = [
            asyncio.ensure_future(self.run_one(turn_index, position, plan, read))
            for position, (plan, read) in enumerate(zip(plans, reads, strict=True))
        ]
        try:
            crops = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if the episode is cancelled, its sub-agents are too
                task.cancel()
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
        if asked.start_time >= self.duration - _SHORTEST:
            error = f"start_time is past the end of the video ({seconds(self.duration)} seconds)"
            return _Plan(call, status="bad", error=error)
        window = Window(asked.start_time, min(asked.end_time, self.duration))
        room = self.config.max_frames - len(self.seen)
        if room < 1:
            return _Plan(call, window, status="skipped", error="not run: no frames are left in the budget")
        most = min(self.config.crop_max_frames, room)
        times = self.look(self.scene, call, window, most, self.seen)
        self.seen += times
        return _Plan(call, window, times, status="repaired" if call.repaired else "ran")

    async def read_windows(self, plans: Sequence[_Plan]) -> list[Frames | ParaVTError | None]:
        """The frames of all windows, read as one union; for each plan its frames, or why there are none."""
        wanted = [plan.times for plan in plans if plan.times]
        if not wanted:
            return [None] * len(plans)
        try:
            with anyio.fail_after(self.config.call_timeout):
                found = iter(await self.reader.aread_many(self.sample.video, wanted, self.size))
        except VideoError as error:
            return [error if plan.times else None for plan in plans]
        except TimeoutError:
            late = TimedOut(f"reading the frames took longer than {self.config.call_timeout:g} seconds")
            return [late if plan.times else None for plan in plans]
        return [next(found) if plan.times else None for plan in plans]

    async def run_one(self, turn: int, index: int, plan: _Plan, read: Frames | ParaVTError | None) -> Crop:
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
                    with anyio.fail_after(self.config.call_timeout):
                        text = await conversation.turn(self.config.max_report_tokens)
                crop = replace(crop, report=self.chat.clean(text).strip(), trace=conversation.trace)
        except TimeoutError:
            late = TimedOut(f"no report within {self.config.call_timeout:g} seconds")
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
        return Message("user", (*timestamped(frames), TextPart(text)))

    def failed(self, crop: Crop, error: ParaVTError, conversation: Conversation) -> Crop:
        self.errors.append(EpisodeError(error.kind, f"crop/{crop.turn}/{crop.index}", str(error), scored=False))
        status: CallStatus = "timed_out" if isinstance(error, TimedOut) else "failed"
        trace = conversation.trace if conversation.trace.segments else None
        # the reply says what went wrong, not where on this machine the file is
        shown = error.reason if isinstance(error, VideoError) else str(error)
        return replace(crop, status=status, error=shown, trace=trace)

    def done(self, crop: Crop) -> Crop:
        self.emit(CropDone(crop))
        return crop


def _names(given: str, video: str) -> bool:
    """Does the model's name for a video mean this one? A comparison of texts; nothing is opened."""
    base = os.path.basename(video)
    return given in (video, base, os.path.splitext(base)[0])
