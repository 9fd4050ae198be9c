"""The numbers of a run, from its rows alone: no model, no video.

Rows of different types are never mixed into one number: option letters, time windows and free answers of a benchmark
have a block each. Accuracy is over all rows that have a usable reference answer; failed ones are among them, get no
credit, and are counted, and the accuracy without them stands beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from paravt.bench.intervals import Interval, share_interval
from paravt.bench.results import Bench, Key, Result, Run
from paravt.bench.scoring import Outcome, Verdict, verdict
from paravt.files import write_whole
from paravt.rewards import format_strict
from paravt.types import AnswerType, Sample

RECALLS = (0.3, 0.5, 0.7)
_MOST_KINDS = 40
"""Values that a key may have to break down by it, where a benchmark does not name its keys."""
_TYPES: tuple[AnswerType, ...] = ("choice", "temporal", "open")
_MEASURES = {"choice": "accuracy", "temporal": "mIoU", "open": "token F1"}


@dataclass(frozen=True)
class Counts:
    rows: int
    right: int
    wrong: int
    unparsable: int
    failed: int
    no_gold: int

    @property
    def graded(self) -> int:
        """Rows that the accuracy is over."""
        return self.rows - self.no_gold


@dataclass(frozen=True)
class Part:
    """Some rows of a block: those of one duration, category ..."""

    rows: int
    accuracy: float


@dataclass(frozen=True)
class Breakdown:
    parts: Mapping[str, Part]
    macro: float
    """The unweighted mean over the parts."""


@dataclass(frozen=True)
class Block:
    """The rows of one type of one benchmark. Shares are of 1; None where there is nothing to take a mean of."""

    bench: str
    title: str
    type: AnswerType
    measure: str
    """accuracy, mIoU, token F1, or the judge's grade."""
    asked: int
    """Questions; those that were not played yet, or whose video is missing, are among them."""
    counts: Counts
    accuracy: float | None
    interval: Interval | None
    """Of 95 %, whole videos resampled."""
    accuracy_played: float | None
    """Without the failed rows."""
    recalls: Mapping[str, float] | None
    """Of time windows: the share of rows whose intersection over union is at least so large."""
    macro: float | None
    """Where the benchmark has one: the mean over the values of its key."""
    breakdowns: Mapping[str, Breakdown]


@dataclass(frozen=True)
class Tools:
    """Of the rows of a benchmark that did not fail; means per row, shares of rows."""

    rows: int
    calls: float
    """Executed calls (kappa)."""
    rows_with_calls: float
    most_in_a_turn: float
    """Mean of each row's widest turn."""
    bad_calls: float
    turns: float
    strict: float
    """Share of rows whose every turn obeys the format."""
    forced: float
    by_calls: Mapping[str, Part]
    """Accuracy by the number of executed calls."""


@dataclass(frozen=True)
class Cost:
    """Means per question, of the rows that did not fail."""

    prompt_tokens: float
    cached_tokens: float
    """Of the prompt tokens, those that did not have to be computed again, as far as the engine says."""
    sampled_tokens: float
    requests: float
    seconds: float
    """Wall time of a question while others were played beside it."""
    seconds_median: float
    seconds_crops: float
    """Of these, those spent on crops and their reports."""


@dataclass(frozen=True)
class BenchSummary:
    name: str
    title: str
    blocks: tuple[Block, ...]
    """The main one first."""
    tools: Tools | None
    cost: Cost | None
    faults: Mapping[str, int]
    failures: Mapping[str, int]
    """Failed rows by the kind of failure."""
    first_failure: str | None
    """What failed, of the first of them."""


@dataclass(frozen=True)
class Summary:
    run: str
    config: str
    mode: str
    model: str
    frames: int
    benches: tuple[BenchSummary, ...]
    strangers: int

    @property
    def played(self) -> int:
        return sum(block.counts.rows for bench in self.benches for block in bench.blocks)

    @property
    def failed(self) -> int:
        return sum(block.counts.failed for bench in self.benches for block in bench.blocks)

    @property
    def unplayed(self) -> int:
        return sum(block.asked - block.counts.rows for bench in self.benches for block in bench.blocks)


Judged = Sequence[tuple[Result, Verdict]]


def verdicts(run: Run) -> dict[Key, Verdict]:
    return {key: verdict(result.episode, run.grade(result)) for key, result in run.results.items()}


def measure(run: Run, kind: AnswerType) -> str:
    """What the score of rows of a type is."""
    return "judge" if kind == "open" and run.judge is not None else _MEASURES[kind]


def summarise(run: Run) -> Summary:
    found = verdicts(run)
    return Summary(
        run=str(run.path),
        config=run.config,
        mode=str(run.recipe.get("mode", {}).get("name")),
        model=str(run.recipe.get("model", {}).get("name")),
        frames=int(run.recipe.get("episode", {}).get("frame_budget", 0)),
        benches=tuple(_bench(run, bench, found) for bench in run.benches.values()),
        strangers=run.strangers,
    )


def write_summary(summary: Summary, path: Path) -> None:
    """As JSON. Raises OSError."""
    write_whole(path, json.dumps(asdict(summary), indent=1) + "\n")


