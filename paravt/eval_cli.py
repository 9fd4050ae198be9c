"""`paravt eval`: evaluations on the command line, and what is made of their rows afterwards."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from paravt.errors import DataError
from paravt.options import check_model, frame_budgets, open_judge, split_names
from paravt.terminal import printable, say

if TYPE_CHECKING:
    from paravt.bench.loaded import Shard
    from paravt.bench.modes import Mode
    from paravt.bench.summary import Summary
    from paravt.bench.tables import Table

app = typer.Typer(invoke_without_command=True, help="Evaluate on benchmarks or on questions of your own.")

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Runs = Annotated[
    list[Path], typer.Argument(help="Directories of runs, or directories with runs in them.", show_default=False)
]


@app.callback(epilog="Exit codes: 0 done, 1 too many rows failed, 2 usage, 4 the model, 5 the servers, 6 the data.")
def run(
    context: typer.Context,
    bench: Annotated[str, typer.Option(help="Benchmarks, separated by commas: videomme,mlvu ...; or lab.")] = "",
    data: Annotated[
        list[Path] | None, typer.Option(help="A .jsonl file of your own: video, question, options?, answer, id?.")
    ] = None,
    mode: Annotated[str, typer.Option(help="How questions are played; several are separated by commas.")] = "agentic",
    frames: Annotated[
        str | None, typer.Option(help="K, the number of overview frames; several: 4,16,64. Default: the mode's.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint. Default: the small one of the package.")] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="An OpenAI-compatible server instead; repeat it for each.")
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="The model's name on the servers.")] = None,
    out: Annotated[Path, typer.Option(help="The run's directory. The same command goes on in it.")] = Path("runs/eval"),
    source: Annotated[
        list[str] | None,
        typer.Option(help="The benchmark's directory; for several, NAME=DIR for each. Default: its tables on the hub."),
    ] = None,
    videos: Annotated[
        list[str] | None, typer.Option(help="Where the videos are, if not below the source: DIR or NAME=DIR.")
    ] = None,
    skip_missing: Annotated[bool, typer.Option("--skip-missing", help="Leave out questions without a video.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions of each.")] = None,
    shard: Annotated[str, typer.Option(help="Part i of n, i/n; `paravt eval merge` joins them.")] = "1/1",
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at a time, for each server.")] = 8,
    tries: Annotated[int, typer.Option(min=1, help="Of a question that the engine fails on.")] = 3,
    max_failed: Annotated[
        float, typer.Option(min=0, max=1, help="More failed rows than this share end with exit code 1.")
    ] = 0.02,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Assistant turns before an answer is asked for.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one turn.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Another text of the mode: FILE for its main prompt, or NAME=FILE, such as crop=FILE."),
    ] = None,
    judge: Annotated[str | None, typer.Option(help="A server whose model grades open answers.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's name on it.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16, float16")] = "auto",
    as_json: _Json = False,
) -> None:
    """Play every question of a benchmark, and score the answers.

    Every row is kept as it ends: stopped at any moment, the same command goes on, and failed rows are tried again.
    """
    if context.invoked_subcommand is not None:
        return
    if not bench and not data:
        raise typer.BadParameter("say what to evaluate on: --bench LIST or --data FILE (--help has all options)")
    if not split_names(mode):
        raise typer.BadParameter("--mode names no mode")
    check_model(model, server)
    from paravt.evaluation import Model, Questions, configure, evaluate_all, find_mode

    settings = {"temperature": temperature, "seed": seed}
    settings |= {name: value for name, value in (("max_turns", max_turns), ("max_tokens", max_tokens)) if value}
    who = Model(model, tuple(server or ()), served_model, device, dtype, concurrency, tries)
    modes = [_with_prompts(find_mode(name), prompt or []) for name in split_names(mode)]
    try:
        questions = Questions(
            benches=tuple(split_names(bench)),
            files=tuple(data or ()),
            source=_directories(source),
            videos=_directories(videos),
            shard=_shard(shard),
            limit=limit,
            skip_missing=skip_missing,
        )
        configurations = configure(modes, [None] if frames is None else frame_budgets(frames), who, settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    summaries = evaluate_all(
        questions, who, configurations, out, judge=open_judge(judge, judge_model), console=Console(stderr=True)
    )
    _show(summaries, as_json)
    if too_many := [one for one in summaries if one.failed > max_failed * one.played]:
        for one in too_many:
            first = next(bench.first_failure for bench in one.benches if bench.first_failure)
            failed = f"{one.failed} of {one.played} rows failed, more than {100 * max_failed:g} %"
            say(f"{one.run}: {failed}, the first with: {first}; the same command tries them again")
        raise typer.Exit(1)


@app.command()
def rescore(
    runs: _Runs,
    judge: Annotated[str | None, typer.Option(help="A server whose model grades open answers without a grade.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's name on it.")] = None,
    as_json: _Json = False,
) -> None:
    """Compute every number of runs anew from their rows. No model is asked, unless a judge is named."""
    import asyncio

    from paravt.bench.grades import grade_answers
    from paravt.bench.results import find_runs
    from paravt.bench.summary import sum_up
    from paravt.provenance import lock_directory

    grader = open_judge(judge, judge_model)
    summaries = []
    for path in find_runs(runs):
        with lock_directory(path):
            if grader is not None:
                asyncio.run(grade_answers(path, grader, Console(stderr=True)))
            summaries.append(sum_up(path))
    _show(summaries, as_json)


@app.command()
def compare(
    one: Annotated[Path, typer.Argument(help="The directory of a run.", show_default=False)],
    other: Annotated[Path, typer.Argument(help="Another, with the same questions.", show_default=False)],
    flips: Annotated[int, typer.Option(min=0, help="How many of the questions that flipped are shown.")] = 20,
    as_json: _Json = False,
) -> None:
    """The difference between two runs on the same questions, with its interval, and the questions that flipped."""
    from paravt.bench.compare import compare as compare_runs
    from paravt.bench.results import read_run
    from paravt.bench.tables import comparison_table, flip_lines

    rows = compare_runs(read_run(one), read_run(other))
    if not rows:
        raise DataError(f"{one} and {other} have no question in common that both have an answer to")
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        return
    typer.echo(printable(f"first: {one}\nsecond: {other}"))
    _print(comparison_table(rows))
    for line in flip_lines(rows, flips):
        typer.echo(printable(line))


@app.command()
def report(
    runs: _Runs,
    out: Annotated[
        Path | None, typer.Option(help="Where it goes. Default: the run, or the first run's parent directory.")
    ] = None,
) -> None:
    """Write a report about runs: Markdown, JSON and a page, beside the published table."""
    from paravt.bench.report import write_report
    from paravt.bench.results import find_runs

    paths = find_runs(runs)
    where = out or (paths[0] if len(paths) == 1 else paths[0].parent)
    write_report(paths, where)
    typer.echo(where / "report.html")


@app.command()
def merge(
    runs: _Runs,
    out: Annotated[Path, typer.Option(help="The directory to write.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """Join the shards of a run."""
    from paravt.bench.merge import merge_runs, missing_shards
    from paravt.bench.results import find_runs
    from paravt.bench.summary import sum_up

    for line in missing_shards(merge_runs(find_runs(runs), out)):
        say(f"{out}: {line}")
    _show([sum_up(out)], as_json)


def _directories(given: list[str] | None) -> dict[str, str]:
    """By benchmark; "" stands for all others. An "=" in a directory that is there is no separator."""
    out: dict[str, str] = {}
    for text in given or ():
        name, equals, directory = text.partition("=")
        if not equals or Path(text).is_dir():
            name, directory = "", text
        if name in out:
            raise ValueError(f"two directories for {name or 'all benchmarks'}: {out[name]} and {directory}")
        out[name] = directory
    return out


def _shard(text: str) -> Shard:
    from paravt.bench.loaded import Shard

    number, slash, of = text.partition("/")
    if not slash or not (number.isascii() and number.isdigit() and of.isascii() and of.isdigit()):
        raise ValueError(f"--shard {text}: write it as i/n, the first of four as 1/4")
    return Shard(int(number), int(of))


def _with_prompts(mode: Mode, changes: list[str]) -> Mode:
    """Raises RecipeError for a name that is none, and for a file that cannot be used."""
    from paravt.bench.modes import read_prompt_file

    for change in changes:
        name, equals, path = change.partition("=")
        if not equals or Path(change).is_file():
            mode = mode.with_prompt(read_prompt_file(change))
        else:
            mode = mode.with_texts({name: read_prompt_file(path)})
    return mode


def _show(summaries: list[Summary], as_json: bool) -> None:
    from paravt.bench.tables import blocks_table, run_names

    if as_json:
        sys.stdout.write(json.dumps([asdict(summary) for summary in summaries], indent=1) + "\n")
        return
    _print(blocks_table(summaries, run_names(summaries)))


def _print(table: Table) -> None:
    shown = RichTable(box=None, pad_edge=False)
    for head in table.heads:
        shown.add_column(Text(printable(head)), overflow="fold")
    for line in table.lines:
        shown.add_row(*(Text(printable(cell)) for cell in line))
    console = Console()
    if not console.is_terminal:  # a file has no width
        console = Console(width=max(200, 24 * len(table.heads)))
    console.print(shown)
