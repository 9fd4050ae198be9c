"""A scripted teacher: runs the product's own agent on worlds and yields the traces to learn from."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paravt.agent import EpisodeConfig, run_episode
from paravt.answers import LETTERS
from paravt.chat import TokenChat, text_message, timestamp
from paravt.engines.base import stable_seed
from paravt.engines.scripted import ScriptedEngine, Step
from paravt.lab.questions import FAMILIES, Family, Question, question, report
from paravt.lab.world import (
    CELL,
    DISTRACTORS,
    DURATION,
    FPS,
    GLYPHS,
    GROUNDS,
    VARIANTS,
    WorldReader,
    still,
    world,
)
from paravt.prompts import Prompts
from paravt.protocol import timestamped
from paravt.tools import CROP_VIDEO
from paravt.turns import render_call
from paravt.types import Dispatch, Episode, Message, Segment, TextPart, Trace
from paravt.video import overview_times, window_times

Kind = Literal["parallel", "direct", "sequential", "none", "crop", "look", "conclude"]
Style = Literal["clean", "plain", "sloppy"]


@dataclass(frozen=True)
class Manner:
    """How well a teacher keeps the format: chances of each way to write a turn."""

    think_closed: float
    answer_closed: float
    answer_opened: float
    """And not closed; otherwise the answer has no tags at all."""
    code: float
    """Of a call written as python in `<tool_code>`."""
    code_closed: float = 1.0
    code_closed_wrong: float = 0.0
    """With `</tool_call>`."""
    whole_ranges: float = 0.0
    """Of one window for a range of 32 s, in which an event of 1 s can be missed, in place of two."""


MANNERS: Mapping[Style, Manner] = {
    "clean": Manner(1, 1, 0, 0),
    "plain": Manner(0.93, 0.93, 0.03, 0, whole_ranges=0.5),
    # a strong habit of calling, in the wrong notation more often than not, and tags that come and go
    "sloppy": Manner(0.4, 0.35, 0.25, 0.7, 0.6, 0.2, whole_ranges=0.7),
}


@dataclass(frozen=True)
class Mixture:
    """Shares of the kinds of traces, and what they are about."""

    kinds: Mapping[Kind, float]
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Frames K of an overview."""
    style: Style = "clean"
    families: Mapping[Family, float] | None = None
    """Of questions; None: the default mix."""
    choice: float = 0.25
    crop_frames: tuple[int, ...] = (16,)
    """Frames of the windows in traces of kind "crop"."""
    look_frames: tuple[int, ...] = (4,)
    """Frames in traces of kind "look"."""
    questions: int = 1
    """Of a trace of kind "direct" or "none", about one and the same video: where to look is learned sooner from
    several. Also of a trace of kind "conclude"."""


def script(
    asked: Question,
    kind: Kind,
    frame_budget: int,
    video: str,
    style: Style = "clean",
    draw: random.Random | None = None,
) -> dict[str, list[Step]]:
    """What an ideal policy of this style says, by trace: every range is watched, and the reports are true.

    "direct" and "none" answer from the overview, and guess what it does not show.
    """
    draw = draw or random.Random(0)
    manner = MANNERS[style]
    if kind in ("direct", "none"):
        seen = _seen(asked, video, overview_times(DURATION, frame_budget))
        return {"main": [_answer(asked, seen, draw, manner)]}
    windows = [
        window
        for start, end in asked.ranges
        for window in (
            [(start, end)] if draw.random() < manner.whole_ranges else [(a, a + CELL) for a in range(start, end, CELL)]
        )
    ]
    reports = [report(video, window_times(*window)) for window in windows]
    seen = _seen(asked, video, [t for window in windows for t in window_times(*window)])
    answer = _answer(asked, seen, draw, manner)
    if kind == "parallel":
        steps: dict[str, list[Step]] = {f"crop/0/{i}": [" " + text] for i, text in enumerate(reports)}
        return {"main": [_calls(asked.ranges, windows, draw, manner), answer], **steps}
    steps = {f"crop/{i}/0": [" " + text] for i, text in enumerate(reports)}
    return {"main": [*(_calls([window], [window], draw, manner) for window in windows), answer], **steps}


def _seen(asked: Question, video: str, times: Sequence[float]) -> list[str | None]:
    """For each range the glyph that the frames of these times (seconds) show, or None."""
    shown = world(video)
    return [next(iter(shown.visible(times, *part)), None) for part in asked.ranges]


def _calls(
    ranges: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], draw: random.Random, manner: Manner
) -> str:
    text = "<think>\nI watch " + ", ".join(f"{a} to {b}" for a, b in ranges) + "."
    text += "\n</think>\n" if draw.random() < manner.think_closed else "\n"
    calls = []
    for a, b in windows:
        if draw.random() >= manner.code:
            calls.append(render_call("crop_video", {"start_time": a, "end_time": b}))
            continue
        call, end = f"<tool_code>\ncrop_video(start_time={a}, end_time={b})\n", draw.random()
        right, wrong = manner.code_closed, manner.code_closed + manner.code_closed_wrong
        calls.append(call + ("</tool_code>" if end < right else "</tool_call>" if end < wrong else ""))
    return text + "\n".join(calls)


