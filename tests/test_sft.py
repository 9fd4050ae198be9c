"""Supervised training: the loss is on sampled tokens only, and on nothing else."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from paravt.config import SFTRecipe, load_recipe
from paravt.errors import RecipeError
from paravt.lab.factory import new_model, train_sft
from paravt.lab.teacher import Mixture, traces
from paravt.lab.tiny import TinyShape
from paravt.models import QwenVL, load_model
from paravt.optim import learning_rate
from paravt.sft_traces import collate, sft_loss
from paravt.types import Trace

RECIPES = Path(__file__).parents[1] / "recipes"
SMALL = {
    "model": {"kind": "tiny", "hidden": 48, "layers": 2, "feed_forward": 64},
    "threads": 1,
    "log_every": 2,
    "stages": [
        {"name": "a", "steps": 3, "batch_size": 4, "learning_rate": 1e-3,
         "data": {"kinds": {"crop": 1}, "crop_frames": [2]}},
        {"name": "b", "steps": 3, "batch_size": 2, "learning_rate": 1e-3,
         "data": {"kinds": {"parallel": 1, "sequential": 1, "none": 1}, "budgets": [4]}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def student() -> QwenVL:
    return new_model(TinyShape(hidden=48, layers=2, feed_forward=64))


@pytest.fixture(scope="module")
def lessons(student: QwenVL) -> list[Trace]:
    mixture = Mixture({"parallel": 1, "sequential": 1, "none": 1, "crop": 1}, budgets=(4, 8))
    return list(islice(traces(student.chat, mixture, seed=3), 10))


def test_the_loss_is_that_of_each_row_alone_on_its_sampled_tokens(student: QwenVL, lessons: list[Trace]) -> None:
    """Against the Hugging Face model row by row, without padding, without shared frames, with its own positions."""
    summed, count = torch.zeros(()), 0
    for trace in lessons:
        ids = torch.tensor([trace.ids])
        pixels, grid = student.pixel_inputs(trace.images)
        logits = student.module(
            input_ids=ids, pixel_values=pixels, image_grid_thw=grid,
            mm_token_type_ids=(ids == student.chat.image_id).int(),
        ).logits[0, :-1]  # fmt: skip
        sampled = torch.tensor(trace.loss_mask)[1:]
        summed = summed + cross_entropy(logits[sampled], ids[0, 1:][sampled], reduction="sum")
        count += int(sampled.sum())
    expected = summed / count
    student.module.zero_grad()
    expected.backward()
    reference = {name: p.grad.clone() for name, p in student.module.named_parameters() if p.grad is not None}
    student.module.zero_grad()
    loss, correct = sft_loss(student, collate(student, lessons))
    loss.backward()
    assert correct.shape == (count,)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in student.module.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, reference[name], atol=1e-5, rtol=1e-3, msg=name)


def test_replies_and_prompts_are_not_targets(student: QwenVL, lessons: list[Trace]) -> None:
    batch = collate(student, lessons)
    for row, trace in enumerate(lessons):
        targets = student.chat.tokenizer.decode(batch.ids_BT[row][batch.targets_BT[row]])
        assert "tool_response" not in targets
        assert "Question" not in targets
        assert targets.count("<|im_end|>") == sum(segment.sampled for segment in trace)


def test_the_schedule_warms_up_and_decays() -> None:
    recipe = SFTRecipe.model_validate(SMALL | {"stages": [SMALL["stages"][0] | {"steps": 100, "warmup_steps": 10}]})
    rates = [learning_rate(recipe.optimizer_config(recipe.stages[0]), step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-4)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(directory).module.state_dict())


def test_a_run_leaves_checkpoints_metrics_and_how_it_was_made(tmp_path: Path) -> None:
    recipe = SFTRecipe.model_validate(SMALL)
    train_sft(recipe, tmp_path / "whole", Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "whole" / "b.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3]
    assert (tmp_path / "whole" / "last.txt").read_text() == "b\n"
    assert "transformers" in json.loads((tmp_path / "whole" / "versions.json").read_text())

    # stopped within the second stage, and run again: the same weights as without the stop
    stopped = tmp_path / "stopped"
    train_sft(recipe, stopped, Console(quiet=True))
    (stopped / "b").rename(stopped / "b.partial")
    train_sft(recipe, stopped, Console(quiet=True))
    whole, again = weights(tmp_path / "whole" / "b"), weights(stopped / "b")
    assert all(torch.equal(whole[name], again[name]) for name in whole)

    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        train_sft(recipe.model_copy(update={"seed": 1}), stopped, Console(quiet=True))


def test_the_shipped_recipes_are_valid() -> None:
    paths = set((RECIPES / "lab").glob("*.yaml")) - {RECIPES / "lab" / "suite.yaml"}
    assert len(paths) == 4
    for path in paths:
        assert load_recipe(SFTRecipe, path).stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: []", "stages: .*at least 1"),
        ("stages: [{name: a, steps: 0, learning_rate: 1, data: {kinds: {crop: 1}}}]", "stages.0.steps"),
        ("stages: [{name: a, steps: 1, learning_rate: 1, data: {kinds: {crop: 0}}}]", "must not all be 0"),
        ("stages: [{name: a, steps: 1, learning_rate: 1, data: {kinds: {dance: 1}}}]", "dance"),
        ("colour: blue", "colour|stages"),
        ("- a list", "a recipe is a mapping"),
        ("{", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("a: 2001-99-99", "not YAML"),
        ("model: {kind: tiny, heads: 3}", "hidden must be a multiple"),
        ("betas: [0.9, 1.5]", "betas.1: .*less than 1"),
        ("threads: 1000000", "threads: .*less than or equal to 1024"),
        (
            "stages: [{name: checkpoints, steps: 1, learning_rate: 1, data: {kinds: {crop: 1}}}]",
            "no stage can be named `checkpoints`",
        ),
        ("stagez: 1", "there is no such setting|Field required"),
    ],
)
def test_a_bad_recipe_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(SFTRecipe, path)
    assert "\n" not in str(caught.value)


def test_overrides(tmp_path: Path) -> None:
    path = RECIPES / "lab" / "trunk.yaml"
    changed = load_recipe(SFTRecipe, path, ["stages.0.steps=7", "seed=3", "model.hidden=64"])
    assert (changed.stages[0].steps, changed.seed, changed.model.hidden) == (7, 3, 64)  # type: ignore[union-attr]
    for wrong in ("seed", "stages.9.steps=1", "stages.x=1", "seed.deep=1"):
        with pytest.raises(RecipeError):
            load_recipe(SFTRecipe, path, [wrong])
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(SFTRecipe, tmp_path / "none.yaml")
