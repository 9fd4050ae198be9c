"""The training loop, whole: from a checkpoint through episodes, credit and updates to a checkpoint that loads.

Locked here: with `deterministic: true` the same recipe gives the same metrics, bit by bit, also when the process is
killed in between and started again, adapters and weights of frame budgets included; a broken engine or sub-agent costs
its episode and is never a reward of 0; sub-agents' rows change the update, and are what `subagents: false` leaves out.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from paravt.ask import shipped_model
from paravt.config import RLRecipe, load_recipe
from paravt.engines.base import Completion, Prompt, Sampling, stable_seed
from paravt.engines.local import LocalEngine
from paravt.errors import DataError, EngineError, RecipeError
from paravt.lab.factory import train_rl
from paravt.models import load_model
from paravt.types import Episode, Score

BASE = Path(__file__).parents[1] / "recipes" / "lab" / "rl"
SMALL = [
    f"model.path={shipped_model()}", "steps=3", "data.videos=50", "rollout.prompts=2", "rollout.group_size=2",
    "rollout.temperature=1.5", "episode.frame_budget=4", "frame_budgets=[4, 8]", "checkpoint_every=1",
]  # fmt: skip
QUIET = Console(quiet=True)


def recipe(row: str = "full", *changes: str) -> RLRecipe:
    return load_recipe(RLRecipe, BASE / f"{row}.yaml", [*SMALL, *changes])


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    newest = max((out / "checkpoints").glob("step-*"))
    return dict(load_model(newest / "model").module.state_dict())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rl") / "whole"
    train_rl(recipe(), out, QUIET)
    return out


def test_a_run_leaves_what_it_should(whole: Path) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["episodes"] == 4
        assert row["unscored"] == 0
        for name in ("reward/total", "reward/accuracy", "reward/tool", "f_strict", "f_graded", "f_release", "kappa",
                     "attempts", "junk", "entropy", "token/mismatch", "true_reports"):  # fmt: skip
            assert name in row, name
        assert row["token/mismatch"] < 1e-4  # the sampler is the learner's own module
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {"step-000002", "step-000003"}
    assert (whole / "curves.png").stat().st_size > 10_000
    assert (whole / "episodes" / "step-000001.jsonl").exists()
    start = load_model(shipped_model()).module.state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in weights(whole).items())


def test_a_run_without_a_scored_episode_ends_at_its_first_step(tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"video": "gone.mp4", "question": "What?", "answer": "a cat"}\n')
    changes = ("data={kind: jsonl, path: " + str(questions) + "}", "rollout.prompts=1")
    with pytest.raises(DataError, match=r"none of the 2 episodes of the first step.*gone\.mp4: no such file"):
        train_rl(recipe("full", *changes), tmp_path / "run", QUIET)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_that_the_watch_ends_leaves_its_last_step(tmp_path: Path) -> None:
    few = ("watch.stop=true", "watch.patience=2", "watch.min_kappa=99", "checkpoint_every=50", "steps=9")
    train_rl(recipe("full", *few), tmp_path, QUIET)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_the_same_recipe_gives_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    train_rl(recipe(), tmp_path / "again", QUIET)
    assert metrics(tmp_path / "again") == metrics(whole)
    first, second = weights(whole), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_killed_twice_and_started_again_it_ends_the_same(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    sets = [part for change in SMALL for part in ("--set", change)]
    command = [sys.executable, "-c", "from paravt.cli import main; main()", "rl", str(BASE / "full.yaml"),
               "--out", str(out), *sets]  # fmt: skip
    for wanted in (1, 2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) >= wanted:
                delay = random.random() * 0.5  # anywhere: sampling, learning, or in the middle of a checkpoint
                print(f"killed {delay:.3f} s after step {wanted}")
                time.sleep(delay)
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(whole)
    first, second = weights(whole), weights(out)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_process_does_not_train_all_weights_in_16_bits(tmp_path: Path) -> None:
    lost = r"model.dtype bfloat16 without adapters needs several processes \(--nproc\)"
    with pytest.raises(RecipeError, match=lost):
        train_rl(recipe("full", "model.dtype=bfloat16"), tmp_path / "said", QUIET)
    assert not (tmp_path / "said").exists()
    load_model(shipped_model(), "bfloat16").save(tmp_path / "half")
    half = ("full", f"model.path={tmp_path / 'half'}", "model.dtype=auto", "steps=1")
    with pytest.raises(RecipeError, match=lost):
        train_rl(recipe(*half), tmp_path / "found", QUIET)
    train_rl(recipe(*half, "lora={rank: 2}"), tmp_path / "adapted", QUIET)
    assert len(metrics(tmp_path / "adapted")) == 1


def test_another_recipe_does_not_go_on_with_a_run(whole: Path) -> None:
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        train_rl(recipe("full", "seed=1"), whole, QUIET)
    with pytest.raises(RecipeError, match="has checkpoints already"):
        train_rl(recipe(), whole, QUIET, resume="never")
    with pytest.raises(RecipeError, match="not a checkpoint of a run"):
        train_rl(recipe(), whole, QUIET, resume=str(whole))


def uneven(episode: Episode) -> Score:
    """A reward of the user's own, which differs within every group."""
    return Score(float(stable_seed(*episode.main.ids, *(crop.report for crop in episode.crops)) % 101))


