"""The one protocol between the agent and whatever runs the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from paravt.types import Frame, Message, Segment, StopReason, Usage


@dataclass(frozen=True)
class Prompt:
    """Everything the model has seen so far, in both forms: engines take what they need.

    `ids` with expanded image placeholders and `images` in placeholder order are exact; `messages` are for engines
    that speak to a chat endpoint. `trace` names the trace that asks ("main", "crop/0/2", ...); it and `episode`, a
    number that all of an episode's prompts share, name the conversation that this is a turn of.
    """

    ids: tuple[int, ...]
    images: tuple[Frame, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    trace: str = "main"
    episode: int = 0


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. Log-probabilities are of the distribution sampled from (banned ids at -inf, logits / T;
    at T = 0 of the untempered one)."""

    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that may end a turn. A hint: chat servers stop there and leave the text out, other engines go on."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"max_tokens must be >= 1 and temperature >= 0, got {self}")


@dataclass(frozen=True)
class Completion:
    """`ids` include the end-of-turn token if it was sampled; `text` is what they spell."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None
    stop_reason: StopReason
    policy_version: int
    usage: Usage


class ChatFormat(Protocol):
    """How an engine wants conversations rendered. See `paravt.chat`."""

    frame_factor: int
    """Sides of frames are multiples of this."""
    max_pixels: int
    """Frames are at most this large (width x height)."""
    takes_prefix: bool
    """Can the header of an assistant turn be given a forced prefix?"""

    @property
    def end_id(self) -> int | None:
        """The end-of-turn token; None for engines without ids."""

    @property
    def context_limit(self) -> int | None:
        """Tokens that the model can take at all; None if unknown."""

    def open(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), prefix: str = ""
    ) -> Segment: ...

    def reply(self, messages: Sequence[Message], closed: bool, prefix: str = "") -> Segment: ...

    def clean(self, text: str) -> str: ...

    def check(self, completion: Completion) -> None: ...


class Engine(Protocol):
    """`generate` raises EngineError if the engine failed; a cancelled call frees what it held."""

    @property
    def chat(self) -> ChatFormat: ...

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]: ...

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None: ...

    async def close(self) -> None: ...


def stable_seed(*parts: object) -> int:
    """63 bits from the parts' texts; the same in every process and on every machine (never `hash()`)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
