"""Run directories that are hostile or unlucky: what is absurd costs what it stands in, nothing leads out of a run's own
directory, neither to be read nor to be written, and nothing makes a report hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_run
from test_eval_directory import Answerer, play, samples

from paravt.errors import DataError
from paravt.report import write_report
from paravt.report.library import Library
from paravt.report.plots import plot_runs
from paravt.report.reading import Notes, to_json
from paravt.report.schema import Report
from paravt.report.suites import suite_sources

HUGE = 10**400
"""An integer that no float can hold."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two episodes."""
    return write_run(tmp_path / "run", steps=1, groups=1, size=2)


def read(path: Path) -> tuple[Report, list[str]]:
    notes = Notes()
    report = Library([path]).report(notes)
    assert to_json(report)
    return report, notes.lines


def test_absurd_numbers_and_nesting_cost_their_line_alone(run: Path, tmp_path: Path) -> None:
    file = run / "episodes" / "step-000001.jsonl"
    good = [json.loads(line) for line in file.read_text().splitlines()]

    def changed(*where: Any) -> dict[str, Any]:
        line: dict[str, Any] = deepcopy(good[0])
        place: Any = line
        for key in where[:-2]:
            place = place[key]
        place[where[-2]] = where[-1]
        return line

    nested: Any = []
    for _ in range(900):
        nested = [nested]
    bad = [
        changed("rewards", "total", "value", HUGE),
        changed("rewards", "total", "value", -HUGE),
        changed("timings", "total", HUGE),
        changed("format", nested),
    ]
    shown_in_part = [
        changed("crops", 0, "window", "start_time", HUGE),
        changed("main", "segments", 1, "logprobs", 0, HUGE),
        changed("duration", HUGE),
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*bad, *shown_in_part, *good]))
    report, notes = read(run)
    assert len(report["runs"][0]["episodes"]) == len(shown_in_part) + len(good)
    assert len(notes) == 1
    assert f"{len(bad)} lines are no episode" in notes[0]
    assert len(write_report([run], tmp_path / "report.html")) == 1


def test_calls_that_never_end_are_read_all_the_same() -> None:
    code = """
from paravt.report.episode_view import call_texts
from paravt.types import BadToolCall, Turn

def texts(text):
    return call_texts(Turn(text, None, (BadToolCall("as understood", "why"),), None, False))

print(texts("<tool_call>" * 400_000), texts("x<tool_call> a <tool_call></tool_call></tool_call><tool_call>"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "['as understood'] ['a <tool_call>']\n"


def test_a_directory_whose_name_is_no_text(run: Path, tmp_path: Path) -> None:
    odd = run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 $x$"))
    assert write_report([odd], tmp_path / "report.html") == []
    assert "<title>caf? $x$</title>" in (tmp_path / "report.html").read_text()
    assert len(plot_runs([odd], tmp_path / "plots")) > 3


def test_a_recipe_that_names_no_place(run: Path) -> None:
    recipe = json.loads((run / "recipe.json").read_text())
    for place in ("x" * 5000, "/dev/null", "a\0b", "\ud800"):
        (run / "recipe.json").write_text(json.dumps({**recipe, "data": {"kind": "jsonl", "path": place}}))
        assert len(read(run)[0]["runs"][0]["episodes"]) == 2, place


def test_steps_and_names_of_metrics_that_nobody_can_draw(run: Path, tmp_path: Path) -> None:
    rows = [{"step": HUGE, "kappa": 1.0}, {"step": 1, "kappa": 1e308, f"kappa/K{'1' * 5000}": 1.0, "kappa/K٣": 1.0},
            {"step": 2, "kappa": -1e308}, {"step": -(10**16), "kappa": 1.0}]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read(run)[0]["runs"][0]["metrics"]
    assert metrics is not None
    assert metrics["step"] == [1, 2]
    assert "calls.png" in {file.name for file in plot_runs([run], tmp_path / "plots")}


# ---------------------------------------------------------------------------------------------------- ways out


def test_plots_are_not_written_through_a_link(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    (run / "plots").mkdir()
    (run / "plots" / "reward.png").symlink_to(precious)
    assert run / "plots" / "reward.png" in plot_runs([run])
    assert precious.read_text() == "precious"
    assert (run / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_linked_directories_are_read_only_within_the_one_that_is_named(run: Path, tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.mkdir()
    (named / "elsewhere").symlink_to(run)
    with pytest.raises(DataError, match=r"named: its directories are links out of it; name what they lead to"):
        Library([named])
    write_run(named / "own", steps=1, groups=1, size=2)
    (named / "own-too").symlink_to(named / "own")
    report, notes = read(named)
    assert [one["name"] for one in report["runs"]] == ["own", "own-too"]
    assert notes == [f"{named / 'elsewhere'}: a link out of {named}; not read. To show what it leads to, name that."]
    (tmp_path / "link").symlink_to(run)
    assert len(read(tmp_path / "link")[0]["runs"]) == 1  # that one was named


def test_the_stages_of_a_suite_are_its_own(run: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    (suite / "stages").mkdir(parents=True)
    (suite / "stages" / "a").symlink_to(run)
    (suite / "plan.json").write_text(json.dumps({"labels": {"a": "a, seed 0", "..": "b", "c\0": "c"}}))
    report, notes = read(suite)
    assert [one["name"] for one in report["runs"]] == ["suite"]
    assert any("a link out of" in note for note in notes)


def test_a_damaged_summary_of_a_suite(tmp_path: Path) -> None:
    mean = {"mean": 0.5, "low": None, "high": HUGE}
    rows = {
        "one": [],
        "two": "x",
        "three": {"section": ["s"], "means": {"kappa": mean, "kappa/K²": mean, "kappa/K4": mean}},
    }
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "summary.json").write_text(json.dumps({"rows": rows, "claims": [1], "targets": {}}))
    (source,) = suite_sources(tmp_path, Notes())
    assert "kappa, K = 4" in next(table for table in source.tables if table["title"].endswith("by K"))["columns"]


@pytest.mark.parametrize("name", ["rows.jsonl", "grades.jsonl", "samples.jsonl", "benches.json"])
def test_the_files_of_an_evaluation_are_its_own(tmp_path: Path, name: str) -> None:
    play(tmp_path / "run", samples(2), Answerer())
    file = tmp_path / "run" / name
    if file.exists():
        file.rename(tmp_path / name)
    (tmp_path / name).touch()
    file.symlink_to(tmp_path / name)
    report, notes = read(tmp_path / "run")
    assert report["runs"][0]["episodes"] == []
    assert report["runs"][0]["tables"] == []
    assert any(f"{name}: not a file of" in note for note in notes)


def test_a_damaged_row_of_an_evaluation_costs_its_tables(tmp_path: Path) -> None:
    play(tmp_path / "run", samples(2), Answerer())
    file = tmp_path / "run" / "rows.jsonl"
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    first["main"]["segments"][1]["usage"] = {"prompt_tokens": HUGE, "completion_tokens": 1, "cached_tokens": 0}
    file.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    report, notes = read(tmp_path / "run")
    assert report["runs"][0]["tables"] == []
    assert len(report["runs"][0]["episodes"]) == 2
    assert any("The tables of this evaluation are left out" in note for note in notes)
