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
from contextlib import suppress
from dataclasses import asdict
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

_POLL = 0.25
"""Seconds between two looks at the workers."""
_STAGES_EACH = 4
"""Of a worker, before a fresh one takes its place: what an engine's thread has freed stays with the allocator, up to
twice of what one stage needs, although nothing refers to it any more."""

ModeName = Literal["quick", "standard", "full"]


def run_suite(
    out: Path,
    console: Console,
    mode: ModeName = "standard",
    seeds: int | None = None,
    only: Sequence[str] = (),
    jobs: int | None = None,
    file: Path | None = None,
    changes: Sequence[str] = (),
) -> dict[str, str]:
    """Run a suite (default: the package's) and write its report to `out`; returns what failed, and why.

    `only` names rows, whatever the mode's are; `changes` are made to every recipe of reinforcement learning. Raises
    RecipeError for a suite that is not valid, rows that do not exist, and a directory in which another suite runs.
    """
    suite, path = load_suite(file)
    if mode not in suite.modes:
        raise RecipeError(f"{path}: modes: there is no {mode!r}")
    chosen = suite.modes[mode]
    chosen = chosen.model_copy(update={"set": (*chosen.set, *changes)})
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


class _Worker:
    """A process that runs one stage after another: loading the libraries takes as long as a small stage."""

    def __init__(self, stages: Path, log: Path) -> None:
        command = [sys.executable, "-m", "paravt.lab.stages", str(stages.resolve())]
        with log.open("ab") as file:  # what it says before its first stage
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file)
        self.stage: Stage | None = None
        self.started = 0.0
        self.ran = 0

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, stage: Stage) -> None:
        self.stage, self.started = stage, time.monotonic()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it has just died, which is seen when it is looked at
                self.process.stdin.write(f"{stage.name}\n".encode())
                self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


def run_stages(plan: Plan, stages: Path, jobs: int, console: Console) -> dict[str, str]:
    """Finish all stages that can be finished; what failed or had to be left out, with the reason, by name."""
    stages.mkdir(parents=True, exist_ok=True)
    suite = _Suite(plan, stages, jobs, console)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while suite.step():
                live.update(suite.render(), refresh=True)
                time.sleep(_POLL)
            live.update(suite.render(), refresh=True)
    finally:
        for worker in suite.workers:
            worker.end()
    return suite.failed


class _Suite:
    def __init__(self, plan: Plan, stages: Path, jobs: int, console: Console) -> None:
        self.plan, self.stages, self.jobs, self.console = plan, stages, jobs, console
        self.done = {name for name in plan.stages if is_done(stages, name)}
        self.failed: dict[str, str] = {}
        self.workers: list[_Worker] = []
        self.estimates = Estimates(plan.stages.values(), stages)
        if self.done:
            console.print(f"{len(self.done)} of {len(plan.stages)} stages are done already")

    def step(self) -> bool:
        """Take note of what ended, start what can start; False when all is over."""
        for worker in list(self.workers):
            alive = worker.alive  # before it is looked for what it left
            if worker.stage is not None and (not alive or is_done(self.stages, worker.stage.name)):
                self.ended(worker, worker.stage)
            if not alive or worker.ran == _STAGES_EACH:
                self.workers.remove(worker)
                worker.end()
        running = self.running
        waiting = [s for s in self.plan.stages.values() if s.name not in self.over and s.name not in running]
        ready = [stage for stage in waiting if stage.parent is None or stage.parent in self.done]
        free = self.jobs - sum(self.plan.stages[name].threads for name in running)
        if free > 0 and ready:
            chain = chains(self.plan.stages, self.left())
            for stage in sorted(ready, key=lambda stage: -chain[stage.name]):
                # threads that share a core wait for one another several times longer than they compute
                if self.running and stage.threads > free:
                    break  # later ones do not go before it: it would never find the room
                self.start(stage)
                free -= stage.threads
        return bool(self.running)

    @property
    def running(self) -> dict[str, _Worker]:
        return {worker.stage.name: worker for worker in self.workers if worker.stage is not None}

    @property
    def over(self) -> set[str]:
        return self.done | set(self.failed)

    def left(self) -> dict[str, float]:
        return {name: self.estimates.left(s) for name, s in self.plan.stages.items() if name not in self.over}

    def start(self, stage: Stage) -> None:
        log = prepare(stage, self.stages) / "log.txt"
        log.write_bytes(b"")
        worker = next((worker for worker in self.workers if worker.stage is None and worker.alive), None)
        if worker is None:
            worker = _Worker(self.stages, log)
            self.workers.append(worker)
        worker.run(stage)

    def ended(self, worker: _Worker, stage: Stage) -> None:
        worker.stage = None
        worker.ran += 1
        self.estimates.refresh([stage])
        if is_done(self.stages, stage.name):
            self.done.add(stage.name)
            took = clock(time.monotonic() - worker.started)
            self.console.print(Text(f"done    {stage.kind:10} {stage.label} ({took})"))
        else:
            said, code = last_words(self.stages / stage.name / "log.txt"), worker.process.returncode
            self.fail(stage, said if said and code > 0 else f"ended with code {code}; last said: {said or 'nothing'}")

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
        stages = [self.plan.stages[name] for name in self.running]
        self.estimates.refresh(stages)
        for stage in stages:
            done = self.estimates.progress[stage.name].done
            table.add_row(stage.kind, stage.label, f"{done}/{stage.units}", clock(self.estimates.left(stage)))
        left = self.left()
        rest = clock(time_left(chains(self.plan.stages, left), left, self.jobs))
        summary = f"{len(self.done)} of {len(self.plan.stages)} stages done, {len(self.failed)} failed, {rest} left"
        return Group(table, Text(summary, "bold"))
