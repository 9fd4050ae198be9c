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

from paravt.config import MessageFiles, PretrainedModel, RLRecipe, SFTRecipe, check_precision
from paravt.episode_config import EpisodeConfig
from paravt.errors import ModelError, RecipeError, first_line
from paravt.learner import add_adapters, sharded_blocks
from paravt.models.hub import find_model
from paravt.plan import Shape, activation_bytes, key_value_bytes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TRAINED = 4
"""Bytes of a trained parameter: others are refused, but as copies that shards are gathered in."""


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
    """With several processes float32 master weights, whatever they are gathered in; adapters are float32 always."""
    gradients: int
    optimizer: int
    reference: int
    """A frozen copy for the KL, unless adapters are trained."""
    gathered: int
    """The root and two blocks, whole, while they run."""
    activations: int
    """Of one microbatch of `token_budget` tokens, if all are of frames; an estimate, see `plan.activation_bytes`."""

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
    rows: int
    """Of a step, about: main traces, and the sub-agents that an episode's frames are enough for if each has as many as
    a window can have. Shorter windows have fewer, so there can be more of them."""
    most_tokens: int
    """That a step's main traces can have, at the end of their contexts, with all refills."""
    steps: int
    engine: int
    """Weights of the local engine; 0 if it shares the learner's."""
    key_values: int
    """Of the local engine with as many main traces as it can have, those played ahead too, at the end of their
    contexts: an upper bound."""

    @property
    def total(self) -> int:
        return super().total + self.engine + self.key_values


@dataclass(frozen=True)
class SFTDryRun(Memory):
    """Of supervised training."""

    stages: tuple[tuple[str, int, int], ...]
    """Name, steps, rows of a step."""
    player: int
    """Weights of a whole copy that plays sampled episodes; 0 if the learner's are not sharded, or none are played."""

    @property
    def total(self) -> int:
        return super().total + self.player


def skeleton(path: str) -> Any:
    """The model on the meta device, in the dtype that its configuration says (or float32).

    Raises ModelError if there is no configuration at `path`.
    """
    cached = find_model(path)
    try:
        return empty_model(AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=cached))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: no configuration of a model: {first_line(error)}") from error


def empty_model(config: Any) -> Any:
    """The model of a configuration on the meta device, in the dtype that it says (or float32)."""
    saved = config.dtype or config.get_text_config().dtype or torch.float32
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=saved)


def shape_of(module: Any) -> Shape:
    """Of a model without adapters."""
    config, visual = module.config, module.model.visual
    text, vision = config.text_config, config.vision_config
    mergers = [visual.merger, *getattr(visual, "deepstack_merger_list", [])]
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        queries=text.num_attention_heads * head,
        keys=text.num_key_value_heads * head,
        feed_forward=text.intermediate_size,
        vocabulary=module.lm_head.weight.shape[0],
        layer_weights=_matrices(module.model.language_model.layers),
        vision_hidden=vision.hidden_size,
        vision_layers=vision.depth,
        vision_feed_forward=vision.intermediate_size,
        embedding_weights=visual.patch_embed.proj.weight.numel(),
        block_weights=_matrices(visual.blocks),
        merger_weights=sum(map(_matrices, mergers)),
        mergers=len(mergers),
        patches=vision.spatial_merge_size**2,
    )


def dtype_name(module: Any, model: PretrainedModel) -> str:
    """Of the weights as they would be loaded; `auto` is that of the skeleton `module`."""
    if model.dtype != "auto":
        return model.dtype
    name = str(module.dtype).removeprefix("torch.")
    if name not in BYTES:
        raise ModelError(f"{model.path}: saved as {name}; set model.dtype: {', '.join(BYTES)}")
    return name


