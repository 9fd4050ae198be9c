"""What a recipe of reinforcement learning would run, and what it would take: from the configuration alone.

The model is built on the meta device, so that a recipe for many GPUs can be checked without one, and without weights: a
directory with `config.json` is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from paravt.config import RLRecipe
from paravt.errors import ModelError
from paravt.learner import add_adapters
from paravt.models.hub import find_model

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


@dataclass(frozen=True)
class DryRun:
    """Memory in bytes, for each rank; parameters and optimizer sharded over all of them."""

    parameters: int
    trained: int
    blocks: int
    """Modules that are sharded one by one: vision blocks and decoder layers."""
    episodes: int
    """Of a step."""
    most_rows: int
    """Main traces, and as many sub-agents as the frame budget allows."""
    most_tokens: int
    """That a step's main traces can have, at the end of their contexts."""
    steps: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of one microbatch of `token_budget` tokens; an estimate, see `estimate`."""
    key_values: int
    """Of the local engine with all episodes at the end of their contexts: an upper bound."""


def skeleton(path: str) -> Any:
    """The model on the meta device. Raises ModelError if there is no configuration at `path`."""
    cached = find_model(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=cached)
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: no configuration of a model: {reason}") from error


def estimate(recipe: RLRecipe, ranks: int = 1) -> DryRun:
    """Activations follow Korthikanti et al. 2022 (eq. 2 without the attention matrix, which is never stored): 34 bytes
    per token, layer and hidden unit in 16 bits, or the layer's input and one whole layer with checkpointing."""
    module = skeleton(recipe.model.path)
    blocks = [*module.model.visual.blocks, *module.model.language_model.layers]
    text = module.config.text_config
    if recipe.lora is not None:
        add_adapters(module, recipe.lora, keep_dtype=True)
    parameters, trained = _count(module, False), _count(module, True)
    size = _BYTES[recipe.model.dtype]
    rollout, episode = recipe.rollout, recipe.episode
    episodes = rollout.prompts * rollout.group_size
    per_layer = 34 * size // 2 * text.hidden_size * recipe.token_budget
    activations = text.num_hidden_layers * per_layer
    if recipe.activation_checkpointing:
        activations = per_layer + text.num_hidden_layers * size * text.hidden_size * recipe.token_budget
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    context = min(episode.max_context_tokens, text.max_position_embeddings)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * size
    return DryRun(
        parameters=parameters,
        trained=trained,
        blocks=len(blocks),
        episodes=episodes,
        most_rows=episodes * (1 + (episode.max_frames // 16 if recipe.subagents else 0)),
        most_tokens=episodes * context,
        steps=recipe.steps,
        weights=parameters * size // ranks,
        gradients=trained * size // ranks,
        optimizer=2 * trained * size // ranks,
        activations=activations,
        key_values=min(episodes, rollout.max_concurrent) * context * token,
    )


def _count(module: nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)
