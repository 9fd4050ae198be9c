"""Ask one question about one video: what `paravt ask` and `paravt.ask` do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from paravt.agent import EpisodeConfig, Event, run_episode
from paravt.engines.base import Engine
from paravt.errors import DataError
from paravt.model_names import check_name
from paravt.types import Episode, Sample
from paravt.video import FrameReader

LAB_MAX_TOKENS = 128
"""Enough for every turn that the small checkpoint was trained on; off its world it would go on for ever."""


def shipped_model() -> Path:
    """The small checkpoint inside the package. It knows the lab's videos and nothing else of the world."""
    return Path(str(resources.files("paravt") / "lab" / "checkpoint"))


def open_engine(
    model: str | Path | None = None,
    *,
    server: str | None = None,
    served_model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> Engine:
    """An engine for a checkpoint (a directory or a hub id), for a chat server, or for the shipped checkpoint.

    Raises ModelError if the checkpoint cannot be loaded, EngineError if the address is none.
    """
    if server is not None:
        from paravt.engines.openai import OpenAIEngine

        return OpenAIEngine(server, served_model)
    if model is not None:
        check_name(model)
    import torch

    from paravt.engines.local import LocalEngine

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return LocalEngine.load(model or shipped_model(), dtype=dtype, device=device)


def ask(
    video: str | Path,
    question: str,
    options: Sequence[str] = (),
    *,
    engine: Engine | None = None,
    config: EpisodeConfig | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Episode:
    """Ask a question about a video file; the answer is `.answer`, what was looked at is in `.crops`.

    Without an engine the shipped checkpoint answers. Failures inside the episode are in `.errors`.
    """
    if not question.strip():
        raise DataError("the question is empty")
    if len(options) > 26:
        raise DataError(f"{len(options)} options; at most 26 can be lettered")
    sample = Sample(
        id=f"ask:{Path(video).name}",
        video=str(video),
        question=question,
        options=tuple(options),
        type="choice" if options else "open",
    )
    own = engine is None
    used = open_engine() if engine is None else engine

    async def run() -> Episode:
        try:
            return await run_episode(sample, used, config, reader=FrameReader(), on_event=on_event)
        finally:
            if own:
                await used.close()

    return asyncio.run(run())
