"""What a recipe would run, and what it would take: from the configuration alone.

The model is built on the meta device, so that a recipe for many GPUs can be checked without one, and without weights: a
directory with `config.json` is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from paravt.config import MessageFiles, PretrainedModel, RLRecipe, SFTRecipe
from paravt.errors import ModelError, RecipeError
from paravt.learner import add_adapters, sharded_blocks
from paravt.models.hub import find_model

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


@dataclass(frozen=True)
class Wrapped:
    """Modules of one kind that are sharded one by one (FSDP2)."""

    name: str
    count: int
    parameters: int
    """Of one."""


@dataclass(frozen=True)
class Memory:
    """Of a learner, in bytes, for each process; parameters, gradients and optimizer sharded over all of them."""

    ranks: int
    parameters: int
    trained: int
    plan: tuple[Wrapped, ...]
    """What is sharded one by one, and the root with all the rest."""
    shard: int
    """Parameters in one process, of the one that has most."""
    weights: int
    """With several processes float32 master weights, whatever they are gathered in."""
    gradients: int
    optimizer: int
    reference: int
    """A frozen copy for the KL, unless adapters are trained."""
    gathered: int
    """The root and two blocks, whole, while they run."""
    activations: int
    """Of one microbatch of `token_budget` tokens; an estimate, see `learner_memory`."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + self.gathered + self.activations


@dataclass(frozen=True)
class DryRun(Memory):
    """Of reinforcement learning."""

    prompts: tuple[int, int]
    """Of a step: the fewest and the most that a process has."""
    episodes: int
    """Of a step, in all processes."""
    most_rows: int
    """Main traces, and as many sub-agents as the frame budget allows."""
    most_tokens: int
    """That a step's main traces can have, at the end of their contexts."""
    steps: int
    engine: int
    """Weights of the local engine; 0 if it shares the learner's."""
    key_values: int
    """Of the local engine with its main traces at the end of their contexts: an upper bound."""

    @property
    def total(self) -> int:
        return super().total + self.engine + self.key_values


@dataclass(frozen=True)
class SFTDryRun(Memory):
    """Of supervised training."""

    stages: tuple[tuple[str, int, int], ...]
    """Name, steps, rows of a step."""


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


def learner_memory(
    module: Any, model: PretrainedModel, recipe: RLRecipe | SFTRecipe, *, reference: bool, ranks: int
) -> Memory:
    """Of `module`, which gets the adapters of the recipe.

    Activations follow Korthikanti et al. 2022 (eq. 2 without the attention matrix, which is never stored): 34 bytes
    per token, layer and hidden unit in 16 bits, or the layer's input and one whole layer with checkpointing.
    """
    text = module.config.text_config
    if recipe.lora is not None:
        add_adapters(module, recipe.lora, keep_dtype=True)
    plan = _plan(module)
    *blocks, root = plan
    shares = [(_share(p, ranks), p.requires_grad) for p in module.parameters()]
    shard, trained = sum(share for share, _ in shares), sum(share for share, grad in shares if grad)
    size = _BYTES[model.dtype]
    held = 4 if ranks > 1 else size
    per_layer = 34 * size // 2 * text.hidden_size * recipe.token_budget
    activations = text.num_hidden_layers * per_layer
    if recipe.activation_checkpointing:
        activations = per_layer + text.num_hidden_layers * size * text.hidden_size * recipe.token_budget
    return Memory(
        ranks=ranks,
        parameters=_count(module),
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        plan=plan,
        shard=shard,
        weights=shard * held,
        gradients=trained * held,
        optimizer=2 * trained * held,
        reference=shard * held if reference and recipe.lora is None else 0,
        gathered=(root.parameters + 2 * max(block.parameters for block in blocks)) * size if ranks > 1 else 0,
        activations=activations,
    )


def estimate(recipe: RLRecipe, ranks: int = 1) -> DryRun:
    """Of reinforcement learning. Raises ModelError without a configuration of the model."""
    module = skeleton(recipe.model.path)
    memory = learner_memory(module, recipe.model, recipe, reference=bool(recipe.loss.kl_coef), ranks=ranks)
    text = module.config.text_config
    rollout, episode = recipe.rollout, recipe.episode
    episodes = rollout.prompts * rollout.group_size
    fewest, most = rollout.prompts // ranks, -(-rollout.prompts // ranks)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    context = min(episode.max_context_tokens, text.max_position_embeddings)
    size = _BYTES[recipe.model.dtype]
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * size
    return DryRun(
        **_fields(memory),
        prompts=(fewest, most),
        episodes=episodes,
        most_rows=episodes * (1 + (episode.max_frames // 16 if recipe.subagents else 0)),
        most_tokens=episodes * context,
        steps=recipe.steps,
        engine=memory.parameters * size if ranks > 1 or rollout.max_staleness else 0,
        key_values=min(most * rollout.group_size, rollout.max_concurrent) * context * token,
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
    memory = learner_memory(module, recipe.model, recipe, reference=False, ranks=ranks)
    return SFTDryRun(
        **_fields(memory), stages=tuple((stage.name, stage.steps, stage.batch_size) for stage in recipe.stages)
    )


def _fields(memory: Memory) -> dict[str, Any]:
    return {field.name: getattr(memory, field.name) for field in fields(memory)}


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
