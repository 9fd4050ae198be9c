"""MLVU dev, its seven multiple-choice tasks. Answers are letters or texts of options, as the copy has it.

The hub's copy has the options in the question as well; the authors' files (`json/1_plotQA.json` and so on) do not,
and name videos that only their folder tells apart. Some rows have an answer that is none of the options, or one
that is two of them: these have no gold answer. The official M-Avg is the mean over tasks, most others' is over rows.
"""

from __future__ import annotations

from paravt.bench.base import Benchmark
from paravt.bench.rows import BadRow, Item, Question, split_options, without_labels

_RENAMED = {"findNeedle": "needle"}


def _questions(item: Item) -> list[Question]:
    stem, listed = split_options(item.text("question"))
    options = without_labels(item.texts("candidates")) if item.values.get("candidates") else listed
    if not options:
        raise BadRow("no `candidates`")
    task = item.text("task_type", "question_type")
    task = _RENAMED.get(task, task)
    name = item.text("video_name", "video")
    official = item.values.get("video_name") is None
    return [
        Question(
            id=item.maybe("question_id") or f"{task}_{item.number}",
            video=f"{item.table}/{name}" if official else name,
            text=stem,
            options=options,
            gold=item.text("answer"),
            gold_may_be_text=True,
            metadata={"task_type": task},
        )
    ]


MLVU = Benchmark(
    name="mlvu",
    title="MLVU dev",
    hub_id="sy1998/MLVU_dev",
    rows=2174,
    videos=None,
    tables=(
        "mlvu/test-*.parquet",
        "test-*.parquet",
        "data/test-*.parquet",
        "json/[1-7]_*.json",
        "MLVU/json/[1-7]_*.json",
        "[1-7]_*.json",
    ),
    folder="",
    questions=_questions,
    breakdown=("task_type",),
    macro="task_type",
)