def _bench(run: Run, bench: Bench, found: Mapping[Key, Verdict]) -> BenchSummary:
    samples = [sample for key, sample in run.samples.items() if key[0] == bench.name]
    rows = [(result, found[result.key]) for result in run.of(bench.name)]
    keys = bench.breakdown if bench.breakdown is not None else _found_keys(samples)
    blocks = []
    for kind in _TYPES:
        asked = [sample for sample in samples if sample.type == kind]
        if asked:
            mine = [(result, row) for result, row in rows if result.episode.sample.type == kind]
            blocks.append(_block(bench, kind, measure(run, kind), len(asked), mine, keys))
    played = [(result, row) for result, row in rows if row.outcome != "failed"]
    failures = Counter(_failure(result) for result, row in rows if row.outcome == "failed")
    return BenchSummary(
        name=bench.name,
        title=bench.title,
        blocks=tuple(blocks),
        tools=_tools(played) if played else None,
        cost=_cost([result for result, _ in played]) if played else None,
        faults=dict(sorted(Counter(fault.kind for fault in bench.faults).items())),
        failures=dict(failures.most_common()),
        first_failure=next((row.explanation for _, row in rows if row.outcome == "failed"), None),
    )


def _block(bench: Bench, kind: AnswerType, measure: str, asked: int, rows: Judged, keys: Sequence[str]) -> Block:
    graded = [(result, row) for result, row in rows if row.outcome != "no_gold"]
    played = [row for _, row in graded if row.outcome != "failed"]
    credits = [_credit(row) for _, row in graded]
    breakdowns = {key: _breakdown(graded, key) for key in keys}
    breakdowns = {key: breakdown for key, breakdown in breakdowns.items() if breakdown.parts}
    temporal = kind == "temporal" and played
    return Block(
        bench=bench.name,
        title=bench.title,
        type=kind,
        measure=measure,
        asked=asked,
        counts=count(row for _, row in rows),
        accuracy=fmean(credits) if played else None,
        interval=share_interval(credits, [result.episode.sample.video for result, _ in graded]) if played else None,
        accuracy_played=fmean(map(_credit, played)) if played else None,
        recalls={f"R@{least}": fmean(c >= least for c in credits) for least in RECALLS} if temporal else None,
        macro=breakdowns[bench.macro].macro if bench.macro in breakdowns else None,
        breakdowns=breakdowns,
    )


def count(rows: Iterable[Verdict]) -> Counts:
    outcomes: Counter[Outcome] = Counter(row.outcome for row in rows)
    kinds: tuple[Outcome, ...] = ("right", "wrong", "unparsable", "failed", "no_gold")
    return Counts(outcomes.total(), *(outcomes[kind] for kind in kinds))


def _credit(row: Verdict) -> float:
    """What a row adds to the sum over all rows: a failed one, which has no value, nothing."""
    return row.value or 0.0


def _breakdown(rows: Judged, key: str) -> Breakdown:
    """By the values of a key; a value that is a list counts for each of its entries, None for none."""
    parts: dict[str, list[float]] = {}
    for result, row in rows:
        for name in _kinds(result.episode.sample, key):
            parts.setdefault(name, []).append(_credit(row))
    means = {name: Part(len(credits), fmean(credits)) for name, credits in sorted(parts.items())}
    return Breakdown(means, fmean(part.accuracy for part in means.values()) if means else 0.0)


def _kinds(sample: Sample, key: str) -> list[str]:
    value = sample.metadata.get(key)
    values = value if isinstance(value, list | tuple) else [value]
    return [str(entry) for entry in dict.fromkeys(values) if entry is not None]


def _found_keys(samples: Sequence[Sample]) -> list[str]:
    """Keys of metadata that sort samples into a few kinds: texts, or lists of texts."""
    keys = dict.fromkeys(key for sample in samples for key in sample.metadata if key != "bench")
    out = []
    for key in keys:
        values = [sample.metadata[key] for sample in samples if sample.metadata.get(key) is not None]
        entries = [entry for value in values for entry in (value if isinstance(value, list | tuple) else [value])]
        if all(isinstance(entry, str) for entry in entries) and 1 < len(set(entries)) <= _MOST_KINDS:
            out.append(key)
    return out


def _failure(result: Result) -> str:
    return next((error.kind for error in result.episode.errors if not error.scored), "judge")


def _tools(rows: Judged) -> Tools:
    by_calls: dict[int, list[float]] = {}
    for result, row in rows:
        if row.value is not None:
            by_calls.setdefault(result.episode.tool_calls, []).append(row.value)

    def mean(value: Callable[[Result], float]) -> float:
        return fmean(value(result) for result, _ in rows)

    return Tools(
        rows=len(rows),
        calls=mean(lambda result: result.episode.tool_calls),
        rows_with_calls=mean(lambda result: result.episode.tool_calls > 0),
        most_in_a_turn=mean(lambda result: _most_in_a_turn(result)),
        bad_calls=mean(lambda result: sum(crop.status == "bad" for crop in result.episode.crops)),
        turns=mean(lambda result: len(result.episode.turns)),
        strict=mean(lambda result: format_strict(result.episode)),
        forced=mean(lambda result: result.episode.forced),
        by_calls={str(calls): Part(len(values), fmean(values)) for calls, values in sorted(by_calls.items())},
    )


def _most_in_a_turn(result: Result) -> int:
    return max(Counter(crop.turn for crop in result.episode.crops if crop.ran).values(), default=0)


def _cost(results: Sequence[Result]) -> Cost:
    usages = [
        [segment.usage for trace in result.episode.traces for segment in trace if segment.usage is not None]
        for result in results
    ]
    seconds = [result.episode.timings.get("total", 0.0) for result in results]
    return Cost(
        prompt_tokens=fmean(sum(usage.prompt_tokens for usage in row) for row in usages),
        cached_tokens=fmean(sum(usage.cached_tokens for usage in row) for row in usages),
        sampled_tokens=fmean(sum(usage.completion_tokens for usage in row) for row in usages),
        requests=fmean(map(len, usages)),
        seconds=fmean(seconds),
        seconds_median=median(seconds),
        seconds_crops=fmean(result.episode.timings.get("crops", 0.0) for result in results),
    )
