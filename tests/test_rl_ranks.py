"""The training loop in several processes, and ahead of itself.

Locked here: two processes give the metrics and the weights of one within float error, also when all of them are killed
in between, and when a run goes on with another number of processes; whichever process fails ends the run with its one
line; a run that samples ahead does so while the learner works, learns from nothing older than it may, and uses every
prompt once, also across a restart.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_rl import QUIET, metrics
from test_rl import recipe as small_recipe

from paravt.ask import shipped_model
from paravt.config import RLRecipe
from paravt.data import SampleStream
from paravt.engines.local import LocalEngine
from paravt.errors import DataError, RecipeError
from paravt.lab.factory import train_rl
from paravt.lab.questions import question
from paravt.learner import Learner, StepMetrics
from paravt.models import load_model
from paravt.types import Episode, Score

# With a large eps AdamW's first step is proportional to the gradient; with the usual one it would be its sign, which is
# noise where the gradient is. An uneven number of prompts gives the processes different shares.
CHANGES = ("rollout.prompts=3", "keep_checkpoints=3", "optimizer.eps=1.0", "optimizer.learning_rate=0.1",
           "rollout.max_refills=1", "episodes_every=1", "budget_weights=pass_rate")  # fmt: skip


def recipe(*changes: str) -> RLRecipe:
    return small_recipe("full", *CHANGES, *changes)


def command(out: Path, directory: Path, *options: str, processes: int = 2, changes: tuple[str, ...] = ()) -> list[str]:
    """The command line of `recipe(*changes)` in several processes."""
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(json.loads(recipe(*changes).model_dump_json())))  # YAML, too
    start = [sys.executable, "-c", "from paravt.cli import main; main()", "rl", str(path), "--out", str(out)]
    return [*start, "--nproc", str(processes), *options]


PATIENCE = 500.0
"""Seconds; a busy machine takes its time."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def run(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=580, check=False, env=ENVIRONMENT)


def checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:06d}"


def assert_same(first: Path, second: Path, since: int = 1) -> None:
    """Metrics from a step on and the last weights, within float error; the same tokens were sampled."""
    one, other = ([row for row in metrics(out) if row["step"] >= since] for out in (first, second))
    assert len(one) == len(other) == 4 - since
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if name.startswith("token/mismatch"):  # float error is all there is of it
                assert max(value, b[name]) < 1e-4
            elif name not in ("microbatches", "packed_tokens"):  # dummy rows count
                assert value == pytest.approx(b[name], rel=1e-3, abs=1e-5), (a["step"], name)
    start = load_model(shipped_model()).module.state_dict()
    ends = [load_model(checkpoint(out, 3) / "model").module.state_dict() for out in (first, second)]
    updates = [torch.cat([(end[name] - start[name]).flatten() for name in start]) for end in ends]
    assert updates[0].norm() > 1e-3
    assert (updates[0] - updates[1]).norm() / updates[0].norm() < 1e-3
    for step in range(since, 4):
        groups = [episodes(out, step) for out in (first, second)]
        assert groups[0] == groups[1]


def episodes(out: Path, step: int) -> list[tuple[str, list[int]]]:
    lines = (out / "episodes" / f"step-{step:06d}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["group"], [i for segment in row["main"]["segments"] for i in segment["ids"]]) for row in rows]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    train_rl(recipe(), out, QUIET)
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two processes, which are killed after the first step and started again."""
    directory = tmp_path_factory.mktemp("two")
    out = directory / "run"
    line = command(out, directory)
    killed = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        wait_for(checkpoint(out, 1), killed)
        delay = random.random() * 0.5  # anywhere: sampling, learning, or in the middle of a checkpoint
        print(f"killed {delay:.3f} s after step 1")
        time.sleep(delay)
    finally:
        for process in (killed.pid, *children(killed.pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed.communicate(timeout=60)
    done = run(line)
    assert done.returncode == 0, done.stderr
    return out


def wait_for(there: Path, process: subprocess.Popen[str]) -> None:
    """For a file of a run that goes on meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not there.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, f"no {there}"
        time.sleep(0.02)


def children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def test_two_processes_killed_and_started_again_do_what_one_does(one: Path, two: Path) -> None:
    assert_same(one, two)
    assert not list((two / "checkpoints").glob("*.partial"))


def test_a_run_of_two_processes_goes_on_in_one(one: Path, two: Path, tmp_path: Path) -> None:
    train_rl(recipe(), tmp_path / "run", QUIET, resume=str(checkpoint(two, 1)))
    assert_same(one, tmp_path / "run", since=2)


def test_a_run_of_one_process_goes_on_in_two(one: Path, tmp_path: Path) -> None:
    done = run(command(tmp_path / "run", tmp_path, "--resume", str(checkpoint(one, 1))))
    assert done.returncode == 0, done.stderr
    assert_same(one, tmp_path / "run", since=2)


def bad_reward(episode: Episode) -> Score:
    """Fails in the second process only."""
    if dist.get_rank() == 1:
        raise DataError("reward: the table of answers is damaged")
    return Score(0.5)


def deadly_reward(episode: Episode) -> Score:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return Score(0.5)


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("bad_reward", DataError.exit_code, "paravt: reward: the table of answers is damaged"),
        ("deadly_reward", 1, "paravt: process 1 of 2 was killed (SIGKILL)"),
    ],
)
def test_a_process_that_fails_ends_the_run_with_one_line(
    function: str, code: int, message: str, tmp_path: Path
) -> None:
    done = run(command(tmp_path / "run", tmp_path, changes=(f"reward.functions=[test_rl_ranks:{function}]",)))
    assert done.returncode == code, done.stderr
    assert [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("rl ")] == [message]


