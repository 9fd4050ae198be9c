"""MMVU validation: 625 questions with five options and 375 with a free answer, which are counted apart.

Published figures that do not say so are about the 625. The video is an address on the hub; what follows "/main/"
is its path in the data set. A copy with `video_path` is read as well.
"""

from __future__ import annotations

from paravt.bench.base import Benchmark
from paravt.bench.rows import BadRow, Item, Question

_DISCIPLINES = {
    "Science": (
        "Astronomy", "Biology", "Chemistry", "Electromagnetism", "Geography", "Materials Science", "Mechanics",
        "Modern Physics", "Neurobiology", "Thermodynamics",
    ),
    "Engineering": (
        "Biomedical Engineering", "Civil Engineering", "Computer Science", "Electrical Engineering",
        "Electronics and Communication", "Mechanical Engineering",
    ),
    "Healthcare": ("Basic Medicine", "Clinical Medicine", "Dentistry", "Pharmacy", "Preventive Medicine"),
    "Humanities & Social Science": ("Art", "Economics", "History", "Law", "Literature", "Management"),
}  # fmt: skip
_DISCIPLINE_OF = {subject: name for name, subjects in _DISCIPLINES.items() for subject in subjects}


def _questions(item: Item) -> list[Question]:
    kind = item.text("question_type")
    if kind not in ("multiple-choice", "open-ended"):
        raise BadRow(f"`question_type` is {kind[:40]!r}")
    video = item.text("video_path", "video").rpartition("/main/")[2].removeprefix("videos/")
    return [
        Question(
            id=item.text("id"),
            video=video,
            text=item.text("question"),
            options=_choices(item) if kind == "multiple-choice" else (),
            gold=item.text("answer"),
            type="choice" if kind == "multiple-choice" else "open",
            metadata=_subject(item, video) | {"question_type": kind},
        )
    ]


def _choices(item: Item) -> tuple[str, ...]:
    """The texts of A, B and so on; empty ones at the end are none."""
    choices = item.values.get("choices")
    if not isinstance(choices, dict):
        raise BadRow("no `choices`")
    texts = [str(choices.get(letter) or "").strip() for letter in "ABCDE"]
    while texts and not texts[-1]:
        texts.pop()
    if len(texts) < 2:
        raise BadRow("`choices` are empty")
    return tuple(texts)


def _subject(item: Item, video: str) -> dict[str, str | None]:
    """Subject and discipline; a copy without `metadata` has the subject as the video's folder, with underscores."""
    about = item.values.get("metadata")
    subject = about.get("subject") if isinstance(about, dict) else item.values.get("subject")
    if not isinstance(subject, str) or not subject.strip():
        subject = video.rpartition("/")[0].rpartition("/")[2]
    subject = subject.replace("_", " ").strip()
    return {"subject": subject or None, "discipline": _DISCIPLINE_OF.get(subject)}


MMVU = Benchmark(
    name="mmvu",
    title="MMVU val",
    hub_id="yale-nlp/MMVU",
    rows=1000,
    videos=583,
    tables=(
        "validation.json",
        "data/validation.json",
        "validation.jsonl",
        "validation-*.parquet",
        "data/validation-*.parquet",
        "*/validation-*.parquet",
    ),
    folder="videos",
    questions=_questions,
    breakdown=("question_type", "discipline", "subject"),
)
