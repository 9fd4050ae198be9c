"""Agentic long-video understanding: parallel crops by sub-agents that share one set of weights.

>>> import paravt
>>> episode = paravt.ask("talk.mp4", "Which city is on the second slide?", engine=paravt.open_engine("MODEL"))
>>> print(episode.answer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paravt.agent import EpisodeConfig, run_episode
from paravt.answers import extract_letter, extract_window
from paravt.ask import ask, open_engine
from paravt.episodes import episode_to_dict, save_episode
from paravt.errors import EngineError, ModelError, ParaVTError, RecipeError, VideoError
from paravt.prompts import Prompts
from paravt.turns import parse_turn, render_call
from paravt.types import Episode, Sample
from paravt.video import FrameReader, open_video, overview_times, read_frames, window_times

if TYPE_CHECKING:
    from paravt.evaluation import evaluate

__version__ = "0.1.0"

__all__ = [
    "EngineError",
    "Episode",
    "EpisodeConfig",
    "FrameReader",
    "ModelError",
    "ParaVTError",
    "Prompts",
    "RecipeError",
    "Sample",
    "VideoError",
    "ask",
    "episode_to_dict",
    "evaluate",
    "extract_letter",
    "extract_window",
    "open_engine",
    "open_video",
    "overview_times",
    "parse_turn",
    "read_frames",
    "render_call",
    "run_episode",
    "save_episode",
    "window_times",
]


def __getattr__(name: str) -> Any:
    if name == "evaluate":  # what it needs takes longer to import than all the rest
        from paravt.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
