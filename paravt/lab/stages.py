"""The stages of a suite: a small graph of trainings and evaluations, each in a directory named by what it is made of.

    supervised training (prior) -> supervised training (dose) -> reinforcement learning (row, seed) -> evaluation

A stage's name is a hash of its recipe, which names the stage that its model comes from and so its hash too, and of the
code that it runs. A directory with `done.json` is finished and never run again; one without it goes on where it was,
since each kind of stage can.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import yaml
from pydantic import ValidationError
from rich.console import Console

from paravt.config import RLRecipe, SFTRecipe, load_recipe
from paravt.errors import ParaVTError, RecipeError
from paravt.files import write_whole
from paravt.lab.code import code_hash
from paravt.lab.evaluate import run_evaluation
from paravt.lab.evaluation_recipe import Evaluation, EvaluationRecipe
from paravt.lab.factory import train_rl, train_sft
from paravt.lab.logs import last_words, read_lines
from paravt.lab.suite_recipe import Mode, RowRecipe, SuiteRecipe, load_model_recipe

Kind = Literal["sft", "rl", "evaluation"]
Recipe: TypeAlias = "SFTRecipe | RLRecipe | EvaluationRecipe"
RECIPES: Mapping[Kind, type[SFTRecipe] | type[RLRecipe] | type[EvaluationRecipe]] = {
    "sft": SFTRecipe,
    "rl": RLRecipe,
    "evaluation": EvaluationRecipe,
}
_CODE: Mapping[Kind, str] = {
    "sft": "paravt.lab.factory",
    "rl": "paravt.lab.factory",
    "evaluation": "paravt.lab.evaluate",
}


@dataclass(frozen=True)
class Stage:
    kind: Kind
    label: str
    """For people; not part of the name."""
    recipe: Recipe
    parent: str | None
    """The name of the stage that has to be finished first."""
    code: str

    @cached_property
    def name(self) -> str:
        """The name of its directory."""
        made_of = f"{self.kind}\n{self.recipe.model_dump_json()}\n{self.code}"
        return f"{self.kind}-{blake2b(made_of.encode(), digest_size=8).hexdigest()}"

    @property
    def model(self) -> str:
        """Where its model is, relative to the stages' directory."""
        if isinstance(self.recipe, SFTRecipe):
            return f"{self.name}/{self.recipe.stages[-1].name}"
        if isinstance(self.recipe, RLRecipe):
            return f"{self.name}/checkpoints/step-{self.recipe.steps:06d}/model"
        raise ValueError("an evaluation makes no model")

    @property
    def units(self) -> int:
        """Steps of training, or frame budgets."""
        if isinstance(self.recipe, SFTRecipe):
            return sum(stage.steps for stage in self.recipe.stages)
        return self.recipe.steps if isinstance(self.recipe, RLRecipe) else len(self.recipe.evaluation.budgets)

    @property
    def threads(self) -> int:
        """That it computes with."""
        return 1 if isinstance(self.recipe, EvaluationRecipe) else self.recipe.threads or 1


@dataclass(frozen=True)
class Planned:
    """What a row needs for one seed, by the names of the stages."""

    row: str
    seed: int
    training: str | None
    """None for rows without reinforcement learning."""
    evaluation: str


@dataclass
class Plan:
    stages: dict[str, Stage] = field(default_factory=dict)
    """Parents before children."""
    runs: list[Planned] = field(default_factory=list)

    def add(self, stage: Stage) -> Stage:
        return self.stages.setdefault(stage.name, stage)


def plan_suite(suite: SuiteRecipe, path: Path, mode: Mode, rows: Sequence[str], seeds: int) -> Plan:
    """All stages that some rows need. `path` is the suite's file: recipes are relative to it. Raises RecipeError."""
    planner = _Planner(suite, path, mode)
    for seed in range(seeds):
        for name in rows:
            if seed < (suite.rows[name].seeds or seeds):
                planner.row(name, suite.rows[name], seed)
    return planner.plan


