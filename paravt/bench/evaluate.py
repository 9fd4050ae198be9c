"""One evaluation: questions, a mode, engines, and a directory that it can go on in after anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from paravt.bench.grades import grade_answers
from paravt.bench.identity import recipe
from paravt.bench.loaded import Loaded
from paravt.bench.modes import Mode, run_sample
from paravt.bench.progress import RunProgress
from paravt.bench.results import Bench, Result, RowsFile, read_run, recipe_hash, recipe_text, write_samples
from paravt.bench.runner import Job, Place, Play, Played, run_jobs
from paravt.bench.scoring import verdict
from paravt.bench.summary import Summary, summarise, write_summary
from paravt.engines.base import Engine
from paravt.episode_config import EpisodeConfig
from paravt.judge import Judge
from paravt.provenance import claim_run
from paravt.types import Episode, Sample
from paravt.video import FrameSource


@dataclass(frozen=True)
class Asked:
    """A benchmark as it is asked in this run: all of its questions, or those of a shard."""

    bench: Bench
    loaded: Loaded


@dataclass(frozen=True)
class Plan:
    """How every question is played."""

    mode: Mode
    model: Mapping[str, Any]
    """Names it; see `paravt.bench.identity`."""
    config: EpisodeConfig
    """Made by `mode.config(..)`."""
    concurrency: int = 8
    """Questions at a time, for each place."""
    tries: int = 3
    """Of a question that an engine fails on."""


@dataclass(frozen=True)
class Shard:
    """Part `number` of `of`, counted from 1. Questions about one video are in one part."""

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ValueError(f"shard {self.number}/{self.of}: the first is 1/{self.of}, the last {self.of}/{self.of}")


def prepare(
    loaded: Loaded,
    title: str,
    breakdown: tuple[str, ...] | None = None,
    macro: str | None = None,
    *,
    shard: Shard | None = None,
    limit: int | None = None,
) -> Asked:
    """The questions that are asked: of the first `limit`, those of a shard; and what is wrong with these."""
    part = shard or Shard()
    samples = loaded.samples[:limit]
    places = {video: place for place, video in enumerate(dict.fromkeys(sample.video for sample in samples))}
    mine = tuple(sample for sample in samples if places[sample.video] % part.of == part.number - 1)
    videos = {sample.video for sample in mine}
    faults = tuple(fault for fault in loaded.faults if fault.kind != "video" or fault.where in videos)
    bench = Bench(loaded.name, title, loaded.source, breakdown, macro, faults, len(samples))
    return Asked(bench, replace(loaded, samples=mine, faults=faults))


async def run_evaluation(
    asked: Sequence[Asked],
    plan: Plan,
    places: Sequence[Place],
    reader: FrameSource,
    out: Path,
    console: Console,
    judge: Judge | None = None,
) -> Summary:
    """Play what has not been played in `out`, or has failed there, and sum up.

    Raises RecipeError if `out` has a run of another configuration or is in use, OSError if it cannot be written to,
    EngineError if nothing succeeds any more.
    """
    made = recipe(plan.mode, plan.model, plan.config)
    with claim_run(out, recipe_text(made)):
        write_samples(out, [one.bench for one in asked], {one.bench.name: one.loaded.samples for one in asked})
        with RowsFile(out / "rows.jsonl") as rows:
            await _play(asked, plan, places, reader, out, console, rows, recipe_hash(made))
        if judge is not None:
            await grade_answers(out, judge, console)
        summary = summarise(read_run(out))
        write_summary(summary, out / "summary.json")
    return summary


async def _play(
    asked: Sequence[Asked],
    plan: Plan,
    places: Sequence[Place],
    reader: FrameSource,
    out: Path,
    console: Console,
    rows: RowsFile,
    config: str,
) -> None:
    run = read_run(out)
    wanted = [Job(one.bench.name, sample) for one in asked for sample in one.loaded.playable]
    done = {key for key, result in run.results.items() if result.episode.scored}
    jobs = [job for job in wanted if (job.bench, job.sample.id) not in done]
    kept = len(wanted) - len(jobs)
    if rows.cut or kept or run.strangers:
        also = f", {run.strangers} of other questions" if run.strangers else ""
        console.print(Text(f"eval: {kept} of {len(wanted)} rows are there already{also}"), soft_wrap=True)
    with RunProgress(console, len(wanted)) as progress:
        for job in wanted:
            if (job.bench, job.sample.id) in done:
                progress.add(verdict(run.results[job.bench, job.sample.id].episode), earlier=True)

        def record(played: Played) -> None:
            rows.add(Result(played.job.bench, config, played.tries, played.place, played.episode))
            progress.add(verdict(played.episode))

        await run_jobs(jobs, places, _player(plan, reader), record, concurrency=plan.concurrency, tries=plan.tries)


def _player(plan: Plan, reader: FrameSource) -> Play:
    async def play(sample: Sample, engine: Engine) -> Episode:
        return await run_sample(sample, engine, plan.mode, plan.config, reader=reader)

    return play
