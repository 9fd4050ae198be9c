"""Recipes for large models, as far as a machine without a GPU can check them; and merged adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_cli import paravt
from transformers import Qwen3VLConfig
from typer.testing import CliRunner

from paravt.ask import shipped_model
from paravt.cli import app
from paravt.config import RLRecipe, SFTRecipe, load_recipe
from paravt.dry_run import estimate, estimate_sft, skeleton
from paravt.errors import ModelError, RecipeError
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
    path = RECIPES / "qwen3vl-8b" / "rl.yaml"
    one = estimate(load_recipe(RLRecipe, path, [change, "model.dtype=float32"]))
    eight = estimate(load_recipe(RLRecipe, path, [change]), ranks=8)
    assert one.parameters == one.trained
    assert 8.5e9 < one.parameters < 9.0e9
    assert [each.count for each in one.plan] == [27, 36, 1]
    assert sum(each.count * each.parameters for each in one.plan) == one.parameters
    assert one.episodes == 7 * 8
    assert one.weights == one.reference == 4 * one.parameters
    assert one.optimizer == 2 * one.weights
    assert one.gathered == one.engine == 0  # the engine shares the learner's model
    # one token's keys and values: 2 x 36 layers x 8 heads x 128 x 4 bytes; the engine runs all 56 episodes at a time
    assert one.key_values == 56 * 32_768 * 294_912

    # float32 master weights, in shards of rows: hardly more than an eighth
    assert 1 <= eight.shard / (one.parameters / 8) < 1.001
    assert eight.weights == eight.gradients == eight.optimizer // 2 == 4 * eight.shard
    assert eight.engine == 2 * eight.parameters
    assert eight.prompts == (0, 1)
    assert eight.key_values == 8 * 32_768 * 147_456
    assert eight.total - eight.key_values < 80e9
    with pytest.raises(RecipeError, match="needs several processes"):
        estimate(load_recipe(RLRecipe, path, [change]))


def test_adapters_are_float32_beside_weights_of_16_bits(eight_billion: Path) -> None:
    change = f"model.path={eight_billion}"
    lora = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl-lora.yaml", [change]))
    assert 0 < lora.trained < 0.02 * lora.parameters
    assert lora.weights == 2 * (lora.parameters - lora.trained) + 4 * lora.trained
    assert lora.gradients == lora.optimizer // 2 == 4 * lora.trained
    two = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl-lora.yaml", [change]), ranks=2)
    assert two.weights == 4 * two.shard
    assert two.engine == 2 * (two.parameters - two.trained)  # the engine has the merged model


def test_what_is_played_ahead_has_keys_and_values_too(eight_billion: Path) -> None:
    def key_values(*changes: str, ranks: int = 8) -> int:
        whole = [f"model.path={eight_billion}", "rollout.max_concurrent=100", *changes]
        token = 32_768 * 147_456
        return (
            estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl.yaml", whole), ranks=ranks).key_values // token
        )

    assert key_values() == 8  # the group of the one prompt that a process has
    assert key_values("rollout.max_staleness=2") == 3 * 8  # 21 prompts: 3 for most processes
    assert key_values("rollout.max_staleness=2", "steps=2") == 2 * 8  # only one further step to play ahead
    assert key_values("rollout.max_staleness=2", ranks=2) == 11 * 8
    assert key_values("rollout.max_staleness=20", ranks=2) == 100


def test_auto_is_the_dtype_of_the_configuration(eight_billion: Path, tmp_path: Path) -> None:
    def weights(**text: str) -> int:
        tree = json.loads((eight_billion / "config.json").read_text())
        tree.pop("dtype", None)
        tree["text_config"] = {k: v for k, v in tree["text_config"].items() if k != "dtype"} | text
        (tmp_path / "config.json").write_text(json.dumps(tree))
        changes = [f"model.path={tmp_path}", "model.dtype=auto"]
        lora = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl-lora.yaml", changes))
        return round((lora.weights - 4 * lora.trained) / (lora.parameters - lora.trained))

    assert weights(dtype="bfloat16") == 2
    assert weights(dtype="float32") == 4
    assert weights() == 4
    with pytest.raises(ModelError, match="saved as float64"):
        weights(dtype="float64")


def test_checkpointing_saves_activations(eight_billion: Path) -> None:
    changes = [f"model.path={eight_billion}", "activation_checkpointing=false"]
    recipe = RECIPES / "qwen3vl-8b" / "rl-lora.yaml"
    without = estimate(load_recipe(RLRecipe, recipe, changes))
    assert without.activations > 10 * estimate(load_recipe(RLRecipe, recipe, changes[:1])).activations


def test_the_skeleton_has_the_parameters_of_the_model(tmp_path: Path) -> None:
    real = sum(p.numel() for p in load_model(shipped_model()).module.parameters())
    assert sum(p.numel() for p in skeleton(str(shipped_model())).parameters()) == real
    with pytest.raises(ModelError, match="no such model directory"):
        skeleton("./nowhere")
    with pytest.raises(ModelError, match="no configuration of a model"):
        skeleton(str(tmp_path))


def test_dry_run_on_the_command_line(eight_billion: Path) -> None:
    recipe = RECIPES / "qwen3vl-8b" / "rl.yaml"
    done = paravt("rl", recipe, "--out", "unused", "--dry-run", "--ranks", "8", "--set", f"model.path={eight_billion}")
    assert done.returncode == 0, done.stderr
    for line in ("memory on each of 8", "36 x Qwen3VLTextDecoderLayer", "prompts of a process", "all together"):
        assert line in " ".join(done.stdout.split()), line
    assert not Path("unused").exists()


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("rl", ("--ranks", "8"), "--ranks is for --dry-run"),
        ("sft", ("--ranks", "8"), "--ranks is for --dry-run"),
        ("rl", ("--max-failures", "1"), "need --ray"),
        ("rl", ("--decode-workers", "1"), "need --ray"),
    ],
)
def test_options_that_would_do_nothing_are_refused(command: str, options: tuple[str, ...], said: str) -> None:
    refused = CliRunner().invoke(app, [command, "unread.yaml", "--out", "unused", *options])
    assert refused.exit_code == 2
    assert said in " ".join(refused.stderr.split())


def test_supervised_training(eight_billion: Path) -> None:
    changes = [f"model.path={eight_billion}"]
    path = RECIPES / "qwen3vl-8b" / "sft.yaml"
    eight = estimate_sft(load_recipe(SFTRecipe, path, changes), ranks=8)
    reinforced = estimate(load_recipe(RLRecipe, RECIPES / "qwen3vl-8b" / "rl.yaml", changes), ranks=8)
    assert eight.ranks == 8
    assert (eight.weights, eight.gradients, eight.optimizer, eight.gathered) == (
        reinforced.weights, reinforced.gradients, reinforced.optimizer, reinforced.gathered,
    )  # fmt: skip
    assert eight.activations == reinforced.activations // 2  # half the tokens at a time
    assert eight.stages == (("model", 1500, 64),)
    assert eight.reference == eight.player == 0
    assert eight.total < 80e9  # as the recipe says
    episodes = "stages.0.data.episodes={questions: {kind: jsonl, path: q.jsonl}}"
    played = estimate_sft(load_recipe(SFTRecipe, path, [*changes, episodes]), ranks=8)
    assert played.total - eight.total == played.player == 2 * eight.parameters
    with pytest.raises(RecipeError, match="needs several processes"):
        estimate_sft(load_recipe(SFTRecipe, path, changes))
    frozen = estimate_sft(load_recipe(SFTRecipe, path, [*changes, "freeze_vision=true"]), ranks=8)
    assert 0.9 * frozen.parameters < frozen.trained < frozen.parameters
    with pytest.raises(RecipeError, match="a dry run is of a pretrained model"):
        estimate_sft(load_recipe(SFTRecipe, RECIPES / "lab" / "trunk.yaml"))


def test_supervised_training_of_adapters_in_one_process(eight_billion: Path) -> None:
    folder, changes = RECIPES / "qwen3vl-8b", [f"model.path={eight_billion}"]
    recipe = load_recipe(SFTRecipe, folder / "sft-lora.yaml", changes)
    plan = estimate_sft(recipe)
    reinforced = estimate(load_recipe(RLRecipe, folder / "rl-lora.yaml", changes))
    assert (plan.ranks, plan.parameters, plan.trained, plan.weights) == (
        1, reinforced.parameters, reinforced.trained, reinforced.weights,
    )  # fmt: skip
    assert plan.reference == plan.gathered == plan.player == 0
    assert plan.total == plan.weights + plan.gradients + plan.optimizer + plan.activations
    assert plan.total < 80e9  # as the recipe says, one GPU
    whole = load_recipe(SFTRecipe, folder / "sft.yaml", changes)
    (stage,), (same,) = recipe.stages, whole.stages
    assert stage.model_copy(update={"learning_rate": same.learning_rate}) == same


def test_dry_run_of_supervised_training_on_the_command_line(eight_billion: Path) -> None:
    recipe, change = RECIPES / "qwen3vl-8b" / "sft.yaml", f"model.path={eight_billion}"
    done = paravt("sft", recipe, "--out", "unused", "--dry-run", "--ranks", "8", "--set", change)
    assert done.returncode == 0, done.stderr
    for line in ("stage model", "1500 steps, each 64 rows", "memory on each of 8", "36 x Qwen3VLTextDecoderLayer"):
        assert line in " ".join(done.stdout.split()), line
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
