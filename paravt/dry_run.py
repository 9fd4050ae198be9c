"""What a recipe would run, and what it would take: from the configuration alone.

The model is built on the meta device, so that a recipe for many GPUs can be checked without one, and without weights: a
directory with `config.json` is enough.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from paravt.config import MessageFiles, PretrainedModel, RLRecipe, SFTRecipe
from paravt.errors import ModelError, RecipeError
from paravt.learner import LoRA, add_adapters
from paravt.models.hub import find_on_hub

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


@dataclass(frozen=True)
class Memory:
    """In bytes, for each rank; parameters and optimizer sharded over all of them."""

    parameters: int
    trained: int
    blocks: int
    """Modules that are sharded one by one: vision blocks and decoder layers."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of one microbatch of `token_budget` tokens; an estimate, see `learner_memory`."""


@dataclass(frozen=True)
class DryRun(Memory):
    """Of reinforcement learning."""

    episodes: int
    """Of a step."""
    most_rows: int
    """Main traces, and as many sub-agents as the frame budget allows."""
    most_tokens: int
    """That a step's main traces can have, at the end of their contexts."""
    steps: int
    key_values: int
    """Of the local engine with all episodes at the end of their contexts: an upper bound."""


@dataclass(frozen=True)
class SFTDryRun(Memory):
    """Of supervised training."""

    stages: tuple[tuple[str, int, int], ...]
    """Name, steps, rows of a step."""


def skeleton(path: str) -> Any:
    """The model on the meta device. Raises ModelError if there is no configuration at `path`."""
    cached = Path(path).is_dir() or find_on_hub(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=cached)
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: no configuration of a model: {reason}") from error


def learner_memory(
    module: Any,
    model: PretrainedModel,
    *,
    lora: LoRA | None,
    token_budget: int,
    activation_checkpointing: bool,
    ranks: int,
) -> Memory:
    """Activations follow Korthikanti et al. 2022 (eq. 2 without the attention matrix, which is never stored): 34 bytes
    per token, layer and hidden unit in 16 bits, or the layer's input and one whole layer with checkpointing."""
    blocks = [*module.model.visual.blocks, *module.model.language_model.layers]
    text = module.config.text_config
    if lora is not None:
        add_adapters(module, lora, keep_dtype=True)
    parameters, trained = _count(module, False), _count(module, True)
    size = _BYTES[model.dtype]
    per_layer = 34 * size // 2 * text.hidden_size * token_budget
    activations = text.num_hidden_layers * per_layer
    if activation_checkpointing:
        activations = per_layer + text.num_hidden_layers * size * text.hidden_size * token_budget
    return Memory(
        parameters=parameters,
        trained=trained,
        blocks=len(blocks),
        weights=parameters * size // ranks,
        gradients=trained * size // ranks,
        optimizer=2 * trained * size // ranks,
        activations=activations,
    )


def estimate(recipe: RLRecipe, ranks: int = 1) -> DryRun:
    """Of reinforcement learning. Raises ModelError without a configuration of the model."""
    module = skeleton(recipe.model.path)
    memory = learner_memory(
        module,
        recipe.model,
        lora=recipe.lora,
        token_budget=recipe.token_budget,
        activation_checkpointing=recipe.activation_checkpointing,
        ranks=ranks,
    )
    text = module.config.text_config
    rollout, episode = recipe.rollout, recipe.episode
    episodes = rollout.prompts * rollout.group_size
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    context = min(episode.max_context_tokens, text.max_position_embeddings)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * _BYTES[recipe.model.dtype]
    return DryRun(
        **asdict(memory),
        episodes=episodes,
        most_rows=episodes * (1 + (episode.max_frames // 16 if recipe.subagents else 0)),
        most_tokens=episodes * context,
        steps=recipe.steps,
        key_values=min(episodes, rollout.max_concurrent) * context * token,
    )


def estimate_sft(recipe: SFTRecipe, ranks: int = 1) -> SFTDryRun:
    """Of supervised training on files. Raises RecipeError for a recipe of the lab."""
    if not isinstance(recipe.model, PretrainedModel) or not all(
        isinstance(stage.data, MessageFiles) for stage in recipe.stages
    ):
        raise RecipeError("a dry run is of a pretrained model on files; the lab's recipes just run")
    module = skeleton(recipe.model.path)
    if recipe.freeze_vision:
        module.model.visual.requires_grad_(False)
    memory = learner_memory(
        module,
        recipe.model,
        lora=recipe.lora,
        token_budget=recipe.token_budget,
        activation_checkpointing=recipe.activation_checkpointing,
        ranks=ranks,
    )
    stages = tuple((stage.name, stage.steps, stage.batch_size) for stage in recipe.stages)
    return SFTDryRun(**asdict(memory), stages=stages)


def _count(module: nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)