def test_sub_agents_change_the_update_and_can_be_left_out(tmp_path: Path) -> None:
    rows, models = {}, {}
    for name, changes in {
        "with": [], "without": ["subagents=false"], "weightless": ["subagent_weight=0"],
    }.items():  # fmt: skip
        paid = "reward.functions=[test_rl:uneven]"
        train_rl(recipe("full", "steps=1", "rollout.group_size=4", paid, *changes), tmp_path / name, QUIET)
        rows[name], models[name] = metrics(tmp_path / name)[0], weights(tmp_path / name)
    assert rows["with"]["rows"] > rows["without"]["rows"]
    assert rows["with"]["reward/total"] == rows["without"]["reward/total"]  # the same episodes
    assert any(not torch.equal(value, models["without"][name]) for name, value in models["with"].items())
    # the same loss and gradient as main traces alone; Adam's first step would blow up differences in the last digit
    for name in ("loss", "grad_norm"):
        assert rows["without"][name] == pytest.approx(rows["weightless"][name], rel=1e-4)
        assert rows["without"][name] != pytest.approx(rows["with"][name], rel=1e-2)


def test_a_broken_engine_costs_its_episodes_and_pays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = LocalEngine.generate, 0

    async def sometimes(self: LocalEngine, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise EngineError("dropped the connection")
        return await generate(self, prompt, sampling, n)

    monkeypatch.setattr(LocalEngine, "generate", sometimes)
    changes = ("deterministic=false", "steps=2", "rollout.prompts=3", "rollout.group_size=3")
    train_rl(recipe("full", *changes), tmp_path / "out", QUIET)
    rows = metrics(tmp_path / "out")
    assert len(rows) == 2
    assert sum(row["unscored"] for row in rows) > 0
    for row in rows:
        assert row["episodes"] == 9
    saved = [
        json.loads(line) for line in (tmp_path / "out" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    ]
    failed = [episode for episode in saved if episode["errors"]]
    assert failed
    assert all(score["value"] is None for episode in failed for score in episode["rewards"].values())


def test_lora_saves_adapters_and_a_merged_model(tmp_path: Path) -> None:
    train_rl(recipe("full", "steps=2", "lora.rank=4", "optimizer.learning_rate=0.01"), tmp_path / "out", QUIET)
    checkpoint = tmp_path / "out" / "checkpoints" / "step-000002"
    assert (checkpoint / "adapters" / "adapter_config.json").exists()
    merged, start = (
        load_model(checkpoint / "model").module.state_dict(),
        load_model(shipped_model()).module.state_dict(),
    )
    assert merged.keys() == start.keys()
    assert any(not torch.equal(value, start[name]) for name, value in merged.items())
    # and it goes on from its adapters
    train_rl(recipe("full", "steps=2", "lora.rank=4", "optimizer.learning_rate=0.01"), tmp_path / "out", QUIET)
    assert len(metrics(tmp_path / "out")) == 2


def test_adapters_begin_with_the_recipes_seed(tmp_path: Path) -> None:
    adapters = []
    for name, noise in (("one", 1), ("two", 2)):
        torch.manual_seed(noise)  # whatever drew before
        train_rl(recipe("full", "steps=1", "lora.rank=4"), tmp_path / name, QUIET)
        saved = tmp_path / name / "checkpoints" / "step-000001" / "adapters" / "adapter_model.safetensors"
        adapters.append(load_file(saved))
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())


def test_weights_by_pass_rate_go_on_from_a_checkpoint_in_another_directory(tmp_path: Path) -> None:
    by_pass_rate = recipe("full", "budget_weights=pass_rate", "keep_checkpoints=3")
    train_rl(by_pass_rate, tmp_path / "whole", QUIET)
    first = tmp_path / "whole" / "checkpoints" / "step-000001"
    known = json.loads((first / "run.json").read_text())["accuracies"]
    step = metrics(tmp_path / "whole")[0]
    assert known
    assert known == {k: step[f"accuracy/K{k}"] for k in known}
    train_rl(by_pass_rate, tmp_path / "rest", QUIET, resume=str(first))  # there are no metrics of step 1 here
    assert metrics(tmp_path / "rest") == metrics(tmp_path / "whole")[1:]


@pytest.mark.parametrize("row", sorted(path.stem for path in BASE.glob("*.yaml") if path.stem != "base"))
def test_every_row_of_the_ablation_runs(row: str, tmp_path: Path) -> None:
    train_rl(recipe(row, "steps=1"), tmp_path / row, QUIET)
    assert metrics(tmp_path / row)[0]["episodes"] == 4
