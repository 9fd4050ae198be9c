"""How far a run is: a live line in a terminal, a line every now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from paravt.bench.scoring import Verdict
from paravt.terminal import clock

_EVERY = 30.0
"""Seconds between two lines in a log file."""


class RunProgress:
    """A context manager; `add` is told of every row, those of earlier runs first."""

    def __init__(self, console: Console, total: int, every: float = _EVERY) -> None:
        self._console, self._total, self._every = console, total, every
        self._done = self._earlier = self._graded = self._failed = 0
        self._credit = 0.0
        self._began = self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("eval", total=total, state="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, row: Verdict, *, earlier: bool = False) -> None:
        self._done += 1
        self._earlier += earlier
        self._graded += row.outcome != "no_gold"
        self._failed += row.outcome == "failed"
        self._credit += row.value or 0.0
        self._bar.update(self._task, completed=self._done, state=self.state())
        now = time.monotonic()
        if not earlier and not self._console.is_terminal and (now - self._said >= self._every or self._at_end()):
            self._said = now
            self._console.print(
                Text(f"eval: {self._done} of {self._total}, {self.state()}{self._eta()}"), soft_wrap=True
            )

    def state(self) -> str:
        played = self._graded > self._failed
        share = f"score {100 * self._credit / self._graded:.1f} %" if played else "no score"
        return f"{share}, {self._failed} failed" if self._failed else share

    def _at_end(self) -> bool:
        return self._done == self._total

    def _eta(self) -> str:
        pace = (time.monotonic() - self._began) / max(1, self._done - self._earlier)
        return "" if self._at_end() else f", about {clock(pace * (self._total - self._done))} left"
