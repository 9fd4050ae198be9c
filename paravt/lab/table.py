"""The results of a suite, read from its directory: for each row its numbers for every seed, and means over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paravt.episodes import load_episodes
from paravt.errors import DataError
from paravt.lab.intervals import Estimate, estimate
from paravt.lab.logs import episodes_file, last_words, read_lines
from paravt.lab.numbers import Numbers, evaluation_numbers, training_numbers
from paravt.lab.suite_recipe import RowRecipe, SuiteRecipe
from paravt.types import Episode


@dataclass(frozen=True)
class RowResult:
    name: str
    row: RowRecipe
    numbers: Mapping[int, Numbers]
    """By seed; those that are finished."""
    curves: Mapping[int, list[dict[str, Any]]]
    """The lines of `metrics.jsonl` by seed, finished or not; empty for rows without training."""
    evaluations: Mapping[int, Path]
    """Where the episodes of each seed are."""

    @property
    def title(self) -> str:
        return self.row.title or self.name

    @property
    def columns(self) -> list[str]:
        """Those that any seed has."""
        return sorted({column for numbers in self.numbers.values() for column in numbers})

    def estimate(self, column: str) -> Estimate | None:
        return estimate([numbers.get(column) for numbers in self.numbers.values()])


def budgets(rows: Iterable[RowResult]) -> list[int]:
    """The K that rows were evaluated at, in order."""
    of_kappa = (column.partition("kappa/K")[2] for row in rows for column in row.columns)
    return sorted({int(k) for k in of_kappa if k})


@dataclass(frozen=True)
class Table:
    mode: str
    seeds: int
    suite: SuiteRecipe
    versions: Mapping[str, str]
    rows: Mapping[str, RowResult]
    """In the order of the suite's file, those that were asked for."""
    unfinished: tuple[str, ...]
    """Stages without a result, each with what is known of why."""

    @property
    def budgets(self) -> list[int]:
        """The K of the evaluations, in order; those of the recipe as long as none is finished."""
        return budgets(self.rows.values()) or sorted(self.suite.evaluation.budgets)

    def get(self, row: str, column: str) -> Estimate | None:
        return self.rows[row].estimate(column) if row in self.rows else None


def read_table(directory: Path) -> Table:
    """Everything that the files of a suite say. Raises DataError if there is no suite, or a file is not readable."""
    path = directory / "plan.json"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        suite = SuiteRecipe.model_validate(plan["suite"])
        names = [name for name in suite.rows if name in plan["rows"]]
        runs = {name: [run for run in plan["runs"] if run["row"] == name] for name in names}
        labels: dict[str, str] = plan["labels"]
        mode, seeds, versions = plan["mode"], plan["seeds"], plan["versions"]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; is {directory} the directory of a suite?") from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"{path}: not the plan of a suite of this version: {error!s:.100}") from error
    stages = directory / "stages"
    rows = {name: _read_row(name, suite.rows[name], runs[name], stages) for name in names}
    unfinished = [name for name in labels if not (stages / name / "done.json").exists()]
    return Table(
        mode, seeds, suite, versions, rows, tuple(f"{labels[name]}: {_reason(stages / name)}" for name in unfinished)
    )


def _read_row(name: str, row: RowRecipe, runs: list[dict[str, Any]], stages: Path) -> RowResult:
    numbers: dict[int, Numbers] = {}
    curves: dict[int, list[dict[str, Any]]] = {}
    evaluations: dict[int, Path] = {}
    for run in runs:
        seed, training, evaluation = run["seed"], run["training"], stages / run["evaluation"]
        if training is not None and (lines := _lines(stages / training, "metrics.jsonl")):
            curves[seed] = lines
        if (evaluation / "done.json").exists():
            evaluations[seed] = evaluation
            numbers[seed] = evaluation_numbers(read_evaluation(evaluation)) | _seconds(evaluation)
            if training is not None:
                numbers[seed] |= training_numbers(curves.get(seed, []), _lines(stages / training, "timings.jsonl"))
    return RowResult(name, row, numbers, curves, evaluations)


def read_evaluation(directory: Path) -> list[Episode]:
    """All episodes of a finished evaluation, the smallest K first. Raises DataError unless all are there."""
    out: list[Episode] = []
    try:
        asked = json.loads((directory / "stage.json").read_text(encoding="utf-8"))["recipe"]["evaluation"]
        for budget in sorted(set(asked["budgets"])):
            episodes = load_episodes(file := episodes_file(directory, budget))
            if len(episodes) != asked["questions"]:  # of an empty file there would be other means, and no word of it
                raise DataError(f"{file}: {len(episodes)} of {asked['questions']} episodes")
            out += episodes
    except DataError as error:
        raise DataError(f"{error}; {_again(directory)}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{directory}: damaged: {error}; {_again(directory)}") from error
    return out


def _seconds(evaluation: Path) -> Numbers:
    lines = _lines(evaluation, "done.json")
    if not lines or not isinstance(lines[0].get("seconds"), int | float):
        raise DataError(f"{evaluation / 'done.json'}: damaged; {_again(evaluation)}")
    return {"seconds": lines[0]["seconds"]}


def _lines(stage: Path, file: str) -> list[dict[str, Any]]:
    """`read_lines` of a file of a stage. Raises DataError if it is damaged."""
    try:
        lines = read_lines(stage / file)
    except (ValueError, OSError) as error:
        raise DataError(f"{stage / file}: damaged: {error}; {_again(stage)}") from error
    if not all(isinstance(line, dict) for line in lines):
        raise DataError(f"{stage / file}: damaged: a line is no mapping; {_again(stage)}")
    return lines


def _again(stage: Path) -> str:
    return f"remove {stage} and run the suite again"


def _reason(stage: Path) -> str:
    said = last_words(stage / "log.txt")
    return f"not finished; last said: {said}" if said else "not started"
