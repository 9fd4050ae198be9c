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
from paravt.bench.protocols import StopAt, conan, direct, longvt, qwen3_vl, video_r1, videozoomer
from paravt.bench.protocols.common import USER_PLACEHOLDERS
from paravt.bench.protocols.videozoomer import STOP
from paravt.engines.base import Engine
from paravt.episode_config import EpisodeConfig, Event
from paravt.errors import RecipeError, VideoError
from paravt.prompts import Prompts, fill, read_prompt
from paravt.protocol import PARAVT, Protocol
from paravt.types import Episode, Sample
from paravt.video import FrameReader, FrameSource

_MOST_CHARS = 100_000
"""Of a prompt file."""


def _ours(texts: Mapping[str, str]) -> Protocol:
    return PARAVT


@dataclass(frozen=True)
class Mode:
    """One way to evaluate a model."""

    name: str
    title: str
    """For tables and help texts, one line."""
    main: str
    """The text that a prompt file replaces: one of `texts`, or a field of `Prompts`."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Fields of `Prompts` that are other ones in this mode."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """What the protocol needs to be made."""
    placeholders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What may stand as `$name` in which of `texts`; the others are taken as they are."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EpisodeConfig that make the mode what it is."""
    budgets: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EpisodeConfig with another default; a user's setting goes before."""
    frame_rate: float | None = None
    """Overview frames per second, at most `frame_budget` of them; None: always `frame_budget`."""
    stop: str | None = None
    """The closing tag that generation ends with."""
    protocol: Callable[[Mapping[str, str]], Protocol] = field(default=_ours, repr=False)
    """Made of `texts`."""

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
        """The mode with other texts, by their names. Raises RecipeError for an unknown name, or as `with_prompt`."""
        names = [one.name for one in fields(Prompts)]
        for name, text in texts.items():
            if name in self.texts:
                self._check(name, text)
            elif name in names:
                try:
                    Prompts(**{name: text})
                except ValueError as error:
                    raise RecipeError(f"mode {self.name}: {error}") from error
            else:
                known = ", ".join(dict.fromkeys([*self.texts, *names]))
                raise RecipeError(f"mode {self.name}: no prompt {name!r}; there are: {known}")
        own = {name: text for name, text in texts.items() if name in self.texts}
        others = {name: text for name, text in texts.items() if name not in self.texts}
        return replace(self, texts={**self.texts, **own}, prompts={**self.prompts, **others})

    def _check(self, name: str, text: str) -> None:
        wanted = self.placeholders.get(name)
        if wanted is None:  # taken as it is
            return
        listed = ", ".join(f"${one}" for one in wanted)
        try:
            filled = fill(text, **{one: f"\0{one}\0" for one in wanted})
        except (ValueError, KeyError) as error:
            raise RecipeError(
                f"mode {self.name}: prompt {name}: a placeholder that is not one of: {listed} (a dollar sign is $$)"
            ) from error
        if "question" in wanted and "\0question\0" not in filled:
            raise RecipeError(f"mode {self.name}: prompt {name} has no $question; it can have: {listed}")

    def recipe(self, config: EpisodeConfig) -> dict[str, Any]:
        """All that decides what a model is shown, as JSON values: for hashing, and for whoever reads the results."""
        own = {"name": self.name, "texts": dict(self.texts), "frame_rate": self.frame_rate, "stop": self.stop}
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
    protocol = mode.protocol(mode.texts)
    return await run_episode(sample, player, config, reader=reader, on_event=on_event, protocol=protocol)


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
_USER = {"user": USER_PLACEHOLDERS}
_QWEN25 = _text("qwen25_system")

_ALL = (
    Mode("agentic", "our agent: crops side by side, reports of sub-agents", "system", fixed={"dispatch": "parallel"}),
    Mode(
        "agentic_frames",
        "crops side by side, whose frames come back",
        "system",
        prompts={"system": _text("agentic_frames")},
        fixed=_FRAMES,
        budgets={"max_context_tokens": 65_536},
    ),
    Mode("sequential", "one crop in each turn", "system_sequential", fixed={"dispatch": "sequential"}),
    Mode("reasoning", "reasons on the overview, then answers", "system_direct", fixed={"dispatch": "none"}),
    Mode(
        "direct",
        "answers at once",
        "system_direct",
        prompts={"system_direct": _text("direct")},
        fixed={"dispatch": "none"},
        budgets={"force_answer": False},
        protocol=direct,
    ),
    Mode(
        "qwen3_vl",
        "Qwen3-VL with a tool in its own format",
        "user",
        texts={"user": _text("qwen3_vl")},
        placeholders=_USER,
        fixed=_FRAMES,
        budgets={**_LONG, "max_tokens": 2048, "max_turns": 3, "force_answer": True},
        protocol=qwen3_vl,
    ),
    Mode(
        "longvt",
        "LongVT with its tool",
        "user",
        texts={"user": _text("longvt"), "system": _QWEN25},
        placeholders=_USER,
        fixed=_FRAMES,
        budgets={**_LONG, "max_turns": 5, "crop_max_frames": 128},
        frame_rate=1.0,
        protocol=longvt,
    ),
    Mode(
        "longvt_reasoning",
        "LongVT without its tool",
        "system_direct",
        prompts={"system_direct": _text("longvt_reasoning")},
        fixed={"dispatch": "none"},
        budgets=_LONG,
        frame_rate=1.0,
        protocol=direct,
    ),
    Mode(
        "video_r1",
        "reasons with doubts, as Video-R1",
        "user",
        texts={"user": _text("video_r1"), "system": _QWEN25},
        placeholders=_USER,
        fixed={"dispatch": "none"},
        budgets={"force_answer": False},
        protocol=video_r1,
    ),
    Mode(
        "videozoomer",
        "VideoZoomer: one <video_zoom> in each turn",
        "system",
        texts={
            "system": _text("videozoomer"),
            "user": _text("qwen3_vl"),
            "more": _text("videozoomer_more"),
            "last": _text("videozoomer_last"),
            "error": _text("videozoomer_error"),
        },
        placeholders={**_USER, "system": ("frames",), "error": ("error", "frames")},
        fixed={"evidence": "frames", "dispatch": "sequential"},
        budgets={**_LONG, "max_turns": 5, "max_pixels": 100_352, "max_frames": 128},
        frame_rate=0.5,
        stop=STOP,
        protocol=videozoomer,
    ),
    Mode(
        "conan",
        "Conan: scores of frames and requests of clips",
        "user",
        texts={
            "user": _text("conan"),
            "system": _QWEN25,
            "more": _text("conan_more"),
            "last": _text("conan_last"),
        },
        placeholders={**_USER, "last": ("form",)},
        fixed=_FRAMES,
        budgets={**_LONG, "frame_budget": 16, "max_turns": 3, "crop_max_frames": 8, "max_pixels": 448 * 252},
        protocol=conan,
    ),
)

MODES: dict[str, Mode] = {mode.name: mode for mode in _ALL}
"""By their names on the command line."""
