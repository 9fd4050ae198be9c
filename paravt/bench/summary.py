"""The numbers of a run, from its rows alone: no model, no video.

Rows of different types are never mixed into one number: option letters, time windows and free answers of a benchmark
have a block each. Accuracy is over all rows that have a usable reference answer; failed ones are among them, get no
credit, and are counted, and the accuracy without them stands beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from paravt.bench.intervals import Interval, share_interval
from paravt.bench.loaded import Loaded
from paravt.bench.results import Key, Result, Run, read_run
from paravt.bench.scoring import Outcome, Verdict, verdict
from paravt.files import write_whole
from paravt.rewards import format_strict
from paravt.types import AnswerType, Episode, Sample

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


@dataclass(frozen=True)
class Part:
    """Some rows of a block: those of one duration, category ..."""

    rows: int
    accuracy: float


@dataclass(frozen=True)
class Block:
    """The rows of one type of one benchmark. Shares are of 1; None where there is nothing to take a mean of."""

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
    breakdowns: Mapping[str, Mapping[str, Part]]
    """By key of the metadata, by value."""


@dataclass(frozen=True)
class Means:
    """Per question, of the rows of a benchmark that did not fail. Shares are of 1."""

    calls: float
    """Executed calls (kappa)."""
    rows_with_calls: float
    """Share."""
    most_in_a_turn: float
    """Executed calls of each row's widest turn."""
    bad_calls: float
    turns: float
    strict: float
    """Share of rows whose every turn obeys the format."""
    forced: float
    """Share."""
    prompt_tokens: float
    cached_tokens: float
    """Of the prompt tokens, those that did not have to be computed again, as far as the engine says."""
    sampled_tokens: float
    requests: float
    seconds: float
    """Wall time of a question while others were played beside it."""
    seconds_median: float
    seconds_crops: float
    """Of the wall time, what was spent on crops and their reports."""


@dataclass(frozen=True)
class BenchSummary:
    name: str
    title: str
    blocks: tuple[Block, ...]
    """The main one first."""
    means: Means | None
    by_calls: Mapping[str, Part]
    """Accuracy by the number of executed calls, without failed rows."""
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


def sum_up(out: Path) -> Summary:
    """The numbers of the run in `out`, written to its `summary.json`. Raises DataError if there is none, OSError."""
    summary = summarise(read_run(out))
    write_whole(out / "summary.json", json.dumps(asdict(summary), indent=1) + "\n")
    return summary


def _bench(run: Run, bench: Loaded, found: Mapping[Key, Verdict]) -> BenchSummary:
    rows = [(result, found[result.key]) for result in run.of(bench)]
    keys = bench.breakdown if bench.breakdown is not None else _found_keys(bench.samples)
    blocks = []
    for kind in _TYPES:
        asked = [sample for sample in bench.samples if sample.type == kind]
        if asked:
            mine = [(result, row) for result, row in rows if result.episode.sample.type == kind]
            blocks.append(_block(kind, measure(run, kind), len(asked), mine, keys, bench.macro))
    played = [(result, row) for result, row in rows if row.outcome != "failed"]
    graded = sorted((one for one in played if one[1].value is not None), key=lambda one: one[0].episode.tool_calls)
    failures = Counter(_failure(result) for result, row in rows if row.outcome == "failed")
    return BenchSummary(
        name=bench.name,
        title=bench.title,
        blocks=tuple(blocks),
        means=_means([result.episode for result, _ in played]) if played else None,
        by_calls=_parts((str(result.episode.tool_calls), row) for result, row in graded),
        faults=dict(sorted(Counter(fault.kind for fault in bench.faults).items())),
        failures=dict(failures.most_common()),
        first_failure=next((row.explanation for _, row in rows if row.outcome == "failed"), None),
    )


def _block(kind: AnswerType, measure: str, asked: int, rows: Judged, keys: Sequence[str], macro: str | None) -> Block:
    graded = [(result, row) for result, row in rows if row.outcome != "no_gold"]
    played = [row for _, row in graded if row.outcome != "failed"]
    credits = [_credit(row) for _, row in graded]
    breakdowns = {key: _breakdown(graded, key) for key in keys}
    breakdowns = {key: parts for key, parts in breakdowns.items() if parts}
    temporal = kind == "temporal" and played
    return Block(
        type=kind,
        measure=measure,
        asked=asked,
        counts=count(row for _, row in rows),
        accuracy=fmean(credits) if played else None,
        interval=share_interval(credits, [result.episode.sample.video for result, _ in graded]) if played else None,
        accuracy_played=fmean(map(_credit, played)) if played else None,
        recalls={f"R@{least}": fmean(c >= least for c in credits) for least in RECALLS} if temporal else None,
        macro=macro_mean(breakdowns[macro]) if macro in breakdowns else None,
        breakdowns=breakdowns,
    )


def count(rows: Iterable[Verdict]) -> Counts:
    outcomes: Counter[Outcome] = Counter(row.outcome for row in rows)
    kinds: tuple[Outcome, ...] = ("right", "wrong", "unparsable", "failed", "no_gold")
    return Counts(outcomes.total(), *(outcomes[kind] for kind in kinds))


def _credit(row: Verdict) -> float:
    """What a row adds to the sum over all rows: a failed one, which has no value, nothing."""
    return row.value or 0.0


def _breakdown(rows: Judged, key: str) -> dict[str, Part]:
    """By the values of a key; a value that is a list counts for each of its entries, None for none."""
    named = [(name, row) for result, row in rows for name in kinds_of(result.episode.sample, key)]
    return _parts(sorted(named, key=lambda one: one[0]))


def _parts(named: Iterable[tuple[str, Verdict]]) -> dict[str, Part]:
    credits: dict[str, list[float]] = {}
    for name, row in named:
        credits.setdefault(name, []).append(_credit(row))
    return {name: Part(len(values), fmean(values)) for name, values in credits.items()}


def macro_mean(parts: Mapping[str, Part]) -> float:
    """The unweighted mean over parts."""
    return fmean(part.accuracy for part in parts.values())


def kinds_of(sample: Sample, key: str) -> list[str]:
    """The parts of a breakdown that a sample is in."""
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


def _means(episodes: Sequence[Episode]) -> Means:
    usages = [
        [segment.usage for trace in episode.traces for segment in trace if segment.usage is not None]
        for episode in episodes
    ]
    seconds = [episode.timings.get("total", 0.0) for episode in episodes]
    widest = [Counter(crop.turn for crop in episode.crops if crop.ran).values() for episode in episodes]
    return Means(
        calls=fmean(episode.tool_calls for episode in episodes),
        rows_with_calls=fmean(episode.tool_calls > 0 for episode in episodes),
        most_in_a_turn=fmean(max(turns, default=0) for turns in widest),
        bad_calls=fmean(sum(crop.status == "bad" for crop in episode.crops) for episode in episodes),
        turns=fmean(len(episode.turns) for episode in episodes),
        strict=fmean(map(format_strict, episodes)),
        forced=fmean(episode.forced for episode in episodes),
        prompt_tokens=fmean(sum(usage.prompt_tokens for usage in row) for row in usages),
        cached_tokens=fmean(sum(usage.cached_tokens for usage in row) for row in usages),
        sampled_tokens=fmean(sum(usage.completion_tokens for usage in row) for row in usages),
        requests=fmean(map(len, usages)),
        seconds=fmean(seconds),
        seconds_median=median(seconds),
        seconds_crops=fmean(episode.timings.get("crops", 0.0) for episode in episodes),
    )
