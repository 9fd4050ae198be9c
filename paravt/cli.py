"""The command line. Results go to standard output, progress and problems to standard error.

Exit codes: 0 done, 1 no answer, 2 wrong usage or recipe, 3 the video, 4 the model, 5 the engine or server, 6 data.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from paravt.errors import EXIT_CODES, EngineError, ParaVTError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Agentic long-video understanding: a model that watches a long video by parallel crops.",
)
lab = typer.Typer(no_args_is_help=True, help="A world of generated videos and a tiny model that knows it.")
app.add_typer(lab, name="lab")


class DispatchMode(str, Enum):
    parallel = "parallel"
    sequential = "sequential"
    none = "none"


@app.command()
def ask(
    video: Annotated[Path, typer.Argument(help="A video file.", show_default=False)],
    question: Annotated[str, typer.Argument(help="What you want to know.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="A Qwen3-VL checkpoint: a directory or a hub id. Default: the small one in the package."),
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
    if server is not None and model is not None:
        raise typer.BadParameter("give --model or --server, not both")
    if served_model is not None and server is None:
        raise typer.BadParameter("--served-model needs --server")
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise typer.BadParameter(f"--save: {save} is a directory, or there is no directory for it")
    from paravt.agent import EpisodeConfig
    from paravt.ask import ask as ask_video
    from paravt.ask import open_engine
    from paravt.episodes import episode_to_dict, save_episode
    from paravt.terminal import LiveEpisode, show_episode
    from paravt.video import open_video

    open_video(str(video))  # before a model is loaded: a wrong path should not take a minute to say so
    config = EpisodeConfig(
        frame_budget=frames, dispatch=dispatch.value, max_turns=max_turns, temperature=temperature, seed=seed
    )
    _quiet_libraries()
    engine = open_engine(model, server=server, served_model=served_model, device=device, dtype=dtype)
    with LiveEpisode(Console(stderr=True)) as live:
        episode = ask_video(video, question, option or [], engine=engine, config=config, on_event=live.on_event)
    if as_json:
        sys.stdout.write(json.dumps(episode_to_dict(episode)) + "\n")
    else:
        show_episode(Console(), episode)
    if save is not None:
        save_episode(episode, save)
    failures = [error for error in episode.errors if not error.scored]
    if episode.answer is None:
        _say(failures[0].message if failures else "the model gave no answer")
        raise typer.Exit(EXIT_CODES.get(failures[0].kind, EngineError.exit_code) if failures else 1)
    for error in episode.errors:
        _say(f"{error.where}: {error.message}")


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The run's directory. Finished stages in it are not run again.")],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the recipe: stages.0.steps=10, seed=1 ...")
    ] = None,
) -> None:
    """Train a model on traces, stage by stage; the loss is on sampled tokens only."""
    from paravt.config import SFTRecipe, load_recipe

    loaded = load_recipe(SFTRecipe, recipe, override or [])
    from paravt.lab.factory import train_sft

    _quiet_libraries()
    train_sft(loaded, out, Console(stderr=True))


@app.command()
def rl(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The run's directory. A run in it goes on from its newest checkpoint.")],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the recipe: steps=10, model.path=DIR ...")
    ] = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the directory of a checkpoint to start from.")] = "auto",
) -> None:
    """Train the main agent and its sub-agents by reinforcement learning on whole episodes (PARA-GRPO)."""
    from paravt.config import RLRecipe, load_recipe

    loaded = load_recipe(RLRecipe, recipe, override or [])
    from paravt.lab.factory import train_rl

    _quiet_libraries()
    train_rl(loaded, out, Console(stderr=True), resume)


@lab.command("video")
def lab_video(
    out: Annotated[Path, typer.Argument(help="The mp4 file to write.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Another seed, another video.")] = 0,
) -> None:
    """Write a generated video (21 minutes) and print questions about it with their answers."""
    from paravt.lab.world import question, write_video

    name = f"video-{seed}"
    write_video(name, out)
    for number in range(4):
        sample = question(name, number).sample
        typer.echo(f"{sample.question}  ->  {sample.answer}")


@lab.command("demo")
def lab_demo(
    directory: Annotated[Path, typer.Option(help="Where the video goes.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Another seed, another video.")] = 0,
) -> None:
    """Ask the shipped checkpoint about a 21-minute video, in parallel and in sequential mode, side by side."""
    from paravt.lab.demo import run_demo

    _quiet_libraries()
    run_demo(directory, seed, Console())


@lab.command("score")
def lab_score(
    model: Annotated[str | None, typer.Option(help="A checkpoint; default: the shipped one.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Number of questions, each about a video of its own.")] = 64,
    frames: Annotated[int, typer.Option(min=1, help="K, the number of overview frames.")] = 16,
) -> None:
    """Accuracy on the lab's task with parallel, sequential and no dispatch."""
    from paravt.lab.score import run_score

    _quiet_libraries()
    run_score(model, questions, frames, Console())


def main() -> None:
    """The entry point: failures of the project's own become one line and an exit code."""
    try:
        app()
    except ParaVTError as error:
        _say(str(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _say(message: str) -> None:
    from paravt.terminal import printable

    Console(stderr=True, soft_wrap=True).print(Text(f"paravt: {printable(message)}"))


def _quiet_libraries() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
