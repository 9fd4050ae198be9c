"""Evaluations by name: benchmarks or a file of questions, modes and budgets, a checkpoint or servers.

What `paravt eval` and `paravt.evaluate` do; the parts are in `paravt.bench`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from paravt.ask import LAB_MAX_TOKENS, open_engine, shipped_model
from paravt.bench.benchmarks import BENCHMARKS
from paravt.bench.evaluate import Plan, run_evaluation
from paravt.bench.identity import local_model, served_model
from paravt.bench.loaded import Loaded, Shard
from paravt.bench.modes import MODES, Mode
from paravt.bench.own import load_own
from paravt.bench.runner import Place
from paravt.bench.summary import Summary
from paravt.engines.openai import OpenAIEngine
from paravt.episode_config import EpisodeConfig
from paravt.errors import DataError, EngineError, RecipeError
from paravt.judge import Judge
from paravt.terminal import printable
from paravt.video import FrameReader, FrameSource

LAB = "lab"
"""Questions about generated videos, which the shipped checkpoint was trained for."""
LAB_QUESTIONS = 256
_SHOWN = 20
"""Missing videos that are named; all are in the run's benches.json."""


Configuration: TypeAlias = tuple[Mode, EpisodeConfig]


@dataclass(frozen=True)
class Questions:
    """What is asked: benchmarks by name, and files of one's own."""

    benches: tuple[str, ...] = ()
    files: tuple[str | Path, ...] = ()
    source: Mapping[str, str | Path] = field(default_factory=dict)
    """By benchmark, its directory in the published layout; "" stands for all others. Without one, its tables come from
    the hub."""
    videos: Mapping[str, str | Path] = field(default_factory=dict)
    """Where the videos are, if not below the source; in the same way."""
    shard: Shard = field(default_factory=Shard)
    limit: int | None = None
    """Only the first so many of each benchmark."""
    skip_missing: bool = False
    """Ask the other questions if videos are missing."""


@dataclass(frozen=True)
class Model:
    """Who answers: a checkpoint (the shipped one by default), or servers with one model."""

    checkpoint: str | None = None
    servers: tuple[str, ...] = ()
    served_model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    concurrency: int = 8
    """Questions at a time, for each server; each can have several crops at a time."""
    tries: int = 3
    """Of a question that an engine fails on."""

    @property
    def shipped(self) -> bool:
        return self.checkpoint is None and not self.servers


def evaluate(
    questions: str | Path | Sequence[str],
    out: str | Path,
    *,
    mode: str | Mode = "agentic",
    frames: int | None = None,
    model: str | None = None,
    servers: Sequence[str] = (),
    served_model: str | None = None,
    source: str | Path | None = None,
    videos: str | Path | None = None,
    limit: int | None = None,
    concurrency: int = 8,
    judge: Judge | None = None,
    **settings: Any,
) -> Summary:
    """Play every question and sum up: benchmarks by name ("mlvu", ["lvbench", "charades"]) or a .jsonl file of one's
    own. `out` is the run's directory; the same call goes on in it.

    `frames` is K, by default the mode's own (64, unless it is of another project); `settings` are other fields of
    `EpisodeConfig`, such as `max_turns`. Raises DataError for questions that cannot be used or missing videos,
    ModelError and EngineError as engines do, RecipeError if `out` has a run of another configuration.
    """
    names = [questions] if isinstance(questions, (str, Path)) else list(questions)
    files = tuple(name for name in names if str(name).endswith(".jsonl"))
    asked = Questions(
        benches=tuple(str(name) for name in names if name not in files),
        files=files,
        source={} if source is None else {"": source},
        videos={} if videos is None else {"": videos},
        limit=limit,
    )
    who = Model(model, tuple(servers), served_model, concurrency=concurrency)
    modes = [mode if isinstance(mode, Mode) else find_mode(mode)]
    (summary,) = evaluate_all(asked, who, configure(modes, [frames], who, settings), Path(out), judge=judge)
    return summary


def evaluate_all(
    questions: Questions,
    model: Model,
    configurations: Sequence[Configuration],
    out: Path,
    *,
    judge: Judge | None = None,
    console: Console | None = None,
) -> list[Summary]:
    """One run for each configuration; if there are several, each in a directory of its own below `out`."""
    console = console or Console(stderr=True)
    asked, reader = load_questions(questions, console)

    async def run() -> list[Summary]:
        places, identity = await open_places(model)
        summaries = []
        try:
            for mode, config in configurations:
                directory = out / f"{mode.name}-K{config.frame_budget}" if len(configurations) > 1 else out
                title = f"eval: {mode.name}, K = {config.frame_budget}, in {directory}"
                console.print(Text(printable(title)), soft_wrap=True)
                plan = Plan(mode, identity, config, model.concurrency, model.tries)
                summaries.append(await run_evaluation(asked, plan, places, reader, directory, console, judge))
        finally:
            for place in places:
                await place.engine.close()
            if judge is not None:
                await judge.close()
        return summaries

    return asyncio.run(run())


def find_mode(name: str) -> Mode:
    """Raises RecipeError for a name that is none."""
    if name not in MODES:
        raise RecipeError(f"{name}: no such mode; there are {', '.join(MODES)}")
    return MODES[name]


