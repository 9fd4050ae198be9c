"""Plays an ask: the agent's events become those of the ask, with small pictures of what it looks at."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from paravt.agent import CropDone, CropStarted, EpisodeConfig, Event, OverviewRead, TurnTaken
from paravt.engines.base import Engine
from paravt.errors import VideoError
from paravt.report.episode_view import crop_view, episode_view, thumbnails
from paravt.report.pictures import OVERVIEW_WIDTH, Picture, frame_picture
from paravt.report.schema import Thumbnail
from paravt.serve.asks import Ask, Ending
from paravt.serve.follow import follow_episode
from paravt.serve.messages import Asked
from paravt.serve.videos import Library, Video
from paravt.types import Episode, Frame, Sample
from paravt.video import FrameReader, frame_size


class Player:
    """One engine and one reader for all asks. `config` has what a request does not say."""

    def __init__(self, engine: Engine, reader: FrameReader, library: Library, config: EpisodeConfig) -> None:
        self.engine, self.reader, self.library, self.config = engine, reader, library, config

    async def play(self, ask: Ask[Asked]) -> Ending:
        request = ask.request.request
        video = await asyncio.to_thread(self.library.find, request.video)
        if video is None:
            return _failed(f"{ask.request.name}: the video is gone")
        sample = ask_sample(video, request.question, request.options)
        config = replace(
            self.config,
            frame_budget=request.frame_budget,
            dispatch=request.dispatch,
            max_frames=max(self.config.max_frames, 2 * request.frame_budget),
        )
        pictures = _Pictures()
        try:
            async with aclosing(follow_episode(sample, self.engine, config, self.reader)) as events:
                async for event in events:
                    if isinstance(event, Episode):
                        return await self._ending(event, video, ask.id, pictures)
                    await self._tell(ask, event, video, config, pictures)
        except (VideoError, ValueError) as error:  # the file is gone meanwhile; what the engine cannot do
            return _failed(plain(str(error), video))
        raise AssertionError("an episode ends with an episode")

    async def _tell(
        self, ask: Ask[Asked], event: Event, video: Video, config: EpisodeConfig, pictures: _Pictures
    ) -> None:
        if isinstance(event, OverviewRead):
            frames = await self._overview(event, video, config, pictures)
            ask.emit("overview", duration=event.duration, frames=frames)
        elif isinstance(event, TurnTaken):
            turn = event.turn
            ask.emit("turn", index=event.index, text=turn.text, calls=len(turn.calls), answer=turn.answer)
        elif isinstance(event, CropStarted):
            start, end = event.window.start_time, event.window.end_time
            ask.emit("crop_started", turn=event.turn, index=event.index, start=start, end=end)
        elif isinstance(event, CropDone):
            ask.emit("crop_done", crop=await asyncio.to_thread(crop_view, event.crop, pictures))

    async def _overview(
        self, event: OverviewRead, video: Video, config: EpisodeConfig, pictures: _Pictures
    ) -> list[Thumbnail]:
        """The frames that the agent was shown, from the reader's cache: they are asked for at the same size."""
        chat = self.engine.chat
        limit = min(config.max_pixels, chat.max_pixels)
        size = frame_size(video.info.width, video.info.height, factor=chat.frame_factor, max_pixels=limit)
        read = await self.reader.aread(str(video.path), event.times, size)
        frames = {frame.time: frame for frame in read.present}
        return await asyncio.to_thread(thumbnails, event.times, frames, pictures, OVERVIEW_WIDTH)

    async def _ending(self, episode: Episode, video: Video, id: str, pictures: _Pictures) -> Ending:
        if (message := failure(episode, video)) is not None:
            return _failed(message)
        url = f"/v1/videos/{video.id}/file"
        view = partial(episode_view, episode, pictures, id=id, video_url=url)
        shown = await asyncio.to_thread(view)
        shown["video"] = video.name
        for error in shown["errors"]:
            error["message"] = plain(error["message"], video)
        return Ending("done", {"episode": shown}, answer=None if episode.answer is None else _text(episode.answer))


class _Pictures:
    """The pictures of one episode, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Picture] = {}

    def __call__(self, frame: Frame, widest: int) -> Picture:
        key = (frame.key, widest)
        if key not in self._made:
            self._made[key] = frame_picture(frame, widest)
        return self._made[key]


def ask_sample(video: Video, question: str, options: list[str]) -> Sample:
    """As `paravt ask` would make it: the same id, so that a seed gives the same samples."""
    return Sample(
        id=f"ask:{video.path.name}",
        video=str(video.path),
        question=question,
        options=tuple(options),
        type="choice" if options else "open",
    )


def failure(episode: Episode, video: Video) -> str | None:
    """Why an episode failed; None if it did not. A model that gave no answer did not fail."""
    if episode.answer is not None or episode.scored:
        return None
    return plain(next(error.message for error in episode.errors if not error.scored), video)


def plain(message: str, video: Video) -> str:
    """A failure in one line, without where on this machine the file is."""
    return " ".join(_text(message.replace(str(video.path), video.name)).split())


def _failed(message: str) -> Ending:
    return Ending("failed", {"message": message}, message=message)


def _text(text: str) -> str:
    """Without halves of characters, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
