"""The lab's suite with what it should not find: damaged files of finished stages, odd suites, odd arguments. One line
says what and where, and no number is made of a part of the episodes. Nothing is trained here."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_suite import RECIPES, SUITE, write_suite
from test_suite_numbers import episode
from typer.testing import CliRunner

from paravt.cli import app, main
from paravt.config import RLRecipe, load_recipe
from paravt.episodes import save_episodes
from paravt.errors import DataError, ParaVTError, RecipeError
from paravt.lab.logs import episodes_file
from paravt.lab.progress import Progress, read_progress
from paravt.lab.results import write_report
from paravt.lab.stages import Plan, Stage, _check_watch, is_done, plan_suite, prepare, run_stage
from paravt.lab.suite import run_suite
from paravt.lab.suite_recipe import load_suite
from paravt.report.bands import plot_bands, plot_points
from paravt.types import Score

STEPS = [{"step": n, "kappa": 1.0, "f_graded": 0.5, "seconds": 1.0, "rollout": 1.0, "learn": 1.0} for n in (1, 2)]


def finished(out: Path, suite: dict[str, Any]) -> Plan:
    """The directory of a suite as if all of it had been run."""
    loaded, path = load_suite(write_suite(out / "recipes", suite))
    plan = plan_suite(loaded, path, loaded.modes["quick"], list(loaded.rows), 1)
    lines = "".join(json.dumps(step) + "\n" for step in STEPS)
    for stage in plan.stages.values():
        directory = prepare(stage, out / "stages")
        if stage.kind == "rl":
            (directory / "metrics.jsonl").write_text(lines)
            (directory / "timings.jsonl").write_text(lines)
        if stage.kind == "evaluation":
            for budget in (4, 8):
                played = replace(episode(budget, 1.0, 1, 2), rewards={"accuracy": Score(1.0)})
                save_episodes([("group", played)] * 3, episodes_file(directory, budget))
        (directory / "done.json").write_text('{"seconds": 1.0}\n')
    description = {"mode": "quick", "seeds": 1, "rows": list(loaded.rows), "suite": loaded.model_dump(mode="json"),
                   "versions": {}, "runs": [asdict(run) for run in plan.runs],
                   "labels": {name: stage.label for name, stage in plan.stages.items()}}  # fmt: skip
    (out / "plan.json").write_text(json.dumps(description))
    return plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    out = tmp_path_factory.mktemp("suite")
    return out, finished(out, SUITE)


@pytest.fixture
def out(made: tuple[Path, Plan]) -> Iterator[Path]:
    """A copy to be damaged."""
    copied = made[0].with_name("copy")
    shutil.copytree(made[0], copied)
    yield copied
    shutil.rmtree(copied)


def names(plan: Plan, row: str) -> tuple[str, str]:
    """Of its training and its evaluation."""
    run = next(run for run in plan.runs if run.row == row)
    assert run.training is not None
    return run.training, run.evaluation


def test_a_report_of_whole_files(out: Path) -> None:
    write_report(out)
    assert json.loads((out / "summary.json").read_text())["rows"]["full"]["means"]["accuracy"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", b'{"step": 1, "kap\n{"step": 2}\n'),
        ("metrics.jsonl", b'{"step": 1}\n\0\0\0\n'),  # a machine that lost its power leaves this
        ("metrics.jsonl", b"\xff\n"),
        ("metrics.jsonl", b"null\n"),
        ("timings.jsonl", b'{"ste\n'),
        ("done.json", b""),
        ("done.json", b"{}\n"),
        ("episodes/K4.jsonl", b""),
        ("episodes/K4.jsonl", b'{"format": 1, \n'),
        ("episodes/K4.jsonl", b"\xff\n"),
        ("episodes/K4.jsonl", None),
        ("stage.json", b""),
    ],
)
def test_a_report_names_the_damaged_file_and_what_to_do(
    made: tuple[Path, Plan], out: Path, file: str, content: bytes | None
) -> None:
    """An empty file of episodes too: means over the other K would look like any others."""
    training, evaluation = names(made[1], "full")
    stage = out / "stages" / (training if file in ("metrics.jsonl", "timings.jsonl") else evaluation)
    if content is None:
        (stage / file).unlink()
    else:
        (stage / file).write_bytes(content)
    with pytest.raises(DataError, match=f"{stage.name}.*; remove {stage} and run the suite again") as caught:
        write_report(out)
    assert "\n" not in str(caught.value)


def test_other_files_beside_the_episodes_do_no_harm(made: tuple[Path, Plan], out: Path) -> None:
    episodes = out / "stages" / names(made[1], "full")[1] / "episodes"
    shutil.copy(episodes / "K4.jsonl", episodes / "K4 (copy).jsonl")
    write_report(out)
    assert json.loads((out / "summary.json").read_text())["rows"]["full"]["means"]["episodes"]["mean"] == 6


def test_a_damaged_log_costs_the_estimate_and_not_the_suite(made: tuple[Path, Plan], out: Path) -> None:
    stage = made[1].stages[names(made[1], "full")[0]]
    assert read_progress(stage, out / "stages") == Progress(2, 4.0)
    for content in ("\0\0\n", "{}\n", "null\n"):
        (out / "stages" / stage.name / "timings.jsonl").write_text(content)
        assert read_progress(stage, out / "stages") == Progress(0, 0.0)


def test_a_damaged_line_of_metrics_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    """Training drops it, and makes the step again."""
    recipe = load_recipe(RLRecipe, RECIPES / "rl" / "vanilla.yaml")
    stage = Stage("rl", "", recipe, None, "")
    directory = prepare(stage, tmp_path)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n\0\0\n')
    _check_watch(recipe, directory)


def test_a_suite_that_contains_itself_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write_suite(tmp_path, SUITE)
    path.write_text(path.read_text() + "more: &more [*more]\n")
    with pytest.raises(RecipeError, match=r"suite\.yaml: a part of it contains itself"):
        run_suite(tmp_path / "out", Console(quiet=True), "quick", file=path)


def test_more_frames_than_an_episode_takes_are_refused_before_the_training(tmp_path: Path) -> None:
    suite = copy.deepcopy(SUITE)
    suite["rows"]["full"]["evaluation"] = {"budgets": [4, 2000]}
    with pytest.raises(RecipeError, match=r"rows\.full\.evaluation: budgets: 2000 is more than the row's"):
        run_suite(tmp_path / "out", Console(quiet=True), "quick", file=write_suite(tmp_path, suite))
    assert not (tmp_path / "out").exists()


def test_a_worker_with_other_code_than_the_plan_leaves_no_result(tmp_path: Path) -> None:
    """Workers come and go for hours, and each loads the code that is there then."""
    loaded, path = load_suite(write_suite(tmp_path / "recipes", SUITE))
    plan = plan_suite(loaded, path, loaded.modes["quick"], ["broken"], 1)
    stage = replace(next(iter(plan.stages.values())), code="another")
    log = prepare(stage, tmp_path) / "log.txt"
    command = [sys.executable, "-m", "paravt.lab.stages", str(tmp_path)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert worker.stdin is not None
    with worker.stdin:
        worker.stdin.write(f"{stage.name}\n".encode())
        worker.stdin.flush()
        assert worker.wait(timeout=300) == 1
    assert log.read_text() == "the code has changed since the suite was started; run the same command again\n"
    assert not is_done(tmp_path, stage.name)


def test_a_model_that_is_gone_is_not_asked_of_the_hub(
    made: tuple[Path, Plan], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path, relative to the stages, looks like `owner/name`."""
    stage = made[1].stages[names(made[1], "full")[0]]
    monkeypatch.chdir(out / "stages")
    with pytest.raises(ParaVTError, match=f"^{stage.parent}/act: .* is gone; remove {stage.parent} and run again"):
        run_stage(stage.name)


def test_names_are_no_formulas() -> None:
    """Half of a formula in a title would end the report of a suite that has run for hours."""
    band = ([1, 2], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0])
    assert plot_bands({"panel": {r"from $\foo$": band}}, "step").startswith(b"\x89PNG")
    assert plot_points({r"$\foo$": (0.0, 1.0)}, "x", "y").startswith(b"\x89PNG")


def test_a_video_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "nowhere" / "v.mp4"
    with pytest.raises(SystemExit) as caught:
        main(["lab", "video", str(target)])
    assert caught.value.code == DataError.exit_code
    assert "nowhere/v.mp4: cannot be written: No such file" in capsys.readouterr().err.replace("\n", "")


def test_a_score_with_more_frames_than_an_episode_takes_is_refused() -> None:
    assert CliRunner().invoke(app, ["lab", "score", "--frames", "100000"]).exit_code == 2
