"""The ways a model can be evaluated: our agent and its variants, and the protocols of other projects' models.

A mode says what is different from the episode of `paravt ask`: the texts, the protocol, the budgets. Everything else
is the same for all: the frames, the loop, what counts as a failure, the extractor of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paravt.agent import run_episode
from paravt.bench.protocols import CONAN, DIRECT, LONGVT, QWEN3_VL, VIDEO_R1, VIDEOZOOMER, StopAt
from paravt.bench.protocols.videozoomer import STOP
from paravt.engines.base import Engine
from paravt.episode_config import EpisodeConfig, Event
from paravt.errors import RecipeError, VideoError
from paravt.prompts import Prompts, read_prompt
from paravt.protocol import PARAVT, Protocol
from paravt.types import Episode, Sample
from paravt.video import FrameReader, FrameSource

_MOST_CHARS = 100_000
"""Of a prompt file."""


@dataclass(frozen=True)
class Mode:
    """One way to evaluate a model."""

    name: str
    main: str
    """The field of `Prompts` that a prompt file replaces."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Fields of `Prompts` that are other ones in this mode."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EpisodeConfig that make the mode what it is."""
    budgets: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EpisodeConfig with another default; a user's setting goes before."""
    frame_rate: float | None = None
    """Overview frames per second, at most `frame_budget` of them; None: always `frame_budget`."""
    stop: str | None = None
    """The closing tag that generation ends with."""
    protocol: Protocol = field(default=PARAVT, repr=False)

    def config(self, **settings: Any) -> EpisodeConfig:
        """The configuration of an episode; `settings` go before the mode's budgets, not before what is fixed.

        Raises ValueError for values that cannot be.
        """
        return self.apply(EpisodeConfig(**{**self.budgets, **settings}))

    def apply(self, config: EpisodeConfig) -> EpisodeConfig:
        """`config` with what makes the mode what it is, and with its prompts."""
        return replace(config, **self.fixed, prompts=replace(config.prompts, **self.prompts))

    def with_prompt(self, text: str) -> Mode:
        """The mode with another main text, such as the one that a checkpoint was trained with.

        Raises RecipeError, with one line, for a text that cannot be filled in.
        """
        return self.with_texts({self.main: text})

    def with_texts(self, texts: Mapping[str, str]) -> Mode:
        """The mode with other prompts, by their names. Raises RecipeError for one that the mode does not have, or as
        `with_prompt`."""
        known = [*self.prompts, *(one.name for one in fields(Prompts) if one.default and one.name not in self.prompts)]
        if unknown := [name for name in texts if name not in known]:
            raise RecipeError(f"mode {self.name}: no prompt {unknown[0]!r}; there are: {', '.join(known)}")
        prompts = {**self.prompts, **texts}
        try:
            Prompts(**prompts)
        except ValueError as error:
            raise RecipeError(f"mode {self.name}: {error}") from error
        return replace(self, prompts=prompts)

    def recipe(self, config: EpisodeConfig) -> dict[str, Any]:
        """All that decides what a model is shown, as JSON values: for hashing, and for whoever reads the results."""
        own = {"name": self.name, "frame_rate": self.frame_rate, "stop": self.stop}
        return {"mode": own, "episode": asdict(self.apply(config))}


