"""The lab's suite: a tiny version of each stage, end to end, through the command line.

Locked here: killed at any moment and started again it goes on, and a third time does nothing; the same seed gives the
same numbers; every number of the report is one of the run's files; what a model wrote stays text; a stage that fails
costs what depends on it and nothing else.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paravt.ask import shipped_model

RECIPES = Path(__file__).parents[1] / "recipes" / "lab"
SFT: dict[str, Any] = {
    "model": {"kind": "pretrained", "path": str(shipped_model()), "dtype": "float32"},
    "checkpoint_every": 1,
    "stages": [{"name": "act", "steps": 1, "batch_size": 2, "learning_rate": 1e-5, "warmup_steps": 0,
                "data": {"kinds": {"parallel": 1}, "budgets": [4]}}],
}  # fmt: skip
SMALL = ["steps=2", "data.videos=20", "rollout.prompts=2", "rollout.group_size=2", "frame_budgets=[4, 8]",
         "episode.frame_budget=8", "checkpoint_every=1", "episode.max_tokens=48"]  # fmt: skip
SUITE: dict[str, Any] = {
    "models": {"strong": {"recipe": "sft.yaml"},
               "dose": {"recipe": "sft.yaml", "start": "strong", "set": ["seed=1"]}},
    "start": "dose",
    "reference": str(RECIPES / "rl" / "vanilla.yaml"),
    "evaluation": {"questions": 3, "budgets": [4, 8], "temperature": 1.0},
    "sections": {"main": {"title": "Main"}, "peers": {"title": "Peers", "also": ["full"]}},
    "rows": {
        "sft": {"model": "dose", "published": {"f": 0.13, "kappa": 2.5}},
        "vanilla": {"recipe": str(RECIPES / "rl" / "vanilla.yaml")},
        "full": {"recipe": str(RECIPES / "rl" / "full.yaml")},
        "wrong": {"section": "peers", "recipe": str(RECIPES / "rl" / "full.yaml"),
                  "evaluation": {"dispatch": "sequential", "faults": {"calls": 1}}},
    },
    "doses": {"one": {"start": "sft", "vanilla": "vanilla"}},
    "criteria": [{"name": "The tool is called", "column": "kappa", "at_least": 0.5}],
    "targets": [{"name": "Full is above", "row": "full", "column": "accuracy", "above": "vanilla"}],
    "samples": ["sft", "full"],
    "modes": {"quick": {"seeds": 1, "set": SMALL}, "standard": {"seeds": 1, "rows": ["sft"], "set": SMALL}},
}  # fmt: skip


def write_suite(directory: Path, suite: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sft.yaml").write_text(yaml.safe_dump(SFT))
    path = directory / "suite.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return path


def command(suite: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-c", "from paravt.cli import main; main()", "lab", "run", "--quick", "--jobs", "2",
            "--suite", str(suite), "--out", str(out), *more]  # fmt: skip


def run(suite: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(suite, out, *more), capture_output=True, text=True, timeout=300, check=False)


def done(out: Path) -> dict[str, float]:
    return {path.parent.name: path.stat().st_mtime for path in (out / "stages").glob("*/done.json")}


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a suite that was killed after its first stage, while others ran, and started again."""
    place = tmp_path_factory.mktemp("suite")
    suite, out = write_suite(place, SUITE), place / "out"
    process = subprocess.Popen(command(suite, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while len(done(out)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = done(out)
    assert 2 <= len(before) < 8
    again = run(suite, out)
    assert again.returncode == 0, again.stderr
    assert {name: time for name, time in done(out).items() if name in before} == before
    assert len(done(out)) == 8  # 2 models, 2 runs, 4 evaluations
    return out
