"""Recipes of reinforcement learning: every row of the ablation is one, and impossible mixes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paravt.config import RLRecipe, load_recipe
from paravt.errors import RecipeError

ROWS = Path(__file__).parents[1] / "recipes" / "lab" / "rl"
# row: format, tool, think prefix, anchor, gating, sub-agents (DESIGN's table, and the marks as sequence credit)
TABLE = {
    "vanilla": (0, 0, False, "off", False, True),
    "vanilla_release": (1, 1, False, "off", False, False),
    "prefix": (0, 0, True, "off", False, True),
    "gating": (0, 0, False, "off", True, True),
    "anchoring": (0, 0, True, "token", False, True),
    "anchoring_sequence": (1, 0, True, "sequence", False, True),
    "full": (0, 1, True, "token", True, True),
    "full_sequence": (1, 1, True, "sequence", True, True),
    "full_marks": (0, 1, True, "marks", True, True),
    "minus_tool": (0, 0, True, "token", True, True),
    "minus_penalty": (0, 1, True, "token", True, True),
    "minus_subagents": (0, 1, True, "token", True, False),
}


def test_the_rows_are_the_table() -> None:
    assert {path.stem for path in ROWS.glob("*.yaml")} == {*TABLE, "base"}
    for name, row in TABLE.items():
        recipe = load_recipe(RLRecipe, ROWS / f"{name}.yaml")
        found = (recipe.reward.format_weight, recipe.reward.tool_weight, recipe.episode.think_prefix,
                 recipe.anchor.credit, recipe.gating, recipe.subagents)  # fmt: skip
        assert found == row, name
        assert recipe.reward.accuracy_weight == 1
        assert recipe.reward.answer_suffix is (name != "vanilla_release")
        assert (recipe.anchor.gamma == 0) is (name == "minus_penalty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("anchor.credit=sequence", "needs reward.format_weight"),
        ("reward.anchor_weight=0.5", "paid with anchor.credit: sequence only"),
        ("episode.call_timeout=5", "deterministic runs have no time-outs"),
        ("rollout.group_size=1", "rollout.group_size"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: must be a finite number"),
        ("frame_budgets=[4, .inf]", r"frame_budgets\.1: must be a finite number"),
        ("optimizer.learning_rate=-1", "optimizer: learning_rate must be at least 0"),
        ("optimizer.eps=0", "optimizer: eps must be positive"),
        ("optimizer.weight_decay=-1", "optimizer: weight_decay must be at least 0"),
        ("optimizer.betas=[0.9, 1]", "optimizer: .*both betas"),
        ("watch.patience=0", "watch: patience must be at least 1"),
        ("lora.rank=0", "lora: rank must be at least 1"),
        ("rollout.max_staleness=1", "deterministic runs do not run ahead"),
        ("anchor.colour=red", "anchor"),
        ("loss.clip_low=2", "loss"),
        ("optimizer.schedule=cosine", "total_steps"),
        ("data.kind=dance", "data"),
    ],
)
def test_impossible_mixes_are_refused_in_one_line(change: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(RLRecipe, ROWS / "base.yaml", [change])
    assert "\n" not in str(caught.value)


def test_running_ahead_needs_weights_for_old_tokens() -> None:
    changes = ["deterministic=false", "rollout.max_staleness=1", "loss.importance_cap=null"]
    assert load_recipe(RLRecipe, ROWS / "base.yaml", changes[:2]).rollout.max_staleness == 1
    with pytest.raises(RecipeError, match=r"max_staleness needs loss\.importance_cap"):
        load_recipe(RLRecipe, ROWS / "base.yaml", changes)


def test_what_aliases_multiply_is_looked_at_once(tmp_path: Path) -> None:
    """Forty levels, each twice the one before: nobody waits for 2 ** 40 numbers."""
    levels = [f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}]" for n in range(1, 41)]
    (tmp_path / "a.yaml").write_text("\n".join(["l0: &l0 [1.0]", *levels]))
    with pytest.raises(RecipeError, match="model: Field required"):
        load_recipe(RLRecipe, tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("\n".join(["l0: &l0 [.nan]", *levels]))
    with pytest.raises(RecipeError, match=r"l0\.0: must be a finite number"):
        load_recipe(RLRecipe, tmp_path / "a.yaml")


def test_a_recipe_cannot_be_its_own_base(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(RecipeError, match="is its own base"):
        load_recipe(RLRecipe, tmp_path / "a.yaml")


def test_a_base_is_changed_mapping_by_mapping(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {kind: pretrained, path: x}\nrollout: {prompts: 3, group_size: 5}")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nrollout: {prompts: 4}")
    recipe = load_recipe(RLRecipe, tmp_path / "b.yaml")
    values: dict[str, Any] = recipe.rollout.model_dump()
    assert (values["prompts"], values["group_size"], recipe.model.path) == (4, 5, "x")


@pytest.mark.parametrize("path", sorted((ROWS.parents[1]).glob("qwen*/rl*.yaml")), ids=str)
def test_recipes_of_large_models_are_valid(path: Path) -> None:
    recipe = load_recipe(RLRecipe, path)
    assert recipe.gating
    assert recipe.anchor.credit == "token"
    assert recipe.optimizer.betas == (0.9, 0.999)
