"""How far stages are and how long they will take, read from the files that they write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paravt.config import SFTRecipe
from paravt.lab.logs import read_lines
from paravt.lab.stages import Kind, Stage

_GUESS: Mapping[Kind, float] = {"sft": 0.6, "rl": 8.0, "evaluation": 15.0}
"""Seconds for a unit (a step, a frame budget) before any was measured: enough to order the stages by."""


@dataclass(frozen=True)
class Progress:
    done: int
    """Units."""
    seconds: float
    """That these took."""


def read_progress(stage: Stage, stages: Path) -> Progress:
    """What its files say; nothing, where one of them is damaged: this is for estimates."""
    try:
        return _read(stage, stages / stage.name)
    except (ValueError, KeyError, TypeError):
        return Progress(0, 0.0)


def _read(stage: Stage, directory: Path) -> Progress:
    if isinstance(stage.recipe, SFTRecipe):
        logs = [read_lines(directory / f"{part.name}.jsonl") for part in stage.recipe.stages]
        ends = [log[-1] for log in logs if log]
        return Progress(sum(end["step"] for end in ends), sum(end["seconds"] for end in ends))
    if stage.kind == "rl":
        rows = read_lines(directory / "timings.jsonl")
        return Progress(len(rows), sum(row["rollout"] + row["learn"] for row in rows))
    done = len(list((directory / "episodes").glob("K*.jsonl")))
    finished = read_lines(directory / "done.json")
    return Progress(done, finished[0]["seconds"] if finished else 0.0)


class Estimates:
    """Seconds for a unit of each kind of stage: what was measured, a guess where nothing was."""

    def __init__(self, stages: Collection[Stage], root: Path) -> None:
        self._stages, self._root = stages, root
        self.progress: dict[str, Progress] = {}
        self.refresh(stages)

    def refresh(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            self.progress[stage.name] = read_progress(stage, self._root)

    def unit(self, kind: Kind) -> float:
        measured = [p for s in self._stages if s.kind == kind and (p := self.progress[s.name]).seconds > 0 and p.done]
        return sum(p.seconds for p in measured) / sum(p.done for p in measured) if measured else _GUESS[kind]

    def left(self, stage: Stage) -> float:
        """Seconds that a stage still needs, by its own pace if it has one."""
        own = self.progress[stage.name]
        unit = own.seconds / own.done if own.done and own.seconds > 0 else self.unit(stage.kind)
        return max(0, stage.units - own.done) * unit


def chains(stages: Mapping[str, Stage], left: Mapping[str, float]) -> dict[str, float]:
    """For each stage that is left, the seconds of the longest chain of stages that begins with it."""
    out: dict[str, float] = {}
    after: dict[str, float] = {}  # the longest chain of the stages that follow each
    for stage in reversed(list(stages.values())):  # children come after their parents
        if stage.name in left:
            out[stage.name] = left[stage.name] + after.get(stage.name, 0.0)
            if stage.parent is not None:
                after[stage.parent] = max(after.get(stage.parent, 0.0), out[stage.name])
    return out


def time_left(chain: Mapping[str, float], left: Mapping[str, float], jobs: int) -> float:
    """Seconds until all is done: no less than the longest chain, and than the work shared by the workers."""
    return max([*chain.values(), sum(left.values()) / jobs], default=0.0)
