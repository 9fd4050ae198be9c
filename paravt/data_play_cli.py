"""`paravt data traces` and `paravt data difficulty`: commands on data that let a model play."""

from __future__ import annotations

import asyncio
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from paravt.errors import DataError
from paravt.options import MOST_FRAMES, check_model, finite, frame_budgets, open_judge
from paravt.terminal import printable, say

if TYPE_CHECKING:
    from paravt.trace_factory import Teacher
    from paravt.types import Sample


class Mode(str, Enum):
    parallel = "parallel"
    sequential = "sequential"


class Evidence(str, Enum):
    report = "report"
    frames = "frames"
    both = "both"


class Style(str, Enum):
    clean = "clean"
    plain = "plain"
    sloppy = "sloppy"


_Questions = Annotated[
    list[str],
    typer.Argument(help="Files of questions with answers: our JSONL, or published RL rows.", show_default=False),
]
_Root = Annotated[Path | None, typer.Option(help="Where relative paths of videos of published rows begin.")]
_Model = Annotated[str | None, typer.Option(help="A checkpoint. Default: the small one of the package.")]
_Server = Annotated[list[str] | None, typer.Option(help="An OpenAI-compatible server instead; repeat it for each.")]
_Served = Annotated[str | None, typer.Option(help="The model's name on the servers.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
_Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16, float16")]
_Turns = Annotated[int, typer.Option(min=1, help="Assistant turns.")]
_Tokens = Annotated[int | None, typer.Option(min=1, help="Of one turn. Default: 1024; 128 for the small model.")]
_Seed = Annotated[int, typer.Option(help="Of the sampling.")]
_Concurrency = Annotated[int, typer.Option(min=1, help="Episodes at a time.")]
_JudgeUrl = Annotated[str | None, typer.Option("--judge", help="A server whose model grades open answers.")]
_JudgeModel = Annotated[str | None, typer.Option("--judge-model", help="The judge's name on it.")]


def traces(
    questions: _Questions,
    out: Annotated[Path, typer.Option(help="The run's directory. The same command goes on in it.")],
    root: _Root = None,
    model: _Model = None,
    server: _Server = None,
    served_model: _Served = None,
    lab: Annotated[bool, typer.Option("--lab", help="The lab's scripted teacher, for its own questions.")] = False,
    style: Annotated[Style, typer.Option(help="How well the lab's teacher keeps the format.")] = Style.clean,
    dispatch: Annotated[
        Mode, typer.Option(help="How the teacher plays. Calls of a sequential one become one turn where they can.")
    ] = Mode.parallel,
    evidence: Annotated[
        Evidence, typer.Option(help="What the teacher gets back. Rows have reports in any case.")
    ] = Evidence.report,
    frames: Annotated[int, typer.Option(min=1, max=MOST_FRAMES, help="K, the number of overview frames.")] = 64,
    attempts: Annotated[int, typer.Option(min=1, help="Of a question, at most.")] = 1,
    keep: Annotated[int, typer.Option(min=1, help="Different good traces of a question.")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Of the teacher; with several attempts above 0.")
    ] = 0.7,
    max_turns: _Turns = 8,
    max_tokens: _Tokens = None,
    min_accuracy: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of a right answer.")] = 0.5,
    skew: Annotated[
        float,
        typer.Option(
            min=1.0, callback=finite, help="No type of answer and number of calls has more rows than so many medians."
        ),
    ] = 3.0,
    count: Annotated[int | None, typer.Option(min=1, help="Rows, at most; dealt out evenly.")] = None,
    seed: _Seed = 0,
    concurrency: _Concurrency = 8,
    judge: _JudgeUrl = None,
    judge_model: _JudgeModel = None,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """Make cold-start traces: a teacher plays questions, and what it did well becomes rows for `paravt sft`.

    Kept are traces that end in the right answer with every turn strict. OUT/traces.jsonl has the rows, reports.jsonl
    those of the sub-agents, attempts.jsonl everything that was tried, summary.json the counts and the cost.
    """
    if lab and (model or server):
        raise typer.BadParameter("give --lab, --model or --server, one of them")
    check_model(model, server)
    from paravt.agent import EpisodeConfig
    from paravt.trace_factory import FactoryConfig, run_factory
    from paravt.video import FrameReader

    samples, console = _questions(questions, root), Console(stderr=True)
    episode = EpisodeConfig(
        frame_budget=frames,
        dispatch=dispatch.value,
        evidence=evidence.value,
        max_turns=max_turns,
        max_tokens=_max_tokens(max_tokens, model, server),
        max_frames=max(1024, 2 * frames),
        temperature=temperature,
        force_answer=False,
        seed=seed,
    )
    config = FactoryConfig(episode, attempts, keep, min_accuracy, skew, count, concurrency)

    async def run() -> dict[str, Any]:
        grader = open_judge(judge, judge_model)
        teacher: Teacher = _lab_teacher(style.value) if lab else await _teacher(
            model, server, served_model, device, dtype, concurrency
        )  # fmt: skip
        try:
            with Progress(console=console) as progress:
                task = progress.add_task("attempts", total=len(samples))
                played = {"good": 0}

                def on_attempt(attempt: Any) -> None:
                    played[attempt.outcome] = played.get(attempt.outcome, 0) + 1
                    told = ", ".join(f"{number} {name}" for name, number in played.items())
                    progress.update(task, advance=1 if attempt.attempt == 0 else 0, description=told)

                return await run_factory(samples, teacher, FrameReader(), config, out, grader, on_attempt)
        finally:
            await teacher.close()
            if grader is not None:
                await grader.close()

    typer.echo(json.dumps(asyncio.run(run()), indent=1))


def difficulty(
    questions: _Questions,
    out: Annotated[
        Path | None, typer.Option(help="Where the pass rates go. Default: beside the questions, NAME.difficulty.jsonl.")
    ] = None,
    root: _Root = None,
    model: _Model = None,
    server: _Server = None,
    served_model: _Served = None,
    frames: Annotated[str, typer.Option(help="K, the numbers of overview frames.")] = "4,8,16,32,64",
    samples: Annotated[int, typer.Option(min=1, help="Episodes of a question at each K.")] = 8,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="As in the training that the questions are for.")
    ] = 0.7,
    max_turns: _Turns = 4,
    max_tokens: _Tokens = None,
    pass_at: Annotated[float, typer.Option(min=0.0, max=1.0, help="The accuracy of a right answer.")] = 0.5,
    seed: _Seed = 0,
    concurrency: _Concurrency = 16,
    judge: _JudgeUrl = None,
    judge_model: _JudgeModel = None,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """How often a policy answers each question rightly at each K.

    A recipe of `paravt rl` leaves out what no K can solve or fail with `data: {..., difficulty: {file: OUT}}`. The
    same command goes on with a file that is there.
    """
    from paravt.agent import EpisodeConfig
    from paravt.data.difficulty import Difficulty, pass_rates, sift
    from paravt.data.tables import find_files
    from paravt.difficulty import DifficultyConfig, measure
    from paravt.video import FrameReader

    check_model(model, server)
    budgets = frame_budgets(frames)
    if len(budgets) != len(frames.split(",")):
        raise typer.BadParameter(f"--frames {frames}: different numbers from 1 to {MOST_FRAMES}, separated by commas")
    first = find_files(questions)[0]
    target = out or first.with_name(f"{first.stem}.difficulty.jsonl")
    asked, console = _questions(questions, root), Console(stderr=True)
    episode = EpisodeConfig(
        max_turns=max_turns,
        max_tokens=_max_tokens(max_tokens, model, server),
        temperature=temperature,
        force_answer=False,
        seed=seed,
    )
    config = DifficultyConfig(budgets, samples, episode, pass_at, concurrency)

    async def run() -> list[Difficulty]:
        grader = open_judge(judge, judge_model)
        places, identity = await _places(model, server, served_model, device, dtype, concurrency)
        try:
            with Progress(console=console) as progress:
                task = progress.add_task("questions x K", total=len(asked) * len(budgets))
                return await measure(
                    asked, [place.engine for place in places], FrameReader(), identity, config, target, grader,
                    lambda done: progress.advance(task),
                )  # fmt: skip
        finally:
            for place in places:
                await place.engine.close()
            if grader is not None:
                await grader.close()

    measured = asyncio.run(run())
    for budget in budgets:
        rows = [row for row in measured if row.frames == budget]
        scored, failed = sum(row.samples for row in rows), sum(row.failed for row in rows)
        passed = sum(row.passed for row in rows)
        rate = f"{passed / scored:.3f}" if scored else "none"
        typer.echo(f"K = {budget}: pass rate {rate} over {scored} episodes, {failed} failed")
    counts = sift(asked, pass_rates(measured))[1]
    typer.echo(printable(f"{target}: ") + ", ".join(f"{number} {name}" for name, number in counts.items()))


def _questions(files: list[str], root: Path | None) -> list[Sample]:
    from paravt.data.layouts import read_questions_of

    samples, skipped = read_questions_of(files, root)
    for reason, number in skipped.most_common():
        say(f"skipped {number} questions: {reason}")
    if unanswered := [sample for sample in samples if not (sample.answer or "").strip()]:
        raise DataError(
            f"{', '.join(files)}: {len(unanswered)} questions have no answer, the first: {unanswered[0].id}"
        )
    return samples


def _max_tokens(given: int | None, model: str | None, server: list[str] | None) -> int:
    from paravt.ask import LAB_MAX_TOKENS

    return given or (1024 if model or server else LAB_MAX_TOKENS)


async def _places(
    model: str | None, server: list[str] | None, served_model: str | None, device: str, dtype: str, concurrency: int
) -> tuple[list[Any], dict[str, Any]]:
    from paravt.evaluation import Model, open_places

    return await open_places(Model(model, tuple(server or ()), served_model, device, dtype, concurrency))


async def _teacher(
    model: str | None, server: list[str] | None, served_model: str | None, device: str, dtype: str, concurrency: int
) -> Teacher:
    from paravt.trace_factory import EngineTeacher

    places, identity = await _places(model, server, served_model, device, dtype, concurrency)
    return EngineTeacher(identity, [place.engine for place in places])


def _lab_teacher(style: Any) -> Teacher:
    from paravt.ask import shipped_model
    from paravt.lab.corpus import LabTeacher
    from paravt.models.rendering import load_chat

    return LabTeacher(load_chat(shipped_model()), style)
