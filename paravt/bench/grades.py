"""Open answers graded by a judge, after they were given. What it said is kept: scoring again needs no judge."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.text import Text

from paravt.bench.results import Result, Run, add_grade, cut_last_line, read_run
from paravt.judge import Judge


async def grade_answers(out: Path, judge: Judge, console: Console) -> None:
    """Grade the open answers of a run that have no grade of this judge yet. Answers that the judge fails on stay
    without one, are counted as failed, and are tried again by the next call. Raises OSError if the grades cannot be
    written."""
    cut_last_line(out / "grades.jsonl")
    run = read_run(out)
    waiting = [result for result in run.results.values() if _wants_grade(run, result, judge)]
    failed = 0

    async def grade(result: Result) -> None:
        nonlocal failed
        sample, answer = result.episode.sample, result.episode.answer
        score = await judge.score(sample, answer)
        failed += not score.scored
        # one without a value says that there was a judge at all
        add_grade(out, result, judge.model, score)

    await asyncio.gather(*(grade(result) for result in waiting))
    cost = judge.cost
    tokens = f"{cost.prompt_tokens} prompt and {cost.completion_tokens} sampled tokens"
    console.print(
        Text(f"judge: {len(waiting)} answers, {failed} without a grade, {cost.requests} requests, {tokens}"),
        soft_wrap=True,
    )


def _wants_grade(run: Run, result: Result, judge: Judge) -> bool:
    episode = result.episode
    said = episode.answer is not None and bool(episode.answer.strip())
    known = episode.sample.answer is not None and bool(episode.sample.answer.strip())
    graded = run.judge == judge.model and result.key in run.grades
    return episode.sample.type == "open" and episode.scored and said and known and not graded
