"""Two runs on the same questions: the paired difference, how certain it is, and which rows flipped."""

from __future__ import annotations

from collections.abc import Mapping
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
    found, others = verdicts(one), verdicts(other)
    common = [
        key
        for key, sample in one.samples.items()
        if key in found and key in others and _same(sample, other.samples[key])
    ]
    groups: dict[tuple[str, AnswerType], list[Key]] = {}
    for key in common:
        groups.setdefault((key[0], one.samples[key].type), []).append(key)
    paired = set(common)
    out = []
    for (bench, kind), keys in groups.items():
        alone = sum(
            key[0] == bench and run.samples[key].type == kind and key not in paired
            for run in (one, other)
            for key in run.results
        )
        if (comparison := _compare(one, bench, kind, keys, found, others, alone)) is not None:
            out.append(comparison)
    return out


def _same(one: Sample, other: Sample) -> bool:
    return one.answer == other.answer and question_hash(one) == question_hash(other)


def _compare(
    run: Run,
    bench: str,
    kind: AnswerType,
    keys: list[Key],
    found: Mapping[Key, Verdict],
    others: Mapping[Key, Verdict],
    alone: int,
) -> Comparison | None:
    failed = sum("failed" in (found[key].outcome, others[key].outcome) for key in keys)
    pairs = [
        (key, first, second)
        for key in keys
        if (first := found[key].value) is not None and (second := others[key].value) is not None
    ]
    if not pairs:
        return None
    flips = tuple(
        Flip(
            bench=bench,
            id=key[1],
            question=run.samples[key].question,
            reference=run.samples[key].answer,
            one=found[key].answer,
            other=others[key].answer,
            direction="gained" if others[key].outcome == "right" else "lost",
        )
        for key, _, _ in pairs
        if (found[key].outcome == "right") != (others[key].outcome == "right")
    )
    gained = sum(flip.direction == "gained" for flip in flips)
    differences = [second - first for _, first, second in pairs]
    return Comparison(
        bench=bench,
        type=kind,
        measure=measure(run, kind),
        pairs=len(pairs),
        one=fmean(first for _, first, _ in pairs),
        other=fmean(second for _, _, second in pairs),
        difference=fmean(differences),
        interval=bootstrap(differences, [run.samples[key].video for key, _, _ in pairs]),
        gained=gained,
        lost=len(flips) - gained,
        p=mcnemar(len(flips) - gained, gained),
        failed=failed,
        alone=alone,
        flips=flips,
    )
