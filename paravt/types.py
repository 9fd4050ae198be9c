"""The data contract: every noun of the domain, once. Frozen dataclasses, no torch.

Times are seconds from the first displayable frame of the video. Token ids are Python ints; the arrays of
`Frame.pixels` are uint8 RGB of shape (height, width, 3) and are never written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, Literal, TypeAlias

import numpy as np

Role = Literal["system", "user", "assistant", "tool"]
TraceRole = Literal["main", "crop"]
StopReason = Literal["stop", "length"]
AnswerType = Literal["choice", "temporal", "open"]
Dispatch = Literal["parallel", "sequential", "none"]
Evidence = Literal["report", "frames", "both"]
EndReason = Literal["answered", "no_call", "max_turns", "budget", "failed"]
CallStatus = Literal["ran", "repaired", "bad", "failed", "timed_out", "skipped"]


@dataclass(frozen=True, eq=False)
class Frame:
    """One decoded frame. `time` is the frame's own time (seconds), not the time that was asked for."""

    time: float
    pixels: np.ndarray = field(repr=False)
    key: str
    """Names the content (file identity, pts, size): equal keys mean equal pixels."""


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    frame: Frame


@dataclass(frozen=True)
class VideoPart:
    """A whole video handed to the model as it is (rows of training data); the episode itself uses frames."""

    path: str


Part: TypeAlias = "TextPart | ImagePart | VideoPart"


@dataclass(frozen=True)
class Message:
    role: Role
    content: tuple[Part, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(part.frame for part in self.content if isinstance(part, ImagePart))


@dataclass(frozen=True)
class ToolCall:
    """A call that can run. `arguments` are normalised by the tool (times are floats, in seconds)."""

    name: str
    arguments: Mapping[str, Any]
    repaired: bool = False
    """True if the text was not the canonical form (quotes, python style, a missing tag, clock times ...)."""


@dataclass(frozen=True)
class BadToolCall:
    """A call that cannot run. It gets an error reply in its place; it is never dropped."""

    raw: str
    error: str


@dataclass(frozen=True)
class Turn:
    """One assistant turn as parsed, the forced prefix included. See `paravt.turns.parse_turn`."""

    text: str
    think: str | None
    calls: tuple[ToolCall | BadToolCall, ...]
    answer: str | None
    strict: bool

    @property
    def runnable(self) -> tuple[ToolCall, ...]:
        return tuple(call for call in self.calls if isinstance(call, ToolCall))


@dataclass(frozen=True)
class Usage:
    """What one request to an engine cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed again."""


@dataclass(frozen=True)
class Segment:
    """The tokens that one step adds to a sequence."""

    ids: tuple[int, ...]
    sampled: bool
    text: str
    """What `ids` spell. For engines without token ids this is all there is, and `ids` is empty."""
    logprobs: tuple[float, ...] | None = None
    """The sampler's log-probabilities, one per id; None where nothing was sampled (or none were given)."""
    images: tuple[Frame, ...] = ()
    """The frames behind the image placeholders of `ids`, in their order."""
    policy_version: int | None = None
    usage: Usage | None = None
    """Of the request that sampled it."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.ids)} ids")
        if self.sampled and self.images:
            raise ValueError("a sampled segment has no images")


@dataclass(frozen=True)
class Trace:
    """An append-only list of segments. Concatenation is what the model saw; nothing is ever re-rendered."""

    name: str
    """"main", or "crop/<turn>/<call>" for a sub-agent."""
    role: TraceRole
    segments: tuple[Segment, ...] = ()
    stop_reason: StopReason | None = None
    seconds: float = 0.0
    """Wall time spent in the engine."""

    def append(self, segment: Segment) -> Trace:
        return replace(self, segments=(*self.segments, segment))

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(segment.ids for segment in self.segments))

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True at sampled tokens, aligned with `ids`."""
        return tuple(chain.from_iterable(repeat(segment.sampled, len(segment.ids)) for segment in self.segments))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Behaviour log-probabilities aligned with `ids`; 0.0 where nothing was sampled."""
        out: list[float] = []
        for segment in self.segments:
            out.extend(segment.logprobs if segment.logprobs is not None else [0.0] * len(segment.ids))
        return tuple(out)

    @property
    def images(self) -> tuple[Frame, ...]:
        return tuple(frame for segment in self.segments for frame in segment.images)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens over all requests: a context that is sent again counts again, as endpoints bill it."""
        return sum(segment.usage.prompt_tokens for segment in self.segments if segment.usage is not None)

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.usage.completion_tokens for segment in self.segments if segment.usage is not None)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)


@dataclass(frozen=True)
class Sample:
    """A question about a video."""

    id: str
    video: str
    question: str
    options: tuple[str, ...] = ()
    answer: str | None = None
    type: AnswerType = "open"
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """A stretch of the video, in seconds; 0 <= start_time < end_time."""

    start_time: float
    end_time: float


@dataclass(frozen=True)
class Crop:
    """One tool call of the main agent and what became of it."""

    turn: int
    index: int
    """Position among the calls of its turn."""
    status: CallStatus
    call: ToolCall | BadToolCall
    window: Window | None
    """The window that was read, clamped to the video; None if none was."""
    report: str | None
    """The sub-agent's text; None unless it ran."""
    trace: Trace | None
    frame_times: tuple[float, ...] = ()
    missing: tuple[str, ...] = ()
    """A reason for each frame of the window that could not be had."""
    error: str | None = None
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.status in ("ran", "repaired")


@dataclass(frozen=True)
class EpisodeError:
    """A failure inside an episode: data, not a crash. `kind` is one of the codes in `paravt.errors`."""

    kind: str
    where: str
    message: str
    scored: bool
    """False if the failure leaves the episode unscored (decode, engine, transport): failed is not wrong."""


@dataclass(frozen=True)
class Score:
    """`value` is None while unscored: the attempt failed (decode, engine, judge), which is not being wrong."""

    value: float | None
    answer: str | None = None
    explanation: str = ""

    @classmethod
    def unscored(cls, explanation: str) -> Score:
        return cls(None, None, explanation)

    @property
    def scored(self) -> bool:
        return self.value is not None


@dataclass(frozen=True)
class Episode:
    """One attempt of the agent at one sample."""

    sample: Sample
    frame_budget: int
    """K, the number of overview frames asked for."""
    dispatch: Dispatch
    main: Trace
    turns: tuple[Turn, ...]
    crops: tuple[Crop, ...]
    answer: str | None
    end: EndReason = "answered"
    """Why the agent's own turns ended: an answer, a turn without call or answer, no turns or no tokens left, a
    failure. A forced final turn may have followed."""
    forced: bool = False
    """True if the last turn was a forced final one (never strict)."""
    duration: float = 0.0
    """Of the video, in seconds."""
    overview_times: tuple[float, ...] = ()
    rewards: Mapping[str, Score] = field(default_factory=dict)
    errors: tuple[EpisodeError, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by part: overview, main, crops, total."""

    @property
    def traces(self) -> tuple[Trace, ...]:
        return (self.main, *(crop.trace for crop in self.crops if crop.trace is not None))

    @property
    def scored(self) -> bool:
        return all(error.scored for error in self.errors)

    @property
    def tool_calls(self) -> int:
        """Executed calls: the summand of kappa."""
        return sum(crop.ran for crop in self.crops)


@dataclass(frozen=True, eq=False)
class Row:
    """What the learner eats: one trace with per-token credit. Arrays have length T, the trace's length."""

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    images: tuple[Frame, ...]
    group_id: str
    episode_id: str
    role: TraceRole
    policy_version: int
