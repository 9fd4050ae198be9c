"""LongVideoBench, validation: the right choice is a number, options are padded with "N/A".

Only the padding at the end is taken off: an option "N/A" between others would shift the letters.
"""

from __future__ import annotations

from dataclasses import replace

from paravt.answers import LETTERS
from paravt.bench.base import Benchmark
from paravt.bench.rows import BadRow, Item, Question

_MOST = 5
_KEYS = ("duration_group", "question_category", "topic_category", "level")


def _questions(item: Item) -> list[Question]:
    if isinstance(item.values.get("candidates"), list):
        options = list(item.texts("candidates"))
    else:
        options = [item.maybe(f"option{number}") or "" for number in range(_MOST)]
    while options and options[-1].strip() in ("", "N/A"):
        options.pop()
    if not options:
        raise BadRow("no options")
    right = item.number_of("correct_choice")
    has_offset = item.values.get("starting_timestamp_for_subtitles") is not None
    return [
        Question(
            id=item.text("id"),
            video=item.text("video_path"),
            text=item.text("question"),
            options=tuple(options),
            gold=LETTERS[int(right)] if right in range(len(LETTERS)) else f"{right:g}",
            metadata={key: item.maybe(key) for key in _KEYS},
            subtitles=item.maybe("subtitle_path"),
            subtitles_offset=item.number_of("starting_timestamp_for_subtitles") if has_offset else 0.0,
        )
    ]


LONGVIDEOBENCH = Benchmark(
    name="longvideobench",
    title="LongVideoBench",
    hub_id="longvideobench/LongVideoBench",
    rows=1337,
    videos=None,
    tables=("validation-*.parquet", "data/validation-*.parquet", "*/validation-*.parquet", "lvb_val.json"),
    folder="videos",
    questions=_questions,
    breakdown=_KEYS[:3],
)
LONGVIDEOBENCH_SUBTITLES = replace(
    LONGVIDEOBENCH, name="longvideobench_subtitles", title="LongVideoBench (w/ subtitles)", subtitles=True
)