class _Planner:
    def __init__(self, suite: SuiteRecipe, path: Path, mode: Mode) -> None:
        self.suite, self.path, self.mode = suite, path, mode
        self.plan = Plan()
        self.reference = self.rl_recipe(suite.reference, mode.set)

    def rl_recipe(self, file: str, changes: Sequence[str]) -> RLRecipe:
        return load_recipe(RLRecipe, self.path.parent / file, changes)

    def model(self, name: str) -> Stage:
        made = self.suite.models[name]
        changes = [*made.set]  # models are few and made first: their recipes may use threads of their own
        parent = None if made.start is None else self.model(made.start)
        if parent is not None:
            changes.append(f"model={_flow({'kind': 'pretrained', 'path': parent.model, 'dtype': 'float32'})}")
        recipe = load_model_recipe(made, self.path, changes)
        label = f"model {name}"
        return self.plan.add(
            Stage("sft", label, recipe, None if parent is None else parent.name, code_hash(_CODE["sft"]))
        )

    def row(self, name: str, row: RowRecipe, seed: int) -> None:
        label = f"{name}, seed {seed}"
        training: Stage | None = None
        if row.recipe is None:
            source = self.model(str(row.model))
            episode = self.reference.episode
        else:
            start = self.model(row.start or self.suite.start)
            changes = [*self.mode.set, *row.set, f"seed={seed}", "threads=1", "keep_checkpoints=1",
                       f"model={_flow({'kind': 'pretrained', 'path': start.model, 'dtype': 'float32'})}"]  # fmt: skip
            recipe = self.rl_recipe(row.recipe, changes)
            source = training = self.plan.add(Stage("rl", label, recipe, start.name, code_hash(_CODE["rl"])))
            episode = recipe.episode
        merged = self.suite.evaluation.model_dump() | self.mode.evaluation | row.evaluation
        tree = {
            "model": {"kind": "pretrained", "path": source.model, "dtype": "float32"},
            "seed": seed,
            "episode": episode.model_dump(),
            "evaluation": _evaluation(merged, f"{self.path}: rows.{name}.evaluation"),
        }
        evaluation = EvaluationRecipe.model_validate(tree)
        if (most := max(evaluation.evaluation.budgets)) > episode.max_frames:
            where = f"{self.path}: rows.{name}.evaluation: budgets"
            raise RecipeError(f"{where}: {most} is more than the row's episode.max_frames, {episode.max_frames}")
        stage = self.plan.add(Stage("evaluation", label, evaluation, source.name, code_hash(_CODE["evaluation"])))
        self.plan.runs.append(Planned(name, seed, None if training is None else training.name, stage.name))


def _evaluation(values: dict[str, object], where: str) -> dict[str, object]:
    try:
        return Evaluation.model_validate(values).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise RecipeError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _flow(value: dict[str, str]) -> str:
    """A mapping as an override takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()


# ---------------------------------------------------------------------------------------------------- running one


def prepare(stage: Stage, stages: Path) -> Path:
    """Make the directory of a stage, with what it is made of."""
    directory = stages / stage.name
    directory.mkdir(parents=True, exist_ok=True)
    made_of = {
        "kind": stage.kind,
        "label": stage.label,
        "parent": stage.parent,
        "code": stage.code,
        "recipe": stage.recipe.model_dump(mode="json"),
    }
    write_whole(directory / "stage.json", json.dumps(made_of, indent=1) + "\n")
    return directory


def is_done(stages: Path, name: str) -> bool:
    return (stages / name / "done.json").exists()


def run_stage(name: str) -> None:
    """Run a prepared stage to its end; the working directory is that of the stages.

    Raises what its kind raises, and ParaVTError for a run that its watch ended early.
    """
    directory = Path(name)
    made_of = json.loads((directory / "stage.json").read_text(encoding="utf-8"))
    recipe = RECIPES[made_of["kind"]].model_validate(made_of["recipe"])
    parent, model = made_of["parent"], made_of["recipe"]["model"]
    if parent is not None and not Path(model["path"]).is_dir():  # it looks like an id, of which the hub is asked
        raise ParaVTError(f"{model['path']}: a finished stage's model is gone; remove {parent} and run again")
    console = Console(stderr=True)
    started = time.monotonic()
    if isinstance(recipe, SFTRecipe):
        train_sft(recipe, directory, console)
    elif isinstance(recipe, RLRecipe):
        _check_watch(recipe, directory)  # started again, it would go on behind the step at which it was to end
        train_rl(recipe, directory, console)
        _check_watch(recipe, directory)
    else:
        run_evaluation(recipe, directory, console)
    write_whole(directory / "done.json", json.dumps({"seconds": round(time.monotonic() - started, 1)}) + "\n")


def _check_watch(recipe: RLRecipe, directory: Path) -> None:
    """Raises ParaVTError if the collapse watch ended the run of a directory before its last step."""
    said = last_words(directory / "warnings.txt")
    steps = read_lines(directory / "metrics.jsonl") if recipe.watch.stop and said else []
    if steps and (at := steps[-1]["step"]) < recipe.steps:
        raise ParaVTError(f"ended by watch.stop after {at} of {recipe.steps} steps: {said}")


def _check_code(name: str, ours: Mapping[Kind, str]) -> None:
    """Raises ParaVTError if a stage was planned with other code than this process has: it would be kept as a result of
    that code."""
    made_of = json.loads((Path(name) / "stage.json").read_text(encoding="utf-8"))
    if made_of["code"] != ours[made_of["kind"]]:
        raise ParaVTError("the code has changed since the suite was started; run the same command again")


def _receive(names: queue.SimpleQueue[str]) -> None:
    """Names of stages, one in each line of standard input. The suite holds the other end: when it is gone, however it
    went, so is this process."""
    rest = b""
    while data := os.read(0, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            names.put(line.decode())
    os._exit(1)


def main() -> None:
    """A worker: `python -m paravt.lab.stages DIRECTORY`. It runs the stages it is told to, and ends with the first
    that fails; the last line of the stage's `log.txt` says why."""
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    ours = {kind: code_hash(module) for kind, module in _CODE.items()}  # now: files may change, modules do not
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(names,), daemon=True).start()
    while True:
        name = names.get()
        with (Path(name) / "log.txt").open("ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        try:
            _check_code(name, ours)
            run_stage(name)
        except (ParaVTError, FloatingPointError, OSError) as error:
            print(" ".join(str(error).split()), file=sys.stderr)
            raise SystemExit(1) from None
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
