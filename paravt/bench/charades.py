"""Charades-STA test: when does an event happen? The answer is a start and an end in seconds.

The times are stored as 16-bit floats: 24.3 reads 24.296875. The shortest decimal that is stored as the same number is
what was meant (beyond 128 s it can be off by 0.1 s, since the numbers that are stored are 1/8 s apart).
"""

from __future__ import annotations

import numpy as np

from paravt.bench.base import Benchmark
from paravt.bench.rows import BadRow, Item, Question, finite


def _questions(item: Item) -> list[Question]:
    times = item.values.get("timestamp")
    if not isinstance(times, (list, tuple)) or len(times) != 2:
        raise BadRow("`timestamp` is not a start and an end")
    seconds = [number for time in times if (number := finite(time)) is not None]
    if len(seconds) != 2:
        raise BadRow("`timestamp` is not two numbers")
    video = item.text("video")
    return [
        Question(
            id=f"{item.number:04d}_{video.rpartition('.')[0] or video}",
            video=video,
            text=f"When does this happen in the video: {item.text('caption').strip()}",
            gold=" - ".join(f"{as_written(time):g}" for time in seconds),
            type="temporal",
        )
    ]


def as_written(time: float) -> float:
    """The decimal that a time was written as, before it was stored as a 16-bit float."""
    stored = np.float16(time)
    return float(np.format_float_positional(stored)) if float(stored) == time else float(time)


CHARADES = Benchmark(
    name="charades",
    title="Charades-STA",
    hub_id="lmms-lab/charades_sta",
    rows=3720,
    videos=None,
    tables=("data/test-*.parquet", "test-*.parquet", "*/test-*.parquet"),
    folder="Charades_v1_480",
    questions=_questions,
)
