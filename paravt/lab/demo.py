"""The demo: one long video, one question, parallel and sequential crops side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paravt.agent import EpisodeConfig
from paravt.ask import ask, open_engine
from paravt.errors import EngineError
from paravt.lab.corpus import write_whole_video
from paravt.lab.questions import Family, Question, question
from paravt.lab.world import DURATION
from paravt.terminal import LiveEpisode, clock, crop_table, printable
from paravt.types import Dispatch, Episode


def question_of_two_scenes(video: str, path: str) -> Question:
    """A question about two scenes, which takes several windows."""
    families: dict[Family, float] = {"both": 1}
    return question(video, 0, path, families=families)


def run_demo(directory: Path, seed: int, console: Console) -> None:
    """Write the video, ask the shipped checkpoint in both modes, print the comparison.

    Raises EngineError if an episode failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name, path = f"demo-{seed}", directory / f"demo-{seed}.mp4"
    if not path.exists():
        console.print(f"Writing {path} ...")
        write_whole_video(name, path)
    asked = question_of_two_scenes(name, str(path))
    console.print(f"{path}, {clock(DURATION)} long")
    console.print(f"Question: {asked.sample.question}  (right answer: {asked.sample.answer})\n")
    engine = open_engine()
    episodes: dict[Dispatch, Episode] = {}
    modes: tuple[Dispatch, ...] = ("parallel", "sequential")
    ask(path, asked.sample.question, engine=engine, config=EpisodeConfig(max_turns=1, force_answer=False))  # warm up
    for mode in modes:
        with LiveEpisode(Console(stderr=True)) as live:
            config = EpisodeConfig(dispatch=mode, seed=seed)
            episode = ask(path, asked.sample.question, engine=engine, config=config, on_event=live.on_event)
        if episode.errors:
            raise EngineError(episode.errors[0].message)
        episodes[mode] = episode
    console.print(crop_table(episodes["parallel"].crops))
    console.print()
    table = Table("", *modes)
    table.add_row("answer", *(Text(printable(episodes[mode].answer or "(none)")) for mode in modes))
    rows: dict[str, Callable[[Episode], str]] = {
        "wall time (s)": lambda episode: f"{episode.timings['total']:.2f}",
        "turns": lambda episode: str(len(episode.turns)),
        "crops": lambda episode: str(episode.tool_calls),
        "prompt tokens": lambda episode: str(sum(trace.prompt_tokens for trace in episode.traces)),
        "sampled tokens": lambda episode: str(sum(trace.sampled_tokens for trace in episode.traces)),
    }
    for label, value in rows.items():
        table.add_row(label, *(value(episodes[mode]) for mode in modes))
    console.print(table)
    console.print("Each crop is watched by a sub-agent with the same weights.")
