"""The command line. Results go to standard output, progress and problems to standard error.

Exit codes: 0 done, 1 no answer, 2 wrong usage or recipe, 3 the video, 4 the model, 5 the engine or server, 6 data.
"""

from __future__ import annotations

import json
import logging
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paravt import data_cli, eval_cli, plan_cli, report_cli, serve_cli
from paravt.errors import EXIT_CODES, DataError, EngineError, ParaVTError, RecipeError
from paravt.options import check_model, check_served
from paravt.terminal import PrintableFormatter, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)
lab = typer.Typer(no_args_is_help=True, help="A world of generated videos and a tiny model that knows it.")
app.add_typer(lab, name="lab")
app.add_typer(data_cli.app, name="data")
app.add_typer(eval_cli.app, name="eval")
app.command()(plan_cli.plan)
report_cli.add_commands(app)
serve_cli.add_commands(app)


class DispatchMode(str, Enum):
    parallel = "parallel"
    sequential = "sequential"
    none = "none"


class LabEngine(str, Enum):
    local = "local"
    vllm = "vllm"


@app.callback()
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Agentic long-video understanding: a model that watches a long video by parallel crops."""
    if show:
        from paravt import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog="Exit codes: 0 answered, 1 no answer, 2 usage, 3 the video, 4 the model, 5 the engine or server.")
def ask(
    video: Annotated[Path, typer.Argument(help="A video file.", show_default=False)],
    question: Annotated[str, typer.Argument(help="What you want to know.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="A Qwen-VL checkpoint: a directory or a hub id. Default: the small one in the package."),
    ] = None,
    server: Annotated[str | None, typer.Option(help="An OpenAI-compatible server instead, http://host:port.")] = None,
    served_model: Annotated[str | None, typer.Option(help="The model's name on that server.")] = None,
    frames: Annotated[int, typer.Option(min=1, help="K, the number of overview frames.")] = 64,
    dispatch: Annotated[
        DispatchMode, typer.Option(help="All crops of a turn at once, one crop in each turn, or no tool.")
    ] = DispatchMode.parallel,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of a multiple-choice question; repeat it for each.")
    ] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="Assistant turns before an answer is asked for.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one turn.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling, if the temperature is not 0.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16, float16")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole episode as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the whole episode to this JSON file.")] = None,
) -> None:
    """Answer a question about a long video.

    The model sees K overview frames, asks for close looks at several windows at once, and answers from their reports.
    """
    check_model(model, server)
    check_served(served_model, server)
    if save is not None and (not save.parent.is_dir() or (save.exists() and not save.is_file())):
        raise typer.BadParameter(f"--save: {save} cannot be a file")
    from paravt.agent import EpisodeConfig
    from paravt.ask import LAB_MAX_TOKENS, open_engine
    from paravt.ask import ask as ask_video
    from paravt.episodes import episode_to_dict, save_episode
    from paravt.terminal import LiveEpisode, problems, show_episode
    from paravt.video import open_video

    open_video(str(video))  # before a model is loaded: a wrong path should not take a minute to say so
    small = model is None and server is None
    if small:
        say(
            "this is the small model of the package: it knows videos made by `paravt lab video`, open questions and up"
            " to 64 frames; for real videos give --model or --server"
        )
    try:
        config = EpisodeConfig(
            frame_budget=frames,
            dispatch=dispatch.value,
            max_turns=max_turns,
            max_tokens=LAB_MAX_TOKENS if small else max_tokens,
            max_frames=max(1024, 2 * frames),
            temperature=temperature,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    engine = open_engine(model, server=server, served_model=served_model, device=device, dtype=dtype)
    with LiveEpisode(Console(stderr=True)) as live:
        episode = ask_video(video, question, option or [], engine=engine, config=config, on_event=live.on_event)
    failed = episode.answer is None and not episode.scored
    try:
        if save is not None:
            save_episode(episode, save)
    finally:  # one of the two is not lost if the other fails
        if as_json:
            sys.stdout.write(json.dumps(episode_to_dict(episode)) + "\n")
        elif not failed:
            show_episode(Console(), episode)
    for line in problems(episode):
        say(line)
    if failed:
        first = next(error for error in episode.errors if not error.scored)
        raise typer.Exit(EXIT_CODES.get(first.kind, EngineError.exit_code))
    if episode.answer is None:
        say("the model gave no answer")
        raise typer.Exit(1)


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="The run's directory. Finished stages in it are not run again, and others go on.")
    ],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the recipe: stages.0.steps=10, seed=1 ...")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, from the model's configuration alone.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of --dry-run: processes that the run is spread over.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine, each with a GPU if there are any.")] = 1,
) -> None:
    """Train a model on traces or rows of files, stage by stage; the loss is on sampled tokens only."""
    _check_ranks(ranks, dry_run)
    from paravt.config import SFTRecipe, load_recipe

    loaded = load_recipe(SFTRecipe, recipe, override or [])
    if dry_run:
        from paravt.dry_run import estimate_sft
        from paravt.terminal import show_dry_run

        show_dry_run(Console(), estimate_sft(loaded, ranks or nproc))
        return
    if nproc > 1:
        _start_processes(["sft", str(recipe), "--out", str(out)], override, nproc)
        return
    from paravt.lab.factory import train_sft

    train_sft(loaded, out, Console(stderr=True))


@app.command()
def export(
    base: Annotated[str, typer.Argument(help="The model that the adapters were trained on.", show_default=False)],
    adapters: Annotated[
        Path, typer.Argument(help="A directory in peft's format, or a checkpoint of a run.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write.", show_default=False)],
) -> None:
    """Merge adapters into their model, and write a checkpoint that loads as it is."""
    from paravt.models import load_model, merge_adapters

    if (adapters / "adapters").is_dir():  # a checkpoint of a run
        adapters = adapters / "adapters"
    merged = merge_adapters(load_model(base), adapters)
    merged.save(out)


@app.command()
def rl(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The run's directory. A run in it goes on from its newest checkpoint.")],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the recipe: steps=10, model.path=DIR ...")
    ] = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the directory of a checkpoint to start from.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, from the model's configuration alone.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of --dry-run: processes that the run is spread over.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine, each with a GPU if there are any.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster to run --nproc processes on: its address, auto, or local.", metavar="ADDRESS"
        ),
    ] = None,
    decode_workers: Annotated[
        int, typer.Option(min=0, help="Of --ray: that read videos; 0: the processes do it themselves.")
    ] = 0,
    max_failures: Annotated[
        int | None, typer.Option(min=0, help="Of --ray: how often lost processes are started again (3).")
    ] = None,
) -> None:
    """Train the main agent and its sub-agents by reinforcement learning on whole episodes (PARA-GRPO)."""
    if ray is None and (decode_workers or max_failures is not None):
        raise typer.BadParameter("--decode-workers and --max-failures need --ray")
    _check_ranks(ranks, dry_run)
    from paravt.config import RLRecipe, load_recipe

    loaded = load_recipe(RLRecipe, recipe, override or [])
    if dry_run:
        from paravt.dry_run import estimate
        from paravt.terminal import show_dry_run

        show_dry_run(Console(), estimate(loaded, ranks or nproc))
        return
    if ray is not None:
        try:
            from paravt.launch.ray import start
        except ImportError as error:
            if not (error.name or "").startswith("ray"):
                raise
            raise RecipeError("--ray needs Ray: pip install 'paravt[ray]'") from error
        start(
            loaded,
            out,
            ray,
            processes=nproc,
            resume=resume,
            decode_workers=decode_workers,
            max_failures=3 if max_failures is None else max_failures,
        )
        return
    if nproc > 1:
        _start_processes(["rl", str(recipe), "--out", str(out), "--resume", resume], override, nproc)
        return
    from paravt.lab.factory import train_rl

    train_rl(loaded, out, Console(stderr=True), resume)


def _check_ranks(ranks: int | None, dry_run: bool) -> None:
    """Before a run begins in one process that was meant to have several."""
    if ranks is not None and not dry_run:
        raise typer.BadParameter("--ranks is for --dry-run; --nproc starts processes")


def _start_processes(arguments: list[str], override: list[str] | None, processes: int) -> None:
    """This command in each of several processes."""
    from paravt.launch.torchrun import start

    changes = [part for change in override or [] for part in ("--set", change)]
    start("paravt", [*arguments, *changes], processes)


@lab.command("video")
def lab_video(
    out: Annotated[Path, typer.Argument(help="The mp4 file to write.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Another seed, another video.")] = 0,
) -> None:
    """Write a generated video (two minutes) and print questions about it with their answers."""
    from paravt.lab.questions import question
    from paravt.lab.world import write_video

    name = f"video-{seed}"
    write_video(name, out)
    for sample in {q.sample.question: q.sample for q in (question(name, number) for number in range(8))}.values():
        typer.echo(f"{sample.question}  ->  {sample.answer}")


@lab.command("questions")
def lab_questions(
    out: Annotated[Path, typer.Argument(help="The directory to write: videos/ and questions.jsonl.")],
    videos: Annotated[int, typer.Option(min=1, help="Number of videos.")] = 16,
    questions: Annotated[int, typer.Option(min=1, help="About each video.")] = 4,
    seed: Annotated[int, typer.Option(help="Another seed, other videos.")] = 0,
) -> None:
    """Write generated videos and a file of questions about them, as one's own data would be."""
    from paravt.lab.corpus import write_corpus

    typer.echo(write_corpus(out, videos, questions, seed))