def configure(
    modes: Sequence[Mode], budgets: Sequence[int | None], model: Model, settings: Mapping[str, Any]
) -> list[Configuration]:
    """Each mode at each K (None: the mode's own), with these fields of `EpisodeConfig`.

    Raises ValueError for a value that cannot be.
    """
    given = {"max_tokens": LAB_MAX_TOKENS, **settings} if model.shipped else dict(settings)
    return [(mode, mode.config(**_frames(mode, frames), **given)) for mode in modes for frames in budgets]


def _frames(mode: Mode, frames: int | None) -> dict[str, int]:
    if frames is None:
        return {}
    most = mode.budgets.get("max_frames", EpisodeConfig.max_frames)
    return {"frame_budget": frames, "max_frames": max(most, 2 * frames)}


# ---------------------------------------------------------------------------------------------------- questions


def load_questions(questions: Questions, console: Console) -> tuple[list[Loaded], FrameSource]:
    """The questions and what reads their videos. Says what is wrong with them before anything is asked.

    Raises DataError for a benchmark that is not known, for one that cannot be read, and for missing videos.
    """
    for name in (*questions.source, *questions.videos):
        if name and name not in questions.benches:
            raise DataError(f"{name}={questions.source.get(name) or questions.videos[name]}: {name} is not evaluated")
    asked = [_load(name, questions) for name in questions.benches]
    for file in questions.files:
        loaded = load_own(file)
        if loaded.name in BENCHMARKS or loaded.name == LAB:  # not to be taken for the benchmark of this name
            loaded = replace(loaded, name=Path(file).name, title=Path(file).name)
        asked.append(loaded)
    asked = [one.part(questions.shard, questions.limit) for one in asked]
    names = [one.name for one in asked]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DataError(f"{', '.join(sorted(twice))}: given twice")
    if LAB in names and len(names) > 1:
        raise DataError(f"{LAB}: its videos are no files; evaluate it alone")
    for one in asked:
        _say_faults(one, console)
    missing = [fault for one in asked for fault in one.faults if fault.kind == "video"]
    if missing and not questions.skip_missing:
        raise DataError(
            f"{len(missing)} videos are missing, the first: {missing[0].where} ({missing[0].message}); "
            "nothing was asked; --skip-missing asks the other questions"
        )
    if not any(one.playable for one in asked):
        raise DataError("no question to ask: this shard has none, or all videos are missing")
    if names == [LAB]:
        from paravt.lab.world import WorldReader

        return asked, WorldReader()
    return asked, FrameReader()


def _load(name: str, questions: Questions) -> Loaded:
    if name == LAB:
        from paravt.lab.benchmark import load_lab

        return replace(load_lab(questions.limit or LAB_QUESTIONS), title=LAB, breakdown=("windows",))
    if name not in BENCHMARKS:
        raise DataError(f"{name}: no such benchmark; there are {', '.join((*BENCHMARKS, LAB))}")
    source, videos = (given.get(name, given.get("")) for given in (questions.source, questions.videos))
    return BENCHMARKS[name].load(source, videos)


def _say_faults(asked: Loaded, console: Console) -> None:
    """What is wrong with the data of a benchmark: a line for each kind, missing videos by folder and by name."""

    def say(line: str) -> None:
        console.print(Text(f"{asked.title}: {printable(line)}", "yellow"), soft_wrap=True)

    for kind, count in sorted(asked.counts().items()):
        if kind != "video":
            first = next(fault for fault in asked.faults if fault.kind == kind)
            say(f"{count} faults of kind {kind}, the first: {first.where}: {first.message}")
    for row in asked.missing_folders():
        say(f"{row.missing} of {row.videos} videos are missing in {row.folder}, {row.questions} questions")
    missing = [fault for fault in asked.faults if fault.kind == "video"]
    for fault in missing[:_SHOWN]:
        say(f"  {fault.where}: {fault.message}")
    if len(missing) > _SHOWN:
        say(f"  ... and {len(missing) - _SHOWN} more")


# ---------------------------------------------------------------------------------------------------- engines


async def open_places(model: Model) -> tuple[list[Place], dict[str, Any]]:
    """Engines, and what names their model in a run's configuration.

    Raises EngineError if a server cannot be reached or serves another model than the others, ModelError if a
    checkpoint cannot be loaded.
    """
    if not model.servers:
        engine = open_engine(model.checkpoint, device=model.device, dtype=model.dtype)
        path = model.checkpoint or shipped_model()
        name = "shipped" if model.shipped else str(model.checkpoint)
        return [Place("local", engine)], local_model(name, path, model.dtype)
    most = model.concurrency * EpisodeConfig.max_parallel  # or the crops of a turn would wait for each other
    engines = [OpenAIEngine(url, model.served_model, max_concurrency=most) for url in model.servers]
    try:
        names = [await engine.served_model() for engine in engines]
    except EngineError:
        for engine in engines:
            await engine.close()
        raise
    if len(set(names)) > 1:
        raise EngineError(f"the servers have different models: {', '.join(sorted(set(names)))}; name one")
    return [Place(engine.url, engine) for engine in engines], served_model(names[0])
