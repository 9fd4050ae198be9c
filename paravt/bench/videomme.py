"""Video-MME: three questions on each of 900 videos, without subtitles and with them.

Options carry their own labels; they are taken off, since the episode letters options itself. A video is named by
`videoID`, not by `video_id`. Videos without speech have no file of subtitles, which is a fault in name only: the
question is asked without.
"""

from __future__ import annotations

from dataclasses import replace

from paravt.bench.base import Benchmark
from paravt.bench.rows import Item, Question, without_labels

_KEYS = ("duration", "domain", "sub_category", "task_type")


def _questions(item: Item) -> list[Question]:
    video = item.text("videoID")
    return [
        Question(
            id=item.text("question_id"),
            video=f"{video}.mp4",
            text=item.text("question"),
            options=without_labels(item.texts("options")),
            gold=item.text("answer"),
            metadata={key: item.maybe(key) for key in _KEYS},
            subtitles=f"{video}.srt",
        )
    ]


VIDEOMME = Benchmark(
    name="videomme",
    title="Video-MME (w/o subtitles)",
    hub_id="lmms-lab/Video-MME",
    rows=2700,
    videos=900,
    tables=("videomme/test-*.parquet", "test-*.parquet", "data/test-*.parquet"),
    folder="data",
    questions=_questions,
    breakdown=_KEYS,
)
VIDEOMME_SUBTITLES = replace(VIDEOMME, name="videomme_subtitles", title="Video-MME (w/ subtitles)", subtitles=True)