def learner_memory(module: Any, dtype: str, recipe: RLRecipe | SFTRecipe, *, reference: bool, ranks: int) -> Memory:
    """Of `module`, whose weights are `dtype`, and which gets the adapters of the recipe."""
    shape = shape_of(module)
    if recipe.lora is not None:
        add_adapters(module, recipe.lora, keep_dtype=True)
    plan = _plan(module)
    *blocks, root = plan
    shares = [(_share(p, ranks), p.requires_grad) for p in module.parameters()]
    shard, trained = sum(share for share, _ in shares), sum(share for share, grad in shares if grad)
    size = BYTES[dtype]
    held = _TRAINED if ranks > 1 else size  # what is frozen
    seen = any(p.requires_grad for p in module.model.visual.parameters())
    return Memory(
        ranks=ranks,
        parameters=_count(module),
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        plan=plan,
        shard=shard,
        weights=(shard - trained) * held + trained * _TRAINED,
        gradients=trained * _TRAINED,
        optimizer=2 * trained * _TRAINED,
        reference=shard * held if reference and recipe.lora is None else 0,
        gathered=(root.parameters + 2 * max(block.parameters for block in blocks)) * size if ranks > 1 else 0,
        activations=round(
            activation_bytes(
                shape,
                size,
                recipe.token_budget,
                recipe.token_budget * shape.patches if seen else 0,
                checkpointing=recipe.activation_checkpointing,
            )
        ),
    )


def estimate(recipe: RLRecipe, ranks: int = 1, module: Any = None) -> DryRun:
    """Of reinforcement learning, with another model if a skeleton is given, which then gets the recipe's adapters.
    Raises ModelError without a configuration of the model, RecipeError for what one process would refuse to train."""
    module = skeleton(recipe.model.path) if module is None else module
    shape = shape_of(module)
    dtype = dtype_name(module, recipe.model)
    check_precision(dtype, adapters=recipe.lora is not None, processes=ranks)
    memory = learner_memory(module, dtype, recipe, reference=bool(recipe.loss.kl_coef), ranks=ranks)
    adapters = memory.trained if recipe.lora else 0
    text = module.config.text_config
    rollout, episode = recipe.rollout, recipe.episode
    episodes = rollout.prompts * rollout.group_size
    fewest, most = rollout.prompts // ranks, -(-rollout.prompts // ranks)
    context = min(episode.max_context_tokens, text.max_position_embeddings)
    size = BYTES[dtype]
    played = rollout.prompts * (1 + min(rollout.max_staleness, recipe.steps - 1))  # at a time, in all processes
    return DryRun(
        **_fields(memory),
        prompts=(fewest, most),
        episodes=episodes,
        rows=episodes * (1 + (episode.max_frames // EpisodeConfig.crop_max_frames if recipe.subagents else 0)),
        most_tokens=episodes * (1 + rollout.max_refills) * context,
        steps=recipe.steps,
        engine=(memory.parameters - adapters) * size if ranks > 1 or rollout.max_staleness else 0,
        key_values=min(-(-played // ranks) * rollout.group_size, rollout.max_concurrent)
        * context
        * key_value_bytes(shape, size),
    )


def estimate_sft(recipe: SFTRecipe, ranks: int = 1) -> SFTDryRun:
    """Of supervised training on files. Raises RecipeError for a recipe of the lab, and for what one process would
    refuse to train."""
    if not isinstance(recipe.model, PretrainedModel) or not all(
        isinstance(stage.data, MessageFiles) for stage in recipe.stages
    ):
        raise RecipeError("a dry run is of a pretrained model on files; the lab's recipes just run")
    module = skeleton(recipe.model.path)
    dtype = dtype_name(module, recipe.model)
    check_precision(dtype, adapters=recipe.lora is not None, processes=ranks)
    if recipe.freeze_vision:
        module.model.visual.requires_grad_(False)
    memory = learner_memory(module, dtype, recipe, reference=False, ranks=ranks)
    played = ranks > 1 and any(isinstance(s.data, MessageFiles) and s.data.episodes for s in recipe.stages)
    return SFTDryRun(
        **_fields(memory),
        stages=tuple((stage.name, stage.steps, stage.batch_size) for stage in recipe.stages),
        player=(memory.parameters - (memory.trained if recipe.lora else 0)) * BYTES[dtype] if played else 0,
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


def _matrices(module: nn.Module) -> int:
    """Weights of linear layers."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def _share(parameter: Tensor, ranks: int) -> int:
    """Of the first process, which has most: shards are rows."""
    rows = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // rows)
