"""Recipes for large models, as far as a machine without a GPU can check them; and merged adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_cli import paravt
from transformers import Qwen3VLConfig

from paravt.ask import shipped_model
from paravt.config import RLRecipe, load_recipe
from paravt.dry_run import estimate, skeleton
from paravt.errors import ModelError
from paravt.learner import LoRA, add_adapters
from paravt.models import load_model, merge_adapters

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configuration of an 8 B model, and nothing else."""
    text = dict(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262_144,
    )  # fmt: skip
    vision = dict(
        depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=4096, patch_size=16,
        deepstack_visual_indexes=[8, 16, 24],
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("8b")
    Qwen3VLConfig(text_config=text, vision_config=vision).save_pretrained(directory)
    return directory


def test_the_recipe_of_eight_gpus(eight_billion: Path) -> None:
    change = f"model.path={eight_billion}"
    one = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl.yaml", [change]))
    eight = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl.yaml", [change]), ranks=8)
    assert one.parameters == one.trained
    assert 8.5e9 < one.parameters < 9.0e9
    assert one.blocks == 27 + 36
    assert one.episodes == 7 * 8
    assert one.weights == 2 * one.parameters
    assert one.optimizer == 2 * one.weights
    assert eight.weights == one.weights // 8
    assert eight.weights + eight.gradients + eight.optimizer + eight.activations < 80e9
    # one token's keys and values: 2 x 36 layers x 8 heads x 128 x 2 bytes
    assert one.key_values == 56 * 32_768 * 147_456

    lora = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl-lora.yaml", [change]))
    assert 0 < lora.trained < 0.02 * lora.parameters


def test_checkpointing_saves_activations(eight_billion: Path) -> None:
    changes = [f"model.path={eight_billion}", "activation_checkpointing=false"]
    recipe = RECIPES / "qwen3vl-8b" / "rl.yaml"
    without = estimate(load_recipe(RLRecipe, recipe, changes))
    assert without.activations > 10 * estimate(load_recipe(RLRecipe, recipe, changes[:1])).activations


def test_the_skeleton_has_the_parameters_of_the_model() -> None:
    real = sum(p.numel() for p in load_model(shipped_model()).module.parameters())
    assert sum(p.numel() for p in skeleton(str(shipped_model())).parameters()) == real
    with pytest.raises(ModelError, match="no such model directory"):
        skeleton("./nowhere")


def test_dry_run_on_the_command_line(eight_billion: Path) -> None:
    recipe = RECIPES / "qwen3vl-8b" / "rl.yaml"
    done = paravt("rl", recipe, "--out", "unused", "--dry-run", "--ranks", "8", "--set", f"model.path={eight_billion}")
    assert done.returncode == 0, done.stderr
    assert "memory on each of 8" in done.stdout
    assert not Path("unused").exists()


def test_export_merges_adapters(tmp_path: Path) -> None:
    model = load_model(shipped_model(), "float32")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    adapted: PeftModel = add_adapters(model.module, LoRA(rank=2), keep_dtype=True)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(str(tmp_path / "adapters"))
    done = paravt("export", shipped_model(), tmp_path / "adapters", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    merged = load_model(tmp_path / "merged").module.state_dict()
    assert merged.keys() == before.keys()
    assert any(not torch.equal(merged[name], value) for name, value in before.items())
    expected = adapted.merge_and_unload().state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], msg=name)
    with pytest.raises(ModelError, match="not adapters of this model"):
        merge_adapters(load_model(shipped_model()), tmp_path / "nothing")