def test_what_is_wrong_from_the_start_is_one_line_too(one: Path, tmp_path: Path) -> None:
    done = run(command(one, tmp_path, changes=("seed=7",)))
    assert done.returncode == 2
    difference = "(seed: 0, now 7)"
    assert done.stderr.strip().splitlines() == [
        f"paravt: {one}: holds a run of another recipe {difference}; choose another --out"
    ]


# ------------------------------------------------------------------ ahead


AHEAD = ("deterministic=false", "rollout.max_staleness=1", "rollout.max_concurrent=2", "rollout.max_refills=0")


def used(out: Path, steps: range) -> list[str]:
    """The samples of the groups of these steps, once for each group."""
    groups = dict.fromkeys(group for step in steps for group, _ in episodes(out, step))
    return [group.split("/", 1)[1] for group in groups]


def test_sampling_ahead_overlaps_and_nothing_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    forward: Callable[..., Any] = LocalEngine._forward
    step: Callable[..., StepMetrics] = Learner.step

    def counted(self: LocalEngine, *args: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(self, *args)

    def waits(self: Learner, *args: Any) -> StepMetrics:
        """Goes on only when the engine has, which it can only while this runs."""
        before, deadline = passes, time.monotonic() + 120
        while self.steps < 2 and passes < before + 3:  # nothing is ahead of the last step
            assert time.monotonic() < deadline, "the engine does not run while the learner works"
            time.sleep(0.01)
        return step(self, *args)

    monkeypatch.setattr(LocalEngine, "_forward", counted)
    monkeypatch.setattr(Learner, "step", waits)
    out = tmp_path / "run"
    train_rl(recipe(*AHEAD), out, QUIET)
    rows = metrics(out)
    assert len(rows) == 3
    assert rows[0]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in rows) == 1
    assert all(row["episodes"] == 6 for row in rows)
    assert rows[0]["token/mismatch"] < 1e-4  # of the same weights
    assert max(row["token/mismatch"] for row in rows) > 1e-4  # of older ones
    run = json.loads((checkpoint(out, 2) / "run.json").read_text())
    assert not json.loads((checkpoint(out, 3) / "run.json").read_text())["cursor"]["put_back"]

    # Stopped after the second step and started again: the prompts in flight come again, the others do not.
    assert run["cursor"]["put_back"]
    monkeypatch.undo()
    again = tmp_path / "again"
    train_rl(recipe(*AHEAD), again, QUIET, resume=str(checkpoint(out, 2)))
    before, after = used(out, range(1, 3)), used(again, range(3, 4))
    assert len(before) == 6
    assert len(after) == 3
    taken = {draw.sample.id for draw in first_draws(9)}
    assert {name.split("@")[0] for name in (*before, *after)} == taken


def first_draws(count: int) -> list[Any]:
    return SampleStream([question(f"rl-{number}", 0).sample for number in range(50)], 0).take(count)


def test_deterministic_runs_do_not_run_ahead() -> None:
    with pytest.raises(RecipeError, match=r"do not run ahead: set deterministic: false or rollout\.max_staleness: 0"):
        recipe("rollout.max_staleness=1")
