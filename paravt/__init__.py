"""Agentic long-video understanding: parallel crops by sub-agents that share one set of weights.

>>> import paravt
>>> episode = paravt.ask("talk.mp4", "Which city is on the second slide?", engine=paravt.open_engine("MODEL"))
>>> print(episode.answer)
"""

from paravt.agent import EpisodeConfig, run_episode
from paravt.answers import extract_letter, extract_window
from paravt.ask import ask, open_engine
from paravt.episodes import episode_to_dict, save_episode
from paravt.errors import EngineError, ModelError, ParaVTError, RecipeError, VideoError
from paravt.prompts import Prompts
from paravt.turns import parse_turn, render_call
from paravt.types import Episode, Sample
from paravt.video import FrameReader, open_video, overview_times, read_frames, window_times

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
