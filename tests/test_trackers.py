"""Trackers: missing ones are found out early, and what is there gets the values of every step."""

from __future__ import annotations

from pathlib import Path

import pytest

import paravt.trackers
from paravt.errors import RecipeError
from paravt.trackers import check_trackers, open_tracker


def test_a_missing_tracker_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paravt.trackers, "find_spec", lambda name: None)
    check_trackers([])
    with pytest.raises(RecipeError, match=r"^trackers: wandb is not installed; pip install wandb$"):
        check_trackers(["wandb"])
    with pytest.raises(RecipeError, match="trackio"):
        open_tracker("trackio", tmp_path, {})


def test_a_run_and_its_continuation_have_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With packages of these names that write down what they are told: only the names are ours."""
    told = tmp_path / "told.txt"
    for name in ("wandb", "trackio"):
        text = f"""
def init(**options):
    open({str(told)!r}, "a").write(f"{{sorted(options)}} {{options['name']}} {{options['resume']}}\\n")
def log(values, step): open({str(told)!r}, "a").write(f"{{step}} {{values}}\\n")
def finish(): open({str(told)!r}, "a").write("finished\\n")
"""
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("wandb", "trackio", "trackio"):
        tracker = open_tracker(name, tmp_path / "run", {"seed": 1})
        tracker.log(3, {"reward/total": 0.5})
        tracker.close()
    lines = told.read_text().splitlines()
    assert lines[1::3] == ["3 {'reward/total': 0.5}"] * 3
    assert lines[2::3] == ["finished"] * 3
    assert lines[3] == lines[6] != lines[0]
    assert "'dir', 'id'" in lines[0]
    assert len({line.split("] ")[1] for line in lines[::3]}) == 1
    open_tracker("trackio", tmp_path / "elsewhere" / "run", {})
    assert told.read_text().splitlines()[-1] not in lines
