"""How far supervised training is: a bar for each stage on a terminal, a line for each step in a log file."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.text import Text

from paravt.config import Stage

_SHOWN = {
    "loss": "loss",
    "right": "token_accuracy",
    "valid": "validation/loss",
    "f": "episodes/f_strict",
    "acc": "episodes/reward/accuracy",
    "grad": "grad_norm",
    "lr": "learning_rate",
    "tokens": "tokens",
    "s": "seconds",
    "wait": "data_wait_share",
}


def open_bars(console: Console) -> Progress:
    """A context manager. Without a terminal it shows nothing."""
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    return Progress(*columns, console=console, disable=not console.is_terminal)


class StageProgress:
    def __init__(self, bars: Progress, stage: Stage) -> None:
        self._bars, self._stage = bars, stage
        self._task = bars.add_task(stage.name, total=stage.steps, loss=math.nan)

    def update(self, step: int, loss: float | None = None) -> None:
        """Only the bar."""
        fields = {} if loss is None else {"loss": loss}
        self._bars.update(self._task, completed=step, **fields)  # type: ignore[arg-type]  # a field of our own

    def say(self, step: int, values: Mapping[str, float]) -> None:
        self.update(step, values["loss"])
        if not self._bars.console.is_terminal:
            shown = " ".join(f"{name} {values[key]:.3g}" for name, key in _SHOWN.items() if key in values)
            line = f"{self._stage.name}: step {step} of {self._stage.steps}: {shown}"
            self._bars.console.print(Text(line), soft_wrap=True)
