"""What a run leaves behind while it goes on, except checkpoints: metrics, timings, episodes, curves, warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.console import Group as Below
from rich.live import Live
from rich.progress import Progress
from rich.text import Text

from paravt.config import RLRecipe
from paravt.credit import TraceCredit
from paravt.episodes import save_episodes
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.metrics import MetricsFile
from paravt.report import plot_run
from paravt.rollout import Group
from paravt.trackers import open_tracker
from paravt.watch import Watch

_SHOWN = {
    "reward": "reward/total",
    "acc": "reward/accuracy",
    "f": "f_strict",
    "graded": "f_graded",
    "calls": "kappa",
    "entropy": "entropy",
    "kl": "token/kl_old",
    "clipped-": "token/clipped_low",
    "clipped+": "token/clipped_high",
    "mismatch": "token/mismatch",
    "equal": "equal_groups",
    "unscored": "unscored",
    "behind": "staleness/mean",
    "tokens/s": "tokens_per_second",
}


class Record:
    """The files of a run and its progress line; a context manager. `done` steps are there already, later ones go."""

    def __init__(self, recipe: RLRecipe, out: Path, console: Console, done: int) -> None:
        self._recipe, self._out, self._console = recipe, out, console
        self._metrics, self._timings = MetricsFile(out / "metrics.jsonl"), MetricsFile(out / "timings.jsonl")
        self._watch = Watch(recipe.watch)
        self._warnings = out / "warnings.txt"
        self._look_again(self._metrics.cut(done))
        self._timings.cut(done)
        self._trackers = [open_tracker(name, out, recipe.model_dump()) for name in recipe.trackers]
        self._progress = Progress(console=console)
        self._task = self._progress.add_task("rl", total=recipe.steps, completed=done)
        self._live = Live(self._progress, console=console)

    def _look_again(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show the watch the steps that are there already: what has lasted goes on lasting in a run that is resumed."""
        told = []
        for row in rows:
            known = {name: value for name, value in row.items() if value is not None}
            told += self._watch.look(row["step"], known)
        if told or self._warnings.exists():
            write_whole(self._warnings, "".join(f"{warning}\n" for warning in told))

    def __enter__(self) -> Record:
        if self._console.is_terminal:  # a log file has a line for each step instead
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()
        for tracker in self._trackers:
            tracker.close()
        # on a full disk, what failed first is what has to be said
        if self._metrics.path.exists() and not isinstance(error, DataError | OSError):
            plot_run(self._metrics.path, self._out / "curves.png")

    def saves(self, step: int) -> bool:
        """Whether the episodes of a step are kept."""
        return step % self._recipe.episodes_every == 0 or step == 1

    def add(
        self,
        step: int,
        values: dict[str, float],
        timings: dict[str, float],
        groups: Sequence[Group],
        credit: Sequence[Mapping[str, TraceCredit]] = (),
    ) -> bool:
        """Write down a step; True if the collapse watch ends the run.

        `values` are the same in every run where runs are deterministic; `timings` are not, and have their own file.
        `credit` is that of each episode of the groups, in their order, where the step is one that `saves`.
        """
        self._metrics.add(step, values)
        self._timings.add(step, timings)
        if self.saves(step):
            episodes = [(group.id, episode) for group in groups for episode in group.episodes]
            save_episodes(episodes, self._out / "episodes" / f"step-{step:06d}.jsonl", credit)
        every = {**values, **timings}
        for tracker in self._trackers:
            tracker.log(step, {name: value for name, value in every.items() if math.isfinite(value)})
        shown = " ".join(f"{name} {every[key]:.3g}" for name, key in _SHOWN.items() if key in every)
        self._progress.update(self._task, completed=step)
        self._live.update(Below(self._progress, Text(shown, "dim")))
        if not self._console.is_terminal:  # a log file
            self._console.print(Text(f"step {step} of {self._recipe.steps}: {shown}"), soft_wrap=True)
        warnings = self._watch.look(step, values)
        for warning in warnings:
            self._console.print(Text(f"warning: {warning}", "bold red"))
            with self._warnings.open("a", encoding="utf-8") as file:
                file.write(warning + "\n")
        return bool(warnings) and self._recipe.watch.stop
