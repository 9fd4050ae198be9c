"""What a run writes while it goes on: a resumed one warns as one that was not stopped."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from paravt.config import RLRecipe
from paravt.record import Record

RECIPE = RLRecipe.model_validate(
    {"model": {"kind": "pretrained", "path": "unused"}, "steps": 8, "watch": {"patience": 3, "min_kappa": 0.5}}
)
CALLS = (1.0, 0.1, 0.2, 0.0, 0.1, 0.3, 0.4, 1.0)


def record(out: Path, done: int, last: int) -> None:
    with Record(RECIPE, out, Console(quiet=True), done) as written:
        for step in range(done + 1, last + 1):
            written.add(step, {"kappa": CALLS[step - 1], "groups": 1.0, "episodes": 1.0}, {}, [])


def test_a_resumed_run_warns_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for out in (whole, resumed):
        out.mkdir()
    record(whole, 0, 8)
    record(resumed, 0, 5)  # warned at step 4; stopped, with its newest checkpoint at step 3
    record(resumed, 3, 6)
    record(resumed, 6, 8)
    told = (whole / "warnings.txt").read_text()
    assert [line.split(":")[0] for line in told.splitlines()] == ["step 4", "step 7"]
    assert (resumed / "warnings.txt").read_text() == told
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