def _answer(asked: Question, seen: Sequence[str | None], draw: random.Random, manner: Manner) -> str:
    return _listing(asked, seen) + _ending(asked, seen, draw, manner)


def _listing(asked: Question, seen: Sequence[str | None]) -> str:
    """What was seen in each range, and where one glyph is asked for, whether it is that one."""
    parts = []
    for (start, end), glyph in zip(asked.ranges, seen, strict=True):
        mark = "" if len(asked.glyphs) != 1 else " yes" if glyph in asked.glyphs else " no"
        parts.append(f"{start} to {end} {glyph or 'nothing'}{mark}")
    named = f"For {asked.glyphs[0]}: " if len(asked.glyphs) == 1 else ""
    return "<think>\n" + named + ", ".join(parts) + "."


def _ending(asked: Question, seen: Sequence[str | None], draw: random.Random, manner: Manner) -> str:
    """What follows from it."""
    answer = conclude(asked, seen, draw)
    text = ""
    if asked.sample.options:
        # one option after the other until it is the right one: easier for a small model than finding its letter
        at = asked.sample.options.index(answer)
        walked = zip(LETTERS, asked.sample.options[: at + 1], strict=False)
        text += f" {answer}: " + ", ".join(f"{letter} {option}" for letter, option in walked) + "."
        answer = LETTERS[at]
    text += "\n</think>\n" if draw.random() < manner.think_closed else "\n"
    tags = draw.random()
    if tags < manner.answer_closed:
        return f"{text}<answer> {answer}</answer>"
    return f"{text}<answer> {answer}" if tags < manner.answer_closed + manner.answer_opened else f"{text} {answer}"


def conclude(asked: Question, seen: Sequence[str | None], draw: random.Random) -> str:
    """The answer that follows from what was seen in each range, or else a guess (options: their text)."""
    glyphs = [glyph for glyph in seen if glyph is not None]
    options = asked.sample.options
    if asked.family == "what":
        return glyphs[0] if glyphs else draw.choice(options or GLYPHS)
    if asked.family == "both":
        return ", ".join(glyph or draw.choice(GLYPHS) for glyph in seen)
    if asked.family == "count":
        return str(glyphs.count(asked.glyphs[0]))
    if asked.family == "first":
        return min(asked.glyphs, key=lambda glyph: glyphs.index(glyph) if glyph in glyphs else len(glyphs))
    if asked.family == "odd":
        possible = [glyph for glyph in glyphs if glyphs.count(glyph) == 1 and glyph in (options or GLYPHS)]
        return draw.choice(possible or options or GLYPHS)
    unseen = [part for part, glyph in zip(asked.ranges, seen, strict=True) if glyph is None]
    hits = [part for part, glyph in zip(asked.ranges, seen, strict=True) if glyph == asked.glyphs[0]]
    start, end = hits[0] if hits else draw.choice(unseen or asked.ranges)
    return f"{start} - {end}"


def glances(video: str, frames: int, draw: random.Random) -> list[tuple[int, int]]:
    """Two windows (seconds) of `frames` pictures, one a second: in the first one there is something to see, in the
    second one there is not. One of them, if a video has no other."""
    shown = world(video)
    starts = range(0, DURATION - frames + 1, CELL if frames == CELL else 1)
    seen = [bool(shown.visible(window_times(a, a + frames))) for a in starts]
    return [
        (a, a + frames)
        for wanted in (True, False)
        if any(found == wanted for found in seen)
        for a in [draw.choice([a for a, found in zip(starts, seen, strict=True) if found == wanted])]
    ]


def play(asked: Question, chat: TokenChat, config: EpisodeConfig, steps: dict[str, list[Step]]) -> Episode:
    """The product's episode with what `script` says. Raises RuntimeError if it has an error."""
    done = asyncio.run(run_episode(asked.sample, ScriptedEngine(chat, steps), config, reader=WorldReader()))
    if done.errors:
        raise RuntimeError(f"the teacher's own episode failed: {done.errors[0]}")
    return done