async def run_sample(
    sample: Sample,
    engine: Engine,
    mode: Mode,
    config: EpisodeConfig | None = None,
    *,
    reader: FrameSource | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Episode:
    """Play one question in a mode. `config` is best made by `mode.config(..)`.

    What fails is in `Episode.errors`. Raises ValueError, as `run_episode` does, for what the engine cannot do.
    """
    reader = reader or FrameReader()
    config = mode.apply(config or mode.config())
    if mode.frame_rate is not None:
        config = await _at_rate(config, sample, mode.frame_rate, reader)
    player = StopAt(engine, mode.stop) if mode.stop is not None else engine
    return await run_episode(sample, player, config, reader=reader, on_event=on_event, protocol=mode.protocol)


async def _at_rate(config: EpisodeConfig, sample: Sample, rate: float, reader: FrameSource) -> EpisodeConfig:
    try:
        info = await reader.ainfo(sample.video)
    except VideoError:  # the episode meets it again, and records it
        return config
    return replace(config, frame_budget=min(config.frame_budget, max(1, int(info.duration * rate))))


def read_prompt_file(path: str | Path) -> str:
    """The text of a user's prompt file, without line breaks at its end. Raises RecipeError if there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip() or len(text) > _MOST_CHARS:
        raise RecipeError(f"{path}: a prompt has 1 to {_MOST_CHARS} characters")
    return text.rstrip("\n")


def _text(name: str) -> str:
    return read_prompt(f"modes/{name}")


# Frames come back to the one model there is, in one conversation that has to hold them.
_FRAMES = {"evidence": "frames", "dispatch": "parallel"}
_LONG = {"max_context_tokens": 65_536, "max_tokens": 4096, "force_answer": False}
_QWEN25 = _text("qwen25_system")

_ALL = (
    Mode("agentic", "system", fixed={"dispatch": "parallel"}),
    Mode(
        "agentic_frames",
        "system",
        prompts={"system": _text("agentic_frames")},
        fixed=_FRAMES,
        budgets={"max_context_tokens": 65_536},
    ),
    Mode("sequential", "system_sequential", fixed={"dispatch": "sequential"}),
    Mode("reasoning", "system_direct", fixed={"dispatch": "none"}),
    Mode(
        "direct",
        "system_direct",
        prompts={"system_direct": _text("direct")},
        fixed={"dispatch": "none"},
        budgets={"force_answer": False},
        protocol=DIRECT,
    ),
    Mode(
        "qwen3_vl",
        "user",
        prompts={"user": _text("qwen3_vl")},
        fixed=_FRAMES,
        budgets={**_LONG, "max_tokens": 2048, "max_turns": 3, "force_answer": True},
        protocol=QWEN3_VL,
    ),
    Mode(
        "longvt",
        "user",
        prompts={"user": _text("longvt"), "system": _QWEN25},
        fixed=_FRAMES,
        budgets={**_LONG, "max_turns": 5, "crop_max_frames": 128},
        frame_rate=1.0,
        protocol=LONGVT,
    ),
    Mode(
        "longvt_reasoning",
        "system_direct",
        prompts={"system_direct": _text("longvt_reasoning")},
        fixed={"dispatch": "none"},
        budgets=_LONG,
        frame_rate=1.0,
        protocol=DIRECT,
    ),
    Mode(
        "video_r1",
        "user",
        prompts={"user": _text("video_r1"), "system": _QWEN25},
        fixed={"dispatch": "none"},
        budgets={"force_answer": False},
        protocol=VIDEO_R1,
    ),
    Mode(
        "videozoomer",
        "system",
        prompts={
            "system": _text("videozoomer"),
            "user": _text("qwen3_vl"),
            "more": _text("videozoomer_more"),
            "last": _text("videozoomer_last"),
            "error": _text("videozoomer_error"),
        },
        fixed={"evidence": "frames", "dispatch": "sequential", "crop_max_frames": 16},  # as its system turn says
        budgets={**_LONG, "max_turns": 5, "max_pixels": 100_352, "max_frames": 128},
        frame_rate=0.5,
        stop=STOP,
        protocol=VIDEOZOOMER,
    ),
    Mode(
        "conan",
        "user",
        prompts={
            "user": _text("conan"),
            "system": _QWEN25,
            "more": _text("conan_more"),
            "last": _text("conan_last"),
        },
        fixed=_FRAMES,
        budgets={**_LONG, "frame_budget": 16, "max_turns": 3, "crop_max_frames": 8, "max_pixels": 448 * 252},
        protocol=CONAN,
    ),
)

MODES: dict[str, Mode] = {mode.name: mode for mode in _ALL}
"""By their names on the command line."""
