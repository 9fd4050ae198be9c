"""From an episode to a verdict on its answer. Pure functions: what a model said can be scored again at any time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paravt.rewards import accuracy
from paravt.types import Episode, Score

Outcome = Literal["right", "wrong", "unparsable", "failed", "no_gold"]
"""unparsable: no answer, or one that names no option, several, or no time window; failed: the video, the engine or the
judge did; no_gold: the sample has no reference answer that can be used."""

_HALF = 0.5
"""From here on an answer with a share of the credit (F1, IoU, a judge's grade) is called right."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    value: float | None
    """Credit, 0 to 1: right or not, intersection over union, token F1 or the judge's grade. None if the row failed or
    has no usable reference answer."""
    answer: str | None
    """What was understood: the letter, the window, the text."""
    explanation: str


def verdict(episode: Episode, grade: Score | None = None) -> Verdict:
    """The verdict on an episode's answer; `grade` is what a judge said of an open answer, unscored if it failed.

    One extractor for all modes and types: that of the rewards. What fails is not wrong, and what cannot be parsed is
    neither.
    """
    if not episode.scored:
        error = next(error for error in episode.errors if not error.scored)
        return Verdict("failed", None, None, f"{error.where}: {error.message}")
    rule = accuracy(episode.sample, episode.answer)
    if not rule.scored:
        return Verdict("no_gold", None, episode.answer, rule.explanation)
    if rule.answer is None:
        return Verdict("unparsable", 0.0, None, rule.explanation)
    score = grade if grade is not None and episode.sample.type == "open" else rule
    if score.value is None:
        return Verdict("failed", None, rule.answer, score.explanation)
    return Verdict("right" if score.value >= _HALF else "wrong", score.value, rule.answer, score.explanation)
