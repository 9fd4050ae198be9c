"""An episode as a stream: its events as they happen, then the episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from paravt.agent import EpisodeConfig, Event, run_episode
from paravt.engines.base import Engine
from paravt.types import Episode, Sample
from paravt.video import FrameSource


async def follow_episode(
    sample: Sample, engine: Engine, config: EpisodeConfig, reader: FrameSource
) -> AsyncGenerator[Event | Episode, None]:
    """Closing the generator cancels the episode, and with it its requests to the engine."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    task = asyncio.ensure_future(run_episode(sample, engine, config, reader=reader, on_event=events.put_nowait))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        yield await task
    finally:
        task.cancel()
        await asyncio.wait([task])
