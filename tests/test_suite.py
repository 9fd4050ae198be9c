"""The lab's suite: a tiny version of each stage, end to end, through the command line.

Locked here: killed at any moment and started again it goes on, and a third time does nothing; the same seed gives the
same numbers; every number of the report is one of the run's files; what a model wrote stays text; a stage that fails
costs what depends on it and nothing else.
"""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from paravt.ask import shipped_model
from paravt.cli import app
from paravt.config import RLRecipe, load_recipe
from paravt.errors import DataError, ParaVTError, RecipeError
from paravt.lab.intervals import estimate
from paravt.lab.numbers import evaluation_numbers, training_numbers
from paravt.lab.results import write_report
from paravt.lab.stages import Stage, is_done, prepare, run_stage
from paravt.lab.suite import run_suite
from paravt.lab.table import read_evaluation, read_table
from paravt.provenance import lock_directory

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
               "dose": {"recipe": "sft.yaml", "start": "strong", "set": ["seed=1"]},
               "broken": {"recipe": "sft.yaml", "set": ["model.path=/nowhere"]}},
    "start": "dose",
    "reference": str(RECIPES / "rl" / "vanilla.yaml"),
    "evaluation": {"questions": 3, "budgets": [4, 8], "temperature": 1.0},
    "sections": {"main": {"title": "Main"}, "peers": {"title": "Peers", "also": ["full"]}},
    "rows": {
        "sft": {"model": "dose", "published": {"f": 0.13, "kappa": 2.5}},
        "vanilla": {"recipe": str(RECIPES / "rl" / "vanilla.yaml")},
        "full": {"recipe": str(RECIPES / "rl" / "full.yaml"), "set": ["budget_weights=pass_rate"]},
        "wrong": {"section": "peers", "recipe": str(RECIPES / "rl" / "full.yaml"), "set": ["budget_weights=pass_rate"],
                  "evaluation": {"dispatch": "sequential", "faults": {"calls": 1}}},
        "broken": {"model": "broken"},
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


GOOD = ["sft", "vanilla", "full", "wrong"]
QUIET = Console(quiet=True)


def done(out: Path) -> dict[str, float]:
    return {path.parent.name: path.stat().st_mtime for path in (out / "stages").glob("*/done.json")}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_suite(tmp_path_factory.mktemp("recipes"), SUITE)


@pytest.fixture(scope="module")
def out(suite: Path) -> Path:
    """The directory of a suite that was killed after its first stages, while others ran, and started again."""
    out = suite.parent / "out"
    command = [sys.executable, "-c", "from paravt.cli import main; main()", "lab", "run", "--quick", "--jobs", "2",
               "--suite", str(suite), "--out", str(out)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 500
    while len(done(out)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = done(out)
    assert 2 <= len(before) < 8
    failed = run_suite(out, QUIET, "quick", jobs=2, file=suite)
    assert sorted(reason.partition(" ")[0] for reason in failed.values()) == ["/nowhere:", "needs"], failed
    after = done(out)
    assert len(after) == 8  # 2 models, 2 runs, 4 evaluations: what failed cost nothing else
    assert {name: time for name, time in after.items() if name in before} == before
    return out


def test_run_again_it_does_nothing(out: Path, suite: Path) -> None:
    before = done(out)
    assert run_suite(out, QUIET, "quick", only=GOOD, jobs=2, file=suite) == {}
    assert done(out) == before
    run_suite(out, QUIET, "quick", file=suite)  # the failed one fails again; the report is about all rows again
    assert done(out) == before


def test_the_report_says_what_the_files_say(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    plan = json.loads((out / "plan.json").read_text())
    assert set(summary["rows"]) == {*GOOD, "broken"}
    for run in plan["runs"]:
        if run["row"] == "broken":
            continue
        stages = out / "stages"
        lines = {stage: [json.loads(line) for line in (stages / run["training"] / f"{stage}.jsonl").open()]
                 for stage in ("metrics", "timings") if run["training"]}  # fmt: skip
        episodes = read_evaluation(stages / run["evaluation"])
        assert [episode.frame_budget for episode in episodes] == [4, 4, 4, 8, 8, 8]
        expected = evaluation_numbers(episodes) | (training_numbers(**lines) if lines else {})
        found = summary["rows"][run["row"]]["by_seed"]["0"]
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        assert set(found) - set(expected) == {"seconds"}
        right = [episode.rewards["accuracy"].value for episode in episodes if episode.scored]
        assert found["accuracy"] == pytest.approx(sum(map(float, right)) / len(right))  # type: ignore[arg-type]
        assert found["kappa"] == sum(crop.ran for e in episodes for crop in e.crops) / len(episodes)
    rows = {(row["row"], row["column"]): row for row in csv.DictReader((out / "table.csv").open())}
    for name, row in summary["rows"].items():
        for column, values in row["by_seed"].get("0", {}).items():
            assert float(rows[name, column]["mean"]) == pytest.approx(values)
    text = (out / "report.md").read_text()
    html = (out / "report.html").read_text()
    for row in GOOD:
        cells = summary["rows"][row]["means"]["f_strict"]["mean"]
        assert f"| {row} | 1 |" in text
        assert f"{cells:.2f}" in text
        assert f"<td>{row}</td>" in html
    assert "/nowhere" in html  # what failed, and why
    assert html.count("data:image/png;base64,") == len(list(out.glob("*.png"))) >= 3
    assert "http" not in html.replace("http-equiv", "")  # one file, nothing loaded


def test_a_bad_report_is_told_to_the_agent_and_costs_no_score(out: Path) -> None:
    row = read_table(out).rows["wrong"]
    episodes = read_evaluation(row.evaluations[0])
    hit = [episode for episode in episodes if episode.rewards["faults"].value == 1]
    assert hit
    assert all(episode.scored and episode.dispatch == "sequential" for episode in episodes)
    for episode in hit:  # the first crop lies, whatever it was shown
        first = next(crop for crop in episode.crops if crop.ran)
        truth = episode.rewards["true_reports"].value
        assert first.report
        assert truth is not None
        assert truth <= 1 - 1 / episode.tool_calls


def test_the_same_seed_gives_the_same_numbers(out: Path, suite: Path, tmp_path: Path) -> None:
    """Another directory, another process, nothing killed."""
    assert run_suite(tmp_path, QUIET, "quick", only=["vanilla"], jobs=1, file=suite) == {}
    first, second = (read_table(place).rows["vanilla"].numbers[0] for place in (out, tmp_path))
    timed = {"seconds", "train/minutes"}
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}


def test_a_hostile_model_is_only_text(out: Path, tmp_path: Path) -> None:
    """`lab report` on a copy whose episodes say what would run or break the page."""
    evil = "<script>alert(1)</script> ``` </pre> | \u202e <img src=x onerror=1>"
    table = read_table(out)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(out), str(copy)], check=True)
    where = copy / table.rows["full"].evaluations[0].relative_to(out) / "episodes" / "K4.jsonl"
    rows = [json.loads(line) for line in where.read_text().splitlines()]
    for row in rows:
        row["turns"][0]["text"] = row["answer"] = row["sample"]["question"] = evil
        row["crops"] = [{**crop, "report": evil} for crop in row["crops"]]
    where.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(copy)
    html, text = (copy / "report.html").read_text(), (copy / "report.md").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "<img src=x" not in html
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "script" in outside
    assert not re.search(r"(?<!\\)<", outside)  # all of it is escaped
    assert "\u202e" not in html + text


def test_the_report_needs_a_suite(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the directory of a suite"):
        write_report(tmp_path)


def test_a_second_suite_in_the_directory_says_so(suite: Path, tmp_path: Path) -> None:
    with lock_directory(tmp_path), pytest.raises(RecipeError, match="another process is running there"):
        run_suite(tmp_path, QUIET, "standard", file=suite)


def test_a_row_that_does_not_exist_is_named(suite: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no row 'vanila'; the rows are sft, vanilla"):
        run_suite(tmp_path, QUIET, "quick", only=["vanila"], file=suite)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": "weak"}, "models: there is no 'weak'"),
        ({"samples": ["nobody"]}, "rows: there is no 'nobody'"),
        ({"rows": {"a": {"model": "dose", "recipe": "x.yaml"}}}, "not both"),
        ({"rows": {"a": {"section": "x", "model": "dose"}}}, "there is no"),
        ({"targets": [{"name": "n", "row": "full", "column": "f"}]}, "targets.0: give at_least"),
        ({"criteria": [{"name": "n", "column": "f"}]}, "criteria.0: give at_least"),
        ({"criteria": [{"name": "n", "column": "f", "above": "nobody"}]}, "rows: there is no 'nobody'"),
        ({"rows": {**SUITE["rows"], "twin": {"title": "full", "model": "dose"}}}, "rows: two have the title 'full'"),
        ({"models": {**SUITE["models"], "dose": {"recipe": "sft.yaml", "start": "dose"}}}, "starts from itself"),
    ],
)
def test_a_suite_that_cannot_be_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_suite(tmp_path, {**SUITE, **change})
    with pytest.raises(RecipeError, match=message) as caught:
        run_suite(tmp_path / "out", QUIET, "quick", file=path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_that_learns_from_files_is_refused_in_one_line(tmp_path: Path) -> None:
    """Files log other lines, and their content is in no stage's name."""
    data = "stages.0.data={kind: messages, files: [rows.jsonl]}"
    models = {**SUITE["models"], "dose": {"recipe": "sft.yaml", "start": "strong", "set": [data]}}
    path = write_suite(tmp_path, {**SUITE, "models": models})
    with pytest.raises(RecipeError, match=r"sft\.yaml: stage 'act' is on files; models of a suite learn") as caught:
        run_suite(tmp_path / "out", QUIET, "quick", file=path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_run_that_its_watch_ends_early_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [*SMALL, f"model.path={shipped_model()}", "threads=1", "watch={stop: true, patience: 1, min_kappa: 99}"]
    stage = Stage("rl", "", load_recipe(RLRecipe, RECIPES / "rl" / "vanilla.yaml", changes), None, "")
    directory = prepare(stage, tmp_path)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # started again it does not go on
        with pytest.raises(
            ParaVTError, match=r"ended by watch\.stop after 1 of 2 steps: step 1: the tool is no longer"
        ):
            run_stage(stage.name)
        assert len((directory / "metrics.jsonl").read_text().splitlines()) == 1
    assert not is_done(tmp_path, stage.name)


def test_an_evaluation_that_cannot_be_names_its_row(tmp_path: Path) -> None:
    rows = {**SUITE["rows"], "wrong": {"model": "dose", "section": "peers", "evaluation": {"dispatch": "sideways"}}}
    path = write_suite(tmp_path, {**SUITE, "rows": rows})
    with pytest.raises(RecipeError, match=r"rows\.wrong\.evaluation: dispatch") as caught:
        run_suite(tmp_path / "out", QUIET, "quick", file=path)
    assert "\n" not in str(caught.value)


def test_quick_and_full_exclude_each_other() -> None:
    done = CliRunner().invoke(app, ["lab", "run", "--quick", "--full"])
    assert done.exit_code == 2
    assert "not both" in done.output


def test_means_leave_out_seeds_without_a_value() -> None:
    found = estimate([1.0, None, 3.0])
    assert found is not None
    assert (found.mean, found.n) == (2.0, 2)
    assert estimate([None]) is None