@lab.command("demo")
def lab_demo(
    directory: Annotated[Path, typer.Option(help="Where the video goes.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Another seed, another video.")] = 0,
) -> None:
    """Ask the shipped checkpoint about a generated video, in parallel and in sequential mode, side by side."""
    from paravt.lab.demo import run_demo

    run_demo(directory, seed, Console())


@lab.command("run", epilog="Exit codes: 0 all stages done, 1 some failed, 2 usage or a suite that is not valid.")
def lab_run(
    quick: Annotated[bool, typer.Option("--quick", help="One seed, the six main rows.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every row, five seeds.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Another number of seeds.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A row to run; repeat it for each.", metavar="ROW")] = None,
    out: Annotated[Path, typer.Option(help="The suite's directory: finished stages in it are kept.")] = Path(
        "runs/suite"
    ),
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes, of one thread each. Default: all cores.")] = None,
    suite: Annotated[Path | None, typer.Option(help="Another suite than the package's recipes/lab/suite.yaml.")] = None,
    engine: Annotated[LabEngine, typer.Option(help="What samples in reinforcement learning.")] = LabEngine.local,
    vllm_python: Annotated[
        str | None, typer.Option(help="Of --engine vllm: an interpreter that has vLLM; each run starts a server.")
    ] = None,
    vllm_url: Annotated[
        str | None, typer.Option(help="Of --engine vllm: a running server instead, for one run at a time.")
    ] = None,
) -> None:
    """Train and measure every row of the ablation, and write a report.

    Stopped at any moment, the same command goes on. The report is about the rows of the last command.
    """
    if quick and full:
        raise typer.BadParameter("give --quick or --full, not both")
    given = [option for option in (vllm_python, vllm_url) if option is not None]
    if len(given) != (engine is LabEngine.vllm):
        raise typer.BadParameter("--engine vllm needs --vllm-python or --vllm-url, and nothing else does")
    changes: list[str] = []
    if engine is LabEngine.vllm:
        where = {"servers": [vllm_url]} if vllm_url is not None else {"python": vllm_python}
        # batches of a server depend on timing
        changes = [f"engine={json.dumps({'kind': 'vllm', **where})}", "deterministic=false"]
    from paravt.lab.suite import run_suite

    failed = run_suite(
        out,
        Console(stderr=True),
        mode="quick" if quick else "full" if full else "standard",
        seeds=seeds,
        only=only or (),
        jobs=1 if vllm_url is not None else jobs,
        file=suite,
        changes=changes,
    )
    typer.echo(out / "report.html")
    if failed:
        raise typer.Exit(1)


@lab.command("report")
def lab_report(
    directory: Annotated[Path, typer.Argument(help="The directory of a suite.", show_default=False)],
) -> None:
    """Write the report of a suite anew, from its files alone."""
    from paravt.lab.results import write_report

    write_report(directory)
    typer.echo(directory / "report.html")


def main(arguments: list[str] | None = None) -> None:
    """The entry point: failures of the project's own become one line and an exit code."""
    log = logging.StreamHandler()
    log.setFormatter(PrintableFormatter())
    logging.getLogger("paravt").handlers = [log]
    try:
        app(arguments)
    except ParaVTError as error:
        say(str(error))
        raise SystemExit(error.exit_code) from None
    except FloatingPointError as error:
        say(f"{error}; lower the learning rate")
        raise SystemExit(1) from None
    except OSError as error:  # a full disk, a closed pipe
        say(f"{error.filename or 'output'}: {error.strerror or error}")
        raise SystemExit(DataError.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
