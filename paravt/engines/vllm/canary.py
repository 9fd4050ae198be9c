"""The canary: a short greedy completion that a server makes after every update, and the learner scores.

It goes the way that rollouts go, through the encoder, the prefix cache and the head, with a prompt that the server has
seen before the update: what is left of old weights anywhere shows in its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paravt.chat import TokenChat, text_message, timestamp
from paravt.engines.base import Prompt, Sampling
from paravt.types import Frame, ImagePart, Message, Row, TextPart

SAMPLING = Sampling(max_tokens=16, temperature=0.0)


@dataclass(frozen=True)
class Canary:
    """What a server said, or the learner of it."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def scored(self, logprobs_T: np.ndarray) -> Canary:
        """The same ids with the log-probabilities of a row (T,)."""
        return Canary(self.ids, tuple(logprobs_T[-len(self.ids) :].tolist()))


def canary_prompt(chat: TokenChat) -> Prompt:
    """Two frames of noise and a question; the same for every server and every update."""
    draw = np.random.default_rng(0)
    side = chat.frame_factor * (2 if (2 * chat.frame_factor) ** 2 <= chat.max_pixels else 1)
    frames = [
        Frame(float(i), draw.integers(0, 256, (side, side, 3), dtype=np.uint8), f"paravt canary {i}") for i in range(2)
    ]
    shown = [part for frame in frames for part in (TextPart(timestamp(frame.time)), ImagePart(frame))]
    system, question = text_message("system", "Look."), TextPart("What is in these frames?")
    segment = chat.open([system, Message("user", (*shown, question))])
    return Prompt(segment.ids, segment.images, trace="canary")


def canary_row(prompt: Prompt, canary: Canary) -> Row:
    """For the learner."""
    ids = np.array([*prompt.ids, *canary.ids], np.int64)
    mask = np.arange(len(ids)) >= len(prompt.ids)
    logprobs = np.zeros(len(ids))
    logprobs[len(prompt.ids) :] = canary.logprobs
    return Row(ids, mask, logprobs, np.zeros(len(ids)), prompt.images, "canary", "canary", "main", 0)


def difference(canary: Canary, reference: Canary) -> float:
    """The largest |difference of log-probabilities| up to where the two part.

    There both chose the likeliest token: of the same weights, the two are then as likely as each other.
    """
    worst = 0.0
    for token, logprob, wanted, expected in zip(
        canary.ids, canary.logprobs, reference.ids, reference.logprobs, strict=False
    ):
        worst = max(worst, abs(logprob - expected))
        if token != wanted:
            break
    return worst


def distinct(canaries: Sequence[Canary]) -> list[Canary]:
    """One of each sequence of ids, in order: what the learner has to score."""
    return list({canary.ids: canary for canary in canaries}.values())
