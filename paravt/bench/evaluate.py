"""One evaluation: questions, a mode, engines, and a directory that it can go on in after anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from paravt.bench.grades import grade_answers
from paravt.bench.identity import recipe
from paravt.bench.loaded import Loaded
from paravt.bench.modes import Mode, run_sample
from paravt.bench.progress import RunProgress
from paravt.bench.results import Result, add_result, cut_last_line, read_run, recipe_text, write_benches
from paravt.bench.runner import Job, Place, run_jobs
from paravt.bench.scoring import verdict
from paravt.bench.summary import Summary, sum_up
from paravt.engines.base import Engine
from paravt.episode_config import EpisodeConfig
from paravt.judge import Judge
from paravt.provenance import claim_run
from paravt.types import Episode, Sample
from paravt.video import FrameSource


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


async def run_evaluation(
    asked: Sequence[Loaded],
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
    with claim_run(out, recipe_text(recipe(plan.mode, plan.model, plan.config))):
        write_benches(out, asked)
        cut = cut_last_line(out / "rows.jsonl")
        run = read_run(out)
        wanted = [Job(one.name, sample) for one in asked for sample in one.playable]
        done = {key for key, result in run.results.items() if result.episode.scored}
        jobs = [job for job in wanted if (job.bench, job.sample.id) not in done]
        kept = len(wanted) - len(jobs)
        if cut or kept or run.strangers:
            also = f", {run.strangers} of other questions" if run.strangers else ""
            console.print(Text(f"eval: {kept} of {len(wanted)} rows are there already{also}"), soft_wrap=True)
        with RunProgress(console, len(wanted)) as progress:
            for job in wanted:
                if (job.bench, job.sample.id) in done:
                    progress.add(verdict(run.results[job.bench, job.sample.id].episode), earlier=True)

            async def play(sample: Sample, engine: Engine) -> Episode:
                return await run_sample(sample, engine, plan.mode, plan.config, reader=reader)

            def record(result: Result) -> None:
                add_result(out, result, run.config)
                progress.add(verdict(result.episode))

            await run_jobs(jobs, places, play, record, concurrency=plan.concurrency, tries=plan.tries)
        if judge is not None:
            await grade_answers(out, judge, console)
        return sum_up(out)
