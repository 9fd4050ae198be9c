"""The episode: overview frames, parallel crops by sub-agents, an answer.

What fails inside an episode (the video, the engine, a sub-agent) is recorded in `Episode.errors` and never raised. A
failed sub-agent is an error reply in its call's place; a failed overview, engine or transport ends the episode. Each of
them leaves the episode unscored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import anyio

from paravt.answers import LETTERS
from paravt.chat import text_message
from paravt.conversation import Conversation
from paravt.crops import CropRunner, TimedOut
from paravt.engines.base import Engine, stable_seed
from paravt.episode_config import CropDone, CropStarted, EpisodeConfig, Event, OverviewRead, TurnTaken
from paravt.errors import EngineError, ParaVTError, VideoError
from paravt.protocol import PARAVT, Protocol, Scene
from paravt.types import (
    Crop,
    EndReason,
    Episode,
    EpisodeError,
    Frame,
    Message,
    Sample,
    Turn,
)
from paravt.video import FrameReader, FrameSource, distinct, frame_size, overview_times

__all__ = ["CropDone", "CropStarted", "EpisodeConfig", "Event", "OverviewRead", "TurnTaken", "run_episode"]

THINK_PREFIX = "<think>\n"
ANSWER_PREFIX = "<answer>"
# Tokens that a reply block must leave in the context for the turn that answers it, and that all turns must leave for
# a forced final one.
_TURN_ROOM = 64
_FINAL_ROOM = 160


async def run_episode(
    sample: Sample,
    engine: Engine,
    config: EpisodeConfig | None = None,
    *,
    reader: FrameSource | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    protocol: Protocol = PARAVT,
) -> Episode:
    """Let the agent answer one question. `on_event` is called in the event loop as things happen; `protocol` is for
    models that were trained to speak otherwise.

    Share one `reader` between episodes: it caches frames. Raises ValueError if the engine cannot do what the config
    asks for, or the sample has more options than letters.
    """
    episode = _Run(sample, engine, config or EpisodeConfig(), reader or FrameReader(), on_event, protocol)
    started = time.monotonic()
    try:
        await episode.run()
    except (VideoError, EngineError) as error:
        episode.note(error, "episode")
        episode.end = "failed"
    episode.timings["total"] = time.monotonic() - started
    return episode.result()


class _Run:
    """The state of one episode while it runs."""

    def __init__(
        self,
        sample: Sample,
        engine: Engine,
        config: EpisodeConfig,
        reader: FrameSource,
        emit: Callable[[Event], None],
        protocol: Protocol,
    ) -> None:
        self.sample, self.engine, self.config, self.reader, self.emit = sample, engine, config, reader, emit
        self.protocol = protocol
        self.chat = engine.chat
        self.seed = stable_seed(config.seed, sample.id)
        self.main = Conversation(engine, "main", "main", config.temperature, self.seed)
        if config.think_prefix and not self.chat.takes_prefix:
            raise ValueError("think_prefix: this engine cannot continue a forced prefix")
        if len(sample.options) > len(LETTERS):
            raise ValueError(f"sample {sample.id}: {len(sample.options)} options; {len(LETTERS)} can be lettered")
        self.prefix = THINK_PREFIX if config.think_prefix else ""
        self.limit = min(config.max_context_tokens, self.chat.context_limit or config.max_context_tokens)
        self.end: EndReason = "failed"
        self.turns: list[Turn] = []
        self.crops: list[Crop] = []
        self.errors: list[EpisodeError] = []
        self.timings = {"overview": 0.0, "main": 0.0, "crops": 0.0}
        self.answer: str | None = None
        self.forced = False
        self.scene = Scene(sample, config, self.chat.clean)

    # ------------------------------------------------------------------ the episode, top to bottom

    async def run(self) -> None:
        with self.clock("overview"):
            crops = await self.read_overview()
        self.main.open(*self.protocol.first(self.scene), self.prefix)
        if (size := self.main.tokens()) >= self.limit - _FINAL_ROOM:
            raise EngineError(
                f"overview and question take {size} of {self.limit} tokens; use fewer frames or a shorter question"
            )
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
                pending = self.fit(*await self.run_calls(crops, index, turn))
            if not pending:
                self.end = "budget"
                break
        if self.config.force_answer:
            await self.force_answer(pending)

    async def read_overview(self) -> CropRunner:
        """Reads the overview frames; returns what runs the calls about this video."""
        info = await self.reader.ainfo(self.sample.video)
        limit = min(self.config.max_pixels, self.chat.max_pixels)
        size = frame_size(info.width, info.height, factor=self.chat.frame_factor, max_pixels=limit)
        self.scene = replace(self.scene, duration=info.duration)
        times = overview_times(info.duration, self.config.frame_budget)
        read = await self.reader.aread(self.sample.video, times, size)
        self.scene = replace(self.scene, overview=distinct(read))
        for reason in (*info.warnings, *read.reasons):
            self.errors.append(EpisodeError(VideoError.kind, "overview", reason, scored=True))
        if not self.scene.overview:
            raise VideoError(self.sample.video, "none of the overview frames could be decoded")
        self.emit(OverviewRead(self.scene.duration, tuple(frame.time for frame in self.scene.overview)))
        return CropRunner(
            self.scene, self.engine, self.reader, self.emit, look=self.protocol.look, size=size, seed=self.seed
        )

    async def take_turn(self, index: int, reserve: int) -> Turn | None:
        """The next assistant turn, or None if there is no room left for one and the reserve."""
        room = min(self.config.max_tokens, self.limit - self.main.tokens() - reserve)
        if room < 1:
            return None
        with self.clock("main"):
            try:
                with anyio.fail_after(self.config.call_timeout):
                    text = await self.main.turn(room)
            except TimeoutError:
                raise TimedOut(f"no turn within {self.config.call_timeout:g} seconds") from None
        turn = self.protocol.parse(text, self.config)
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

    # ------------------------------------------------------------------ replies

    async def run_calls(self, runner: CropRunner, index: int, turn: Turn) -> tuple[list[Crop], list[tuple[Frame, ...]]]:
        crops, frames = await runner.run(index, turn)
        self.crops += crops
        self.errors += runner.errors
        runner.errors = []
        return crops, frames

    def fit(self, crops: Sequence[Crop], frames: Sequence[tuple[Frame, ...]]) -> list[Message]:
        """The replies of a turn, cut until they fit the context, text and images together; [] if nothing fits."""
        room = self.limit - _TURN_ROOM - (_FINAL_ROOM if self.config.force_answer else 0)
        for share in (1.0, 0.5, 0.25, 0.125, 0.0):
            replies = list(self.protocol.reply(self.scene, crops, frames, share))
            if self.main.tokens(self.main.preview_reply(replies, self.prefix)) <= room:
                return replies
        return []

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
            duration=self.scene.duration,
            overview_times=tuple(frame.time for frame in self.scene.overview),
            errors=tuple(self.errors),
            timings=dict(self.timings),
        )
