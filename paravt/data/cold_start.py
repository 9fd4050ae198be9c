"""Rows to learn from, made of episodes; and which of many rows are taken. Pure functions.

A row renders to the very tokens that the agent itself would have been shown: its video has exactly K frames, its
replies are one tool turn for each call.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paravt.chat import seconds
from paravt.data.merging import Step
from paravt.engines.base import stable_seed
from paravt.episode_config import EpisodeConfig
from paravt.prompts import fill
from paravt.protocol import PARAVT, Scene
from paravt.rewards import answer_tokens
from paravt.tools import CROP_VIDEO
from paravt.types import Crop, Frame, Sample, TextPart, ToolCall, Window

_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
_MANY_CALLS = 4
"""Rows with as many or more are one cell of the balance."""


def trace_row(
    sample: Sample,
    config: EpisodeConfig,
    overview: Sequence[float],
    steps: Sequence[Step],
    said: Sequence[str],
    clean: Callable[[str], str],
) -> dict[str, Any]:
    """`messages` and `tools` of a main trace. `overview` are the times of its frames (seconds); `said` are the turns,
    one for each step and the one that answers; `clean` takes control tokens out of what the sample says."""
    frames = tuple(Frame(time, _NO_PIXELS, str(time)) for time in overview)
    scene = Scene(sample, config, clean, 0.0, frames)
    system, asked = PARAVT.first(scene)[0]
    text = asked.content[-1]
    assert isinstance(text, TextPart)
    video = {"type": "video_url", "video_url": {"url": _url(sample.video)}, "nframes": config.frame_budget}
    messages = [_turn("system", system.text), {"role": "user", "content": [video, _text(text.text)]}]
    for number, step in enumerate(steps):
        messages.append(_turn("assistant", said[number]))
        crops = [_crop(number, index, look.window, look.report) for index, look in enumerate(step.looks)]
        messages += [
            _turn(message.role, message.text) for message in PARAVT.reply(scene, crops, [()] * len(crops), 1.0)
        ]
    messages.append(_turn("assistant", said[-1]))
    return {"messages": messages, "tools": [CROP_VIDEO.schema]}


def report_row(
    sample: Sample, config: EpisodeConfig, window: Window, said: str, clean: Callable[[str], str]
) -> dict[str, Any]:
    """`messages` of a sub-agent's trace."""
    video = {"type": "video_url", "video_url": {"url": _url(sample.video)}, "video_start": window.start_time,
             "video_end": window.end_time, "fps": config.crop_fps, "max_frames": config.crop_max_frames}  # fmt: skip
    text = fill(config.prompts.crop, start=seconds(window.start_time), end=seconds(window.end_time),
                question=clean(sample.question))  # fmt: skip
    return {"messages": [{"role": "user", "content": [video, _text(text)]}, _turn("assistant", said)]}


def _url(video: str) -> str:
    return video if "://" in video else f"file://{os.path.abspath(video)}"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _crop(turn: int, index: int, window: Window, report: str) -> Crop:
    call = ToolCall("crop_video", {"start_time": window.start_time, "end_time": window.end_time})
    return Crop(turn, index, "ran", call, window, report, None)


# ---------------------------------------------------------------------------------------------------- which of them


def trace_key(sample: Sample, steps: Sequence[Step], answer: str) -> str:
    """Traces with the same key say the same: the same question about the same video, the same windows to the second,
    the same answer, whatever the thoughts."""
    windows = sorted((round(w.start_time), round(w.end_time)) for step in steps for w in (k.window for k in step.looks))
    asked = " ".join(answer_tokens(sample.question)), sample.options
    return repr((sample.video, asked, [len(step.looks) for step in steps], windows, answer_tokens(answer)))


def balance(rows: Sequence[Mapping[str, Any]], skew: float, count: int | None, seed: int) -> list[int]:
    """The numbers of the rows that are taken, in order. A cell is a type of answer and a number of calls (4 stands for
    more). No cell has more than `skew` times the rows of the median cell; `count` rows at most are taken, dealt out
    evenly over the cells. Which ones of a cell follows from their ids and the seed."""
    cells: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        cells[str(row["type"]), min(int(row["calls"]), _MANY_CALLS)].append(number)
    if not cells:
        return []
    most = max(1, round(skew * statistics.median(map(len, cells.values()))))
    for members in cells.values():
        members.sort(key=lambda number: stable_seed(seed, "balance", rows[number]["id"]))
        del members[most:]
    return sorted(_dealt(list(cells.values()), count))


def _dealt(cells: Sequence[Sequence[int]], count: int | None) -> Iterable[int]:
    """One of each cell after the other, until there are enough."""
    rounds = max(map(len, cells))
    dealt = [cell[n] for n in range(rounds) for cell in cells if n < len(cell)]
    return dealt if count is None else dealt[:count]


def cell_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Rows by type and number of calls, for a summary."""
    return dict(sorted(Counter(f"{row['type']}/{row['calls']}" for row in rows).items()))
