"""The suite: runs the stages of a plan on several processes, the longest chain first, and writes the report.

Stopped at any moment, kill -9 included, the same command goes on: finished stages are kept, the others resume. A stage
that fails is reported with its reason, and what does not depend on it goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paravt.errors import RecipeError
from paravt.files import write_whole
from paravt.lab.logs import last_words
from paravt.lab.progress import Estimates, chains, time_left
from paravt.lab.results import write_report
from paravt.lab.stages import Plan, Stage, is_done, plan_suite, prepare
from paravt.lab.suite_recipe import load_suite
from paravt.provenance import lock_directory, provenance
from paravt.terminal import clock, printable

ModeName = Literal["quick", "standard", "full"]


def run_suite(
    out: Path,
    console: Console,
    mode: ModeName = "standard",
    seeds: int | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    file: Path | None = None,
) -> dict[str, str]:
    """Run a suite (default: the package's) and write its report to `out`; returns what failed, and why.

    `only` names rows, whatever the mode's are. Raises RecipeError for a suite that is not valid, rows that do not
    exist, and a directory in which another suite runs.
    """
    suite, path = load_suite(file)
    if mode not in suite.modes:
        raise RecipeError(f"{path}: modes: there is no {mode!r}")
    chosen = suite.modes[mode]
    unknown = [name for name in only if name not in suite.rows]
    if unknown:
        raise RecipeError(f"there is no row {unknown[0]!r}; the rows are {', '.join(suite.rows)}")
    rows = list(only) or list(chosen.rows or suite.rows)
    plan = plan_suite(suite, path, chosen, rows, seeds or chosen.seeds)
    with lock_directory(out):
        description = {
            "mode": mode,
            "seeds": seeds or chosen.seeds,
            "rows": rows,
            "suite": suite.model_dump(mode="json"),
            "versions": provenance(),
            "runs": [asdict(run) for run in plan.runs],
            "labels": {name: stage.label for name, stage in plan.stages.items()},
        }
        write_whole(out / "plan.json", json.dumps(description, indent=1) + "\n")
        failed = run_stages(plan, out / "stages", jobs or os.cpu_count() or 1, console)
        write_report(out)
    return failed


@dataclass
class _Worker:
    stage: Stage
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)


def run_stages(plan: Plan, stages: Path, jobs: int, console: Console) -> dict[str, str]:
    """Finish all stages that can be finished; what failed or had to be left out, with the reason, by name."""
    stages.mkdir(parents=True, exist_ok=True)
    suite = _Suite(plan, stages, jobs, console)
    try:
        with Live(console=console, refresh_per_second=2, get_renderable=suite.render):
            while suite.step():
                time.sleep(0.1)
    finally:
        for worker in suite.running.values():
            worker.process.kill()
            worker.process.wait()
    return suite.failed


class _Suite:
    def __init__(self, plan: Plan, stages: Path, jobs: int, console: Console) -> None:
        self.plan, self.stages, self.jobs, self.console = plan, stages, jobs, console
        self.done = {name for name in plan.stages if is_done(stages, name)}
        self.failed: dict[str, str] = {}
        self.running: dict[str, _Worker] = {}
        self.estimates = Estimates(plan.stages.values(), stages)
        if self.done:
            console.print(f"{len(self.done)} of {len(plan.stages)} stages are done already")

    def step(self) -> bool:
        """Take note of what ended, start what can start; False when all is over."""
        for name, worker in list(self.running.items()):
            if worker.process.poll() is not None:
                del self.running[name]
                self.ended(worker)
        waiting = [s for s in self.plan.stages.values() if s.name not in self.over and s.name not in self.running]
        ready = [stage for stage in waiting if stage.parent is None or stage.parent in self.done]
        chain = chains(self.plan.stages, self.left())
        for stage in sorted(ready, key=lambda stage: -chain[stage.name])[: self.jobs - len(self.running)]:
            self.start(stage)
        return bool(self.running)

    @property
    def over(self) -> set[str]:
        return self.done | set(self.failed)

    def left(self) -> dict[str, float]:
        return {name: self.estimates.left(s) for name, s in self.plan.stages.items() if name not in self.over}

    def start(self, stage: Stage) -> None:
        directory = prepare(stage, self.stages)
        command = [sys.executable, "-m", "paravt.lab.stages", str(self.stages.resolve()), stage.name]
        with (directory / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
        self.running[stage.name] = _Worker(stage, process)

    def ended(self, worker: _Worker) -> None:
        stage, took = worker.stage, clock(time.monotonic() - worker.started)
        self.estimates.refresh([stage])
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        if is_done(self.stages, stage.name):
            self.done.add(stage.name)
            self.console.print(Text(f"done    {stage.kind:10} {stage.label} ({took})"))
            return
        reason = last_words(self.stages / stage.name / "log.txt") or f"exit code {worker.process.returncode}"
        self.fail(stage, reason)

    def fail(self, stage: Stage, reason: str) -> None:
        self.failed[stage.name] = reason
        self.console.print(Text(f"failed  {stage.kind:10} {stage.label}: {printable(reason)}", "red"))
        for child in self.plan.stages.values():
            if child.parent == stage.name and child.name not in self.over:
                self.fail(child, f"needs {stage.name}, which failed")

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for heading in ("running", "", "done", "left"):
            table.add_column(heading)
        workers = list(self.running.values())
        self.estimates.refresh([worker.stage for worker in workers])
        for worker in workers:
            stage, done = worker.stage, self.estimates.progress[worker.stage.name].done
            table.add_row(stage.kind, stage.label, f"{done}/{stage.units}", clock(self.estimates.left(stage)))
        left = self.left()
        rest = clock(time_left(chains(self.plan.stages, left), left, self.jobs))
        summary = f"{len(self.done)} of {len(self.plan.stages)} stages done, {len(self.failed)} failed, {rest} left"
        return Group(table, Text(summary, "bold"))