def look(chat: TokenChat, frames: int, draw: random.Random) -> Trace:
    """Frames of random content and times, and for each of the times, in another order, what its frame shows.

    Reading many times out of one overview teaches where to look sooner than one question about it does.
    """
    times = sorted(draw.sample(range(DURATION), frames))
    contents = []
    for _ in times:
        drawn = draw.choice(GLYPHS) if draw.random() < 0.7 else draw.choice((None, None, *DISTRACTORS))
        contents.append((draw.choice(tuple(GROUNDS)), drawn))
    shown = [still(t, *content, draw.randrange(VARIANTS)) for t, content in zip(times, contents, strict=True)]
    trace = Trace("main", "main", stop_reason="stop")
    trace = trace.append(chat.open([Message("user", (*timestamped(shown), TextPart("Read the frames.")))]))
    for at in draw.sample(range(frames), frames):
        ground, drawn = contents[at]
        said = f" {ground} {drawn if drawn in GLYPHS else 'nothing'}"
        trace = trace.append(_segment(chat, timestamp(times[at]), sampled=False))
        trace = trace.append(_segment(chat, said, sampled=True))
    return trace


def conclusions(chat: TokenChat, mixture: Mixture, video: str, draw: random.Random) -> Trace:
    """Questions one after the other without a video, each with what was seen; only what follows from it is learned."""
    trace = Trace("main", "main", stop_reason="stop")
    for number in range(mixture.questions):
        asked = question(f"{video}-{number}", 0, families=mixture.families or FAMILIES, choice=mixture.choice)
        sample = asked.sample
        options = [f"{letter}. {text}" for letter, text in zip(LETTERS, sample.options, strict=False)]
        message = text_message("user", "\n".join([f"Question: {sample.question}", *options]))
        trace = trace.append(chat.reply([message], closed=True) if number else chat.open([message]))
        seen = [world(asked.sample.video).events[scene].shows for scene in asked.scenes]
        for piece in re.split("( yes| no\\b)", _listing(asked, seen)):
            if piece:
                trace = trace.append(_segment(chat, piece, sampled=piece in (" yes", " no")))
        ending = _ending(asked, seen, draw, MANNERS[mixture.style])
        trace = trace.append(_segment(chat, f"{ending}<|im_end|>", sampled=True))
    return trace


def _segment(chat: TokenChat, text: str, sampled: bool) -> Segment:
    return Segment(tuple(chat.tokenizer.encode(text, add_special_tokens=False)), sampled, text)


def traces(chat: TokenChat, mixture: Mixture, seed: int) -> Iterator[Trace]:
    """Endless traces, always the same for the same seed.

    A "crop" episode yields the traces of two sub-agents, the others yield the main trace alone: sub-agents see the
    same in every mode, and most of their windows are empty, which is soon learned.
    """
    draw = random.Random(stable_seed("traces", seed))
    number = 0
    while True:
        number += 1
        video = f"world-{seed}-{number}"
        kind = draw.choices(list(mixture.kinds), list(mixture.kinds.values()))[0]
        if kind == "look":
            yield look(chat, draw.choice(mixture.look_frames), draw)
            continue
        if kind == "conclude":
            yield conclusions(chat, mixture, video, draw)
            continue
        asked = question(video, 0, families=mixture.families or FAMILIES, choice=mixture.choice)
        budget = draw.choice(mixture.budgets)
        if kind != "crop":
            dispatch: Dispatch = "parallel" if kind == "direct" else kind
            config = EpisodeConfig(frame_budget=budget, dispatch=dispatch, call_timeout=None, force_answer=False)
            trace = play(asked, chat, config, script(asked, kind, budget, video, mixture.style, draw)).main
            if kind in ("direct", "none"):
                for again in range(1, mixture.questions):
                    other = question(video, again, families=mixture.families or FAMILIES, choice=0)
                    (said,) = script(other, kind, budget, video, mixture.style, draw)["main"]
                    trace = trace.append(chat.reply([text_message("user", f"Question: {other.sample.question}")], True))
                    trace = trace.append(_segment(chat, f"{said}<|im_end|>", sampled=True))
            yield trace
            continue
        windows = glances(video, draw.choice(mixture.crop_frames), draw)
        steps: dict[str, list[Step]] = {
            f"crop/0/{i}": [" " + report(video, window_times(*window))] for i, window in enumerate(windows)
        }
        steps["main"] = [_calls(windows, windows, draw, MANNERS["clean"]), "<answer>.</answer>"]
        config = EpisodeConfig(frame_budget=1, call_timeout=None, force_answer=False)
        yield from (c.trace for c in play(asked, chat, config, steps).crops if c.trace is not None)


def phrases(chat: TokenChat) -> list[str]:
    """Texts that are the same in many traces: the prompts' fixed parts, the tools block, calls, timestamps."""
    header = chat.open([text_message("system", "."), text_message("user", ".")], [CROP_VIDEO.schema]).text
    call = render_call("crop_video", {"start_time": 0, "end_time": 1})
    times = [timestamp(index / FPS) for index in range(DURATION * FPS)]
    return [
        *Prompts().fixed_phrases(), *header.split("."), *re.split(r"\d", call), "crop_video(start_time=", ", end_time=",
        *times,
    ]  # fmt: skip
