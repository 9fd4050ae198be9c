"""What an episode is given: budgets and choices; and what it tells while it runs: events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from paravt.prompts import Prompts
from paravt.types import Crop, Dispatch, Evidence, Turn, Window


@dataclass(frozen=True)
class EpisodeConfig:
    """Budgets and choices of an episode. Times are in seconds."""

    frame_budget: int = 64
    """K, the number of overview frames."""
    dispatch: Dispatch = "parallel"
    """All crops of a turn at once, the first of each turn, or no tool."""
    evidence: Evidence = "report"
    """What comes back of a crop: its sub-agent's report, its frames, or both."""
    max_turns: int = 8
    """Assistant turns of the main agent, a forced final one not counted."""
    max_parallel: int = 8
    """Sub-agents of a turn that run at the same time; further ones wait."""
    max_tokens: int = 1024
    """Per assistant turn."""
    max_report_tokens: int = 256
    """Per report of a sub-agent."""
    max_context_tokens: int = 32_768
    """Of a whole conversation; the model's own limit applies too."""
    max_frames: int = 1024
    """Overview and crops together."""
    crop_fps: float = 1.0
    """Frames per second of a window."""
    crop_max_frames: int = 16
    """Of one window."""
    max_pixels: int = 50_176
    """Per frame; the processor's own limit applies too."""
    call_timeout: float | None = 300.0
    """For the frames of a turn's calls, for each report, and for each turn of the main agent; None (reproducible
    runs) waits for ever."""
    temperature: float = 0.0
    """0 is greedy."""
    think_prefix: bool = False
    """Put `<think>` into the header of every assistant turn of the main agent (not trained on)."""
    force_answer: bool = True
    """Ask for an answer in a last turn if there is none yet."""
    seed: int = 0
    """Of the sampling."""
    prompts: Prompts = field(default_factory=Prompts)
    """The texts; others for a checkpoint that was trained with others."""

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
