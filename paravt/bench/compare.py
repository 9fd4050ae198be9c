"""Two runs on the same questions: the paired difference, how certain it is, and which rows flipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from paravt.bench.intervals import Interval, bootstrap, mcnemar
from paravt.bench.results import Key, Run, question_hash
from paravt.bench.scoring import Verdict
from paravt.bench.summary import measure, verdicts
from paravt.types import AnswerType, Sample


@dataclass(frozen=True)
class Flip:
    """A question that one run gets right and the other does not."""

    bench: str
    id: str
    question: str
    reference: str | None
    one: str | None
    """The answer of the first run; None if it gave none that can be understood."""
    other: str | None
    direction: Literal["gained", "lost"]
    """By the second run."""


@dataclass(frozen=True)
class Comparison:
    """Of the rows of one type of one benchmark that neither run failed on. `difference` is second minus first."""

    bench: str
    type: AnswerType
    measure: str
    pairs: int
    one: float
    other: float
    difference: float
    interval: Interval | None
    """Of the difference, 95 %, whole videos resampled."""
    gained: int
    lost: int
    p: float
    """McNemar's exact test on right and not right."""
    failed: int
    """Common questions left out because one of the runs, or both, failed on them."""
    alone: int
    """Questions that only one of the runs has played, or each with another text or reference."""
    flips: tuple[Flip, ...]


def compare(one: Run, other: Run) -> list[Comparison]:
    """For each benchmark and type that both have rows of. Questions are paired by id; one whose text, options or
    reference answer differ between the runs is not the same question. Open answers are compared by the judge's grades
    if both runs have them of the same judge, or else by token F1."""
    if one.judge != other.judge:
        one, other = replace(one, judge=None), replace(other, judge=None)
    runs = (verdicts(one), verdicts(other))
    common = {key for key in runs[0].keys() & runs[1].keys() if _same(one.samples[key], other.samples[key])}
    groups: dict[tuple[str, AnswerType], list[Key]] = {}
    for key, sample in one.samples.items():
        if key in common:
            groups.setdefault((key[0], sample.type), []).append(key)
    out = []
    for (bench, kind), keys in groups.items():
        alone = sum(
            key[0] == bench and run.samples[key].type == kind and key not in common
            for run in (one, other)
            for key in run.results
        )
        rows = [(one.samples[key], runs[0][key], runs[1][key]) for key in keys]
        if (comparison := _compare(bench, kind, measure(one, kind), rows, alone)) is not None:
            out.append(comparison)
    return out


def _same(one: Sample, other: Sample) -> bool:
    return one.answer == other.answer and question_hash(one) == question_hash(other)


def _compare(
    bench: str, kind: AnswerType, measure: str, rows: Sequence[tuple[Sample, Verdict, Verdict]], alone: int
) -> Comparison | None:
    pairs = [
        (row, value, other)
        for row in rows
        if (value := row[1].value) is not None and (other := row[2].value) is not None
    ]
    if not pairs:
        return None
    flips = tuple(
        Flip(
            bench=bench,
            id=sample.id,
            question=sample.question,
            reference=sample.answer,
            one=first.answer,
            other=second.answer,
            direction="gained" if second.outcome == "right" else "lost",
        )
        for (sample, first, second), _, _ in pairs
        if (first.outcome == "right") != (second.outcome == "right")
    )
    gained = sum(flip.direction == "gained" for flip in flips)
    differences = [other - value for _, value, other in pairs]
    return Comparison(
        bench=bench,
        type=kind,
        measure=measure,
        pairs=len(pairs),
        one=fmean(value for _, value, _ in pairs),
        other=fmean(other for _, _, other in pairs),
        difference=fmean(differences),
        interval=bootstrap(differences, [row[0].video for row, _, _ in pairs]),
        gained=gained,
        lost=len(flips) - gained,
        p=mcnemar(len(flips) - gained, gained),
        failed=sum("failed" in (first.outcome, second.outcome) for _, first, second in rows),
        alone=alone,
        flips=flips,
    )
