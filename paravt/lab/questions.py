"""Questions about the lab's videos.

Families, by what is asked of one or several scenes (ranges of 32 s):

    what    "What appears between 32 and 64 seconds?"                                     one range
    both    "What appears between 0 and 32 seconds, and what between 64 and 96 seconds?"  two glyphs
    first   "Which comes first between 0 and 96 seconds, star or moon?"                   several reports compared
    count   "How many times does star appear between 0 and 96 seconds?"                   several reports counted
    odd     "Which is the odd one out between 0 and 96 seconds?"                          the report unlike the others
    when    "In which 32 seconds between 0 and 128 does star appear?"                     by event, answered by a range

`what`, `first` and `odd` can be asked as multiple choice; `when` is temporal grounding, in parts of 32 s.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paravt.answers import LETTERS
from paravt.engines.base import stable_seed
from paravt.lab.world import CELL, GLYPHS, SCENE, SCENES, world
from paravt.types import AnswerType, Episode, Sample

Family = Literal["what", "both", "first", "count", "odd", "when"]
FAMILIES: Mapping[Family, float] = {"what": 2, "both": 1, "first": 1, "count": 1, "odd": 1, "when": 1}
"""The default mix."""
_OPTIONS = 4


@dataclass(frozen=True)
class Question:
    """A sample with what a teacher needs to know about it."""

    sample: Sample
    family: Family
    scenes: tuple[int, ...]
    """That have to be watched."""
    glyphs: tuple[str, ...] = ()
    """That the question names."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Start and end of each scene, in seconds."""
        return [(scene * SCENE, (scene + 1) * SCENE) for scene in self.scenes]

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Windows (seconds) of a frame a second, in which the events of all ranges are seen for certain."""
        return [(a, a + CELL) for start, end in self.ranges for a in range(start, end, CELL)]


def question(
    video: str, seed: int, path: str | None = None, families: Mapping[Family, float] = FAMILIES, choice: float = 0.25
) -> Question:
    """Question number `seed` about the video of a name; `path` is where its file is, if there is one.

    `families` are shares of the kinds, relative to each other, and `choice` is the share of multiple choice among those
    that can have it. A family that a video has no question of gives way to another one.
    """
    draw = random.Random(stable_seed("question", video, seed))
    shown = [event.shows for event in world(video).events]
    left = dict(families)
    while left:
        family = draw.choices(list(left), list(left.values()))[0]
        made = _ask(draw, family, shown)
        if made is not None:
            return _sample(draw, made, video, seed, path, choice)
        del left[family]
    return _sample(draw, _what(draw, shown), video, seed, path, choice)


@dataclass(frozen=True)
class _Asked:
    family: Family
    text: str
    answer: str
    scenes: tuple[int, ...]
    glyphs: tuple[str, ...] = ()


def _what(draw: random.Random, shown: Sequence[str]) -> _Asked:
    scene = draw.randrange(SCENES)
    return _Asked("what", f"What appears {_between((scene,))}?", shown[scene], (scene,))


def _ask(draw: random.Random, family: Family, shown: Sequence[str]) -> _Asked | None:
    if family == "what":
        return _what(draw, shown)
    if family == "both":
        a, b = sorted(draw.sample(range(SCENES), 2))
        text = f"What appears {_between((a,))}, and what {_between((b,))}?"
        return _Asked("both", text, f"{shown[a]}, {shown[b]}", (a, b))
    count = draw.choice((2, 3)) if family in ("first", "count") else 3
    first = draw.randrange(SCENES - count + 1)
    scenes = tuple(range(first, first + count))
    seen = [shown[scene] for scene in scenes]
    once = [glyph for glyph in dict.fromkeys(seen) if seen.count(glyph) == 1]
    if family == "first":
        pair = draw.sample(sorted(set(seen)), 2) if len(set(seen)) > 1 else []
        if not pair:
            return None
        text = f"Which comes first {_between(scenes)}, {pair[0]} or {pair[1]}?"
        return _Asked("first", text, min(pair, key=seen.index), scenes, tuple(pair))
    if family == "count":
        glyph = draw.choice(seen) if draw.random() < 0.8 else draw.choice(GLYPHS)
        text = f"How many times does {glyph} appear {_between(scenes)}?"
        return _Asked("count", text, str(seen.count(glyph)), scenes, (glyph,))
    if family == "odd":
        if len(set(seen)) != 2:
            return None
        return _Asked("odd", f"Which is the odd one out {_between(scenes)}?", once[0], scenes)
    if not once:
        return None
    glyph = draw.choice(once)
    start = scenes[seen.index(glyph)] * SCENE
    text = f"In which {SCENE} seconds {_between(scenes)} does {glyph} appear?"
    return _Asked("when", text, f"{start} - {start + SCENE}", scenes, (glyph,))


def _between(scenes: Sequence[int]) -> str:
    return f"between {scenes[0] * SCENE} and {(scenes[-1] + 1) * SCENE} seconds"


def _sample(draw: random.Random, asked: _Asked, video: str, seed: int, path: str | None, choice: float) -> Question:
    kind: AnswerType = "temporal" if asked.family == "when" else "open"
    options: tuple[str, ...] = ()
    answer = asked.answer
    if asked.family in ("what", "first", "odd") and draw.random() < choice:
        others = [glyph for glyph in GLYPHS if glyph not in (asked.answer, *asked.glyphs)]
        named = [glyph for glyph in asked.glyphs if glyph != asked.answer]
        wrong = (named + draw.sample(others, _OPTIONS))[: _OPTIONS - 1]
        kind, options = "choice", tuple(draw.sample([asked.answer, *wrong], _OPTIONS))
        answer = LETTERS[options.index(asked.answer)]
    metadata = {"world": video, "family": asked.family, "windows": len(asked.scenes)}
    sample = Sample(f"{video}/{seed}", path or video, asked.text, options, answer, kind, metadata)
    return Question(sample, asked.family, asked.scenes, asked.glyphs)


def report(video: str, times: Sequence[float]) -> str:
    """What a sub-agent that sees the frames of these times (seconds) should say."""
    return ", ".join(world(video).visible(times)) or "nothing"


def true_reports(episode: Episode) -> float | None:
    """The share of an episode's reports that say what the window's frames show; None without reports."""
    video = str(episode.sample.metadata.get("world", episode.sample.video))
    truths = [crop.report == report(video, crop.frame_times) for crop in episode.crops if crop.ran]
    return sum(truths) / len(truths) if truths else None
