"""What a recipe of reinforcement learning would run, and what it would take: from the configuration alone.

The model is built on the meta device, so that a recipe for many GPUs can be checked without one, and without weights: a
directory with `config.json` is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from paravt.config import RLRecipe
from paravt.engines.local import LocalEngine
from paravt.errors import ModelError
from paravt.learner import add_adapters, sharded_blocks

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_SLOTS = signature(LocalEngine).parameters["max_batch"].default


@dataclass(frozen=True)
class Wrapped:
    """Modules of one kind that are sharded one by one (FSDP2)."""

    name: str
    count: int
    parameters: int
    """Of one."""


@dataclass(frozen=True)
class DryRun:
    """Memory in bytes, for each process; parameters, gradients and optimizer sharded over all of them."""

    ranks: int
    parameters: int
    trained: int
    plan: tuple[Wrapped, ...]
    """What is sharded one by one, and the root with all the rest."""
    shard: int
    """Parameters in one process, of the one that has most."""
    prompts: tuple[int, int]
    """Of a step: the fewest and the most that a process has."""
    episodes: int
    """Of a step, in all processes."""
    most_rows: int
    """Main traces, and as many sub-agents as the frame budget allows."""
    most_tokens: int
    """That a step's main traces can have, at the end of their contexts."""
    steps: int
    weights: int
    """With several processes float32 master weights, whatever they are gathered in."""
    gradients: int
    optimizer: int
    reference: int
    """A frozen copy for the KL, unless adapters are trained."""
    gathered: int
    """The root and two blocks, whole, while they run."""
    activations: int
    """Of one microbatch of `token_budget` tokens; an estimate, see `estimate`."""
    engine: int
    """Weights of the local engine; 0 if it shares the learner's."""
    key_values: int
    """Of the local engine with its main traces at the end of their contexts: an upper bound."""

    @property
    def total(self) -> int:
        learner = self.weights + self.gradients + self.optimizer + self.reference + self.gathered + self.activations
        return learner + self.engine + self.key_values


def skeleton(path: str) -> Any:
    """The model on the meta device. Raises ModelError if there is no configuration at `path`."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{path}: no configuration of a model: {reason}") from error


def estimate(recipe: RLRecipe, ranks: int = 1) -> DryRun:
    """Activations follow Korthikanti et al. 2022 (eq. 2 without the attention matrix, which is never stored): 34 bytes
    per token, layer and hidden unit in 16 bits, or the layer's input and one whole layer with checkpointing."""
    module = skeleton(recipe.model.path)
    text = module.config.text_config
    if recipe.lora is not None:
        add_adapters(module, recipe.lora, keep_dtype=True)
    plan = _plan(module)
    sizes = [(p.numel(), _share(p, ranks), p.requires_grad) for p in module.parameters()]
    parameters = sum(size for size, _, _ in sizes)
    shard, trained = sum(share for _, share, _ in sizes), sum(share for _, share, grad in sizes if grad)
    size = _BYTES[recipe.model.dtype]
    held = 4 if ranks > 1 else size
    rollout, episode = recipe.rollout, recipe.episode
    episodes = rollout.prompts * rollout.group_size
    fewest, most = rollout.prompts // ranks, -(-rollout.prompts // ranks)
    per_layer = 34 * size // 2 * text.hidden_size * recipe.token_budget
    activations = text.num_hidden_layers * per_layer
    if recipe.activation_checkpointing:
        activations = per_layer + text.num_hidden_layers * size * text.hidden_size * recipe.token_budget
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    context = min(episode.max_context_tokens, text.max_position_embeddings)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * size
    *blocks, root = plan
    return DryRun(
        ranks=ranks,
        parameters=parameters,
        trained=sum(size for size, _, grad in sizes if grad),
        plan=plan,
        shard=shard,
        prompts=(fewest, most),
        episodes=episodes,
        most_rows=episodes * (1 + (episode.max_frames // 16 if recipe.subagents else 0)),
        most_tokens=episodes * context,
        steps=recipe.steps,
        weights=shard * held,
        gradients=trained * held,
        optimizer=2 * trained * held,
        reference=shard * held if recipe.loss.kl_coef and recipe.lora is None else 0,
        gathered=(root.parameters + 2 * max(block.parameters for block in blocks)) * size if ranks > 1 else 0,
        activations=activations,
        engine=parameters * size if ranks > 1 or rollout.max_staleness else 0,
        key_values=min(most * rollout.group_size, rollout.max_concurrent, _SLOTS) * context * token,
    )


def _plan(module: Any) -> tuple[Wrapped, ...]:
    blocks = sharded_blocks(module)
    kinds = {type(block).__name__: [b for b in blocks if type(b) is type(block)] for block in blocks}
    wrapped = [Wrapped(name, len(same), _count(same[0])) for name, same in kinds.items()]
    rest = _count(module) - sum(each.count * each.parameters for each in wrapped)
    return (*wrapped, Wrapped("the rest", 1, rest))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _share(parameter: Tensor, ranks: int) -> int:
    """Of the first process, which has most: shards are rows."""
    rows = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // rows)
