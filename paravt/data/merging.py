"""From one call after the other to several in one turn: which calls of a trace did not depend on each other.

A call depends on those before it if its window overlaps one of theirs (it looks closer at what was seen), or if the
thought before it uses a word that only their reports can have told. Calls in a row that depend on nothing in the same
row become one turn. Thoughts that speak of what was seen are left out of it: there, nothing has been seen yet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paravt.rewards import answer_tokens
from paravt.turns import render_call
from paravt.types import Window


@dataclass(frozen=True)
class Look:
    """A window that was watched, and what was reported of it."""

    window: Window
    report: str


@dataclass(frozen=True)
class Step:
    """A turn that calls."""

    think: str
    looks: tuple[Look, ...]


_BACK = re.compile(
    r"\b(?:reports?|reported|showed|shown|saw|seen|found|previous|previously|earlier|already|result|results|nothing"
    r"|confirms?|confirmed|above|so far|instead|still)\b",
    re.IGNORECASE,
)
_LITTLE = """about after also before between check clip could first frame frames from have into last look looks more
most need needs next part person scene second seconds segment should show shows someone something that their them then
there these they this those video watch what when where which while will window windows with would"""
_COMMON = frozenset(_LITTLE.split())
"""Words that say nothing."""
_SHORTEST = 4
"""Characters of a word that says something."""


def merge_steps(steps: Sequence[Step], question: str) -> list[Step]:
    """The same looks in as few turns as what depends on what allows; reports stay with their windows."""
    merged: list[Step] = []
    for step in steps:
        if merged and not _depends(step, merged[-1], question):
            merged[-1] = _joined(merged[-1], step)
        else:
            merged.append(step)
    return merged


def _depends(step: Step, before: Step, question: str) -> bool:
    overlaps = any(
        look.window.start_time < other.window.end_time and other.window.start_time < look.window.end_time
        for look in step.looks
        for other in before.looks
    )
    told = _words(" ".join(look.report for look in before.looks)) - _words(question) - _words(before.think)
    return overlaps or bool(told & _words(step.think))


def _words(text: str) -> set[str]:
    return {word for word in answer_tokens(text) if len(word) >= _SHORTEST and not word[0].isdigit()} - _COMMON


def _joined(before: Step, step: Step) -> Step:
    think = before.think
    if step.think and step.think not in think.splitlines() and not _BACK.search(step.think):
        think = f"{think}\n{step.think}" if think else step.think
    return replace(before, think=think, looks=(*before.looks, *step.looks))


def render_step(step: Step) -> str:
    """The turn as a strict one."""
    windows = (look.window for look in step.looks)
    calls = (render_call("crop_video", {"start_time": w.start_time, "end_time": w.end_time}) for w in windows)
    return f"<think>\n{step.think}\n</think>\n" + "\n".join(calls)
