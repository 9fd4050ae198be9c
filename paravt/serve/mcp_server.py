"""Questions about local videos for any client of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from paravt import __version__
from paravt.agent import CropDone, CropStarted, EpisodeConfig, Event, OverviewRead, TurnTaken
from paravt.answers import LETTERS
from paravt.engines.base import Engine
from paravt.serve.follow import follow_episode
from paravt.serve.messages import LONGEST, is_text
from paravt.serve.player import ask_sample, failure, plain
from paravt.serve.videos import MEDIA_TYPES, MOST_LISTED, Probes, Video, inside, shown_name, video_files
from paravt.terminal import clock, printable, problems, span
from paravt.types import Episode
from paravt.video import FrameReader

_MOST_FRAMES = 1024


class ListedVideo(BaseModel):
    video: str = Field(description="What ask_video calls it.")
    seconds: float
    width: int
    height: int


class Evidence(BaseModel):
    start: float | None = Field(description="Seconds of the video.")
    end: float | None
    status: str
    report: str | None


class Answer(BaseModel):
    answer: str | None = Field(description="Null if the model gave none.")
    evidence: list[Evidence] = Field(description="The stretches of the video that were watched, and what was seen.")
    problems: list[str] = Field(description="What could not be read or watched.")


def build_server(engine: Engine, root: Path, *, config: EpisodeConfig, concurrency: int = 1) -> MCPServer[None]:
    """`root` is a real path (`open_root`); nothing outside of it is opened. The engine is closed with the server."""
    reader, probes, slots = FrameReader(), Probes(), asyncio.Semaphore(concurrency)

    @asynccontextmanager
    async def lifespan(_: MCPServer[None]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await engine.close()
            reader.close()

    server: MCPServer[None] = MCPServer(
        "paravt",
        title="ParaVT",
        version=__version__,
        instructions="Answers questions about long videos by watching them. Names of videos come from list_videos.",
        log_level="WARNING",
        lifespan=lifespan,
    )

    def find(name: str) -> Video:
        path = inside(root, name) if _listable(name) else None
        if path is None:
            raise ToolError(f"there is no video {json.dumps(name[:200])} here; list_videos names those there are")
        info = probes(path)
        if info is None:
            raise ToolError(f"{printable(name)}: not a readable video")
        return Video(name, shown_name(name), path, info, uploaded=False)

    @server.tool()
    def list_videos() -> list[ListedVideo]:
        """The videos that questions can be asked about."""
        found = []
        for relative in islice(video_files(root), MOST_LISTED):
            path = inside(root, relative)
            info = None if path is None else probes(path)
            if info is not None and shown_name(relative) == relative:  # else nobody could spell it
                found.append(ListedVideo(video=relative, seconds=info.duration, width=info.width, height=info.height))
        return found

    @server.tool()
    async def ask_video(
        video: Annotated[str, Field(description="A name that list_videos gave.")],
        question: Annotated[str, Field(description="What you want to know.")],
        context: Context[Any, Any],
        options: Annotated[list[str], Field(description="Of a multiple-choice question.")] = [],  # noqa: B006
        frames: Annotated[int, Field(description="The number of frames of the first look over the whole.")] = 64,
    ) -> Answer:
        """Watch a video and answer a question about it, with the stretches that were looked at as evidence."""
        if not question.strip():
            raise ToolError("the question is empty")
        if len(options) > len(LETTERS):
            raise ToolError(f"{len(options)} options; at most {len(LETTERS)} can be lettered")
        if not all(is_text(text) and len(text) <= LONGEST for text in (question, *options)):
            raise ToolError(f"the question or an option has characters that are no text, or more than {LONGEST}")
        if not 1 <= frames <= _MOST_FRAMES:
            raise ToolError(f"frames: {frames} is not between 1 and {_MOST_FRAMES}")
        found = await asyncio.to_thread(find, video)
        sample = ask_sample(found, question, options)
        played = replace(config, frame_budget=frames, max_frames=max(config.max_frames, 2 * frames))
        steps = 0
        async with slots, aclosing(follow_episode(sample, engine, played, reader)) as events:
            async for event in events:
                if isinstance(event, Episode):
                    return _answer(event, found)
                steps += 1
                await context.report_progress(steps, message=_in_words(event))
        raise AssertionError("an episode ends with an episode")

    return server


def _listable(name: str) -> bool:
    """Whether `list_videos` could name it so."""
    path = PurePath(name)
    hidden = any(part.startswith(".") for part in path.parts)  # the way up included
    return not path.is_absolute() and not hidden and path.suffix.lower() in MEDIA_TYPES and shown_name(name) == name


def _answer(episode: Episode, video: Video) -> Answer:
    """Raises ToolError if it failed, which is not the same as having no answer."""
    if (message := failure(episode, video)) is not None:
        raise ToolError(message)
    return Answer(
        answer=episode.answer,
        evidence=[
            Evidence(
                start=crop.window.start_time if crop.window else None,
                end=crop.window.end_time if crop.window else None,
                status=crop.status,
                report=crop.report,
            )
            for crop in episode.crops
        ],
        problems=[plain(line, video) for line in problems(episode)],
    )


def _in_words(event: Event) -> str:
    if isinstance(event, OverviewRead):
        return f"{len(event.times)} overview frames of {clock(event.duration)}"
    if isinstance(event, TurnTaken):
        answered = event.turn.answer is not None
        return f"turn {event.index + 1}: " + ("answered" if answered else f"{len(event.turn.calls)} calls")
    if isinstance(event, CropStarted):
        return f"watching {span(event.window)}"
    assert isinstance(event, CropDone)
    said = event.crop.report if event.crop.ran else event.crop.error
    return f"{span(event.crop.window)}: {printable(said or event.crop.status)}"
