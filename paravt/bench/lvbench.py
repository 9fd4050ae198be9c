"""LVBench: 103 videos of more than an hour on average. The options are lines of the question.

The data set on the hub has one row for each question, in a split `train` whatever its card says; the file of the
authors has one line for each video, with its questions. A question can be of several types and counts for each.
"""

from __future__ import annotations

from paravt.bench.base import Benchmark
from paravt.bench.rows import BadRow, Item, Question, split_options, without_labels


def _questions(item: Item) -> list[Question]:
    asked = item.values.get("qa")
    if not isinstance(asked, list):
        return [_question(item, item.text("video_path", "key").rpartition("/")[2], item.maybe("type"))]
    video, kind = f"{item.text('key')}.mp4", item.maybe("type")
    if not all(isinstance(one, dict) for one in asked):
        raise BadRow("`qa` is not a list of questions")
    return [_question(Item(one, item.number, item.table), video, kind) for one in asked]


def _question(item: Item, video: str, kind: str | None) -> Question:
    stem, options = split_options(item.text("question"))
    if item.values.get("options"):
        options = without_labels(item.texts("options"))
    if not options:
        raise BadRow("no lines of options in `question`")
    types = item.values.get("question_type")
    return Question(
        id=item.text("uid"),
        video=video,
        text=stem,
        options=options,
        gold=item.text("answer"),
        metadata={
            "question_type": [str(one) for one in types] if isinstance(types, list) else item.maybe("question_type"),
            "type": kind,
            "time_reference": item.maybe("time_reference"),
        },
    )


LVBENCH = Benchmark(
    name="lvbench",
    title="LVBench",
    hub_id="lmms-lab/LVBench",
    rows=1549,
    videos=103,
    tables=("data/train-*.parquet", "train-*.parquet", "video_info.meta.jsonl", "data/video_info.meta.jsonl"),
    folder="",
    questions=_questions,
    breakdown=("question_type", "type"),
)
