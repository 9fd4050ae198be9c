"""What is planned: a recipe and a model on hardware, who does what there, and how much of it there is by K."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paravt.ask import shipped_model
from paravt.config import LabQuestions, RLRecipe
from paravt.dry_run import BYTES, DryRun, dtype_name, empty_model, estimate, shape_of, skeleton
from paravt.episode_config import EpisodeConfig
from paravt.errors import ModelError, RecipeError
from paravt.known import QWEN_TEXTS, USUAL, count_texts, model_config
from paravt.lab.questions import question
from paravt.models.rendering import load_chat
from paravt.plan import (
    Behaviour,
    Hardware,
    Lengths,
    Shape,
    Texts,
    Work,
    key_value_bytes,
    learner_work,
    lengths,
    prefill_work,
)

USABLE = 0.9
"""Of a GPU's memory, what tensors can have: the rest is the driver's, or lost between tensors."""
SERVED = 0.7
"""Of a server's memory, what weights may take: the rest is for keys and values."""


@dataclass(frozen=True)
class Budget:
    """The G episodes of a prompt with K overview frames."""

    frames: int
    """K."""
    share: float
    """Of the prompts that have this K."""
    lengths: Lengths
    read: Work
    """By an engine, before and between turns."""
    learned: Work


@dataclass(frozen=True)
class Model:
    """A model without its weights, and what it makes of texts and frames."""

    name: str
    module: Any
    """On the meta device; a plan adds the recipe's adapters to it."""
    texts: Texts
    frame_pixels: int
    """Of the largest frames."""


def find_model(recipe: RLRecipe, name: str | None = None) -> Model:
    """The recipe's model, or another: tiny, a published one (2b, 8b, 32b), a directory, a hub id. Raises ModelError if
    there is no configuration of it."""
    path = str(shipped_model()) if name == "tiny" else name or recipe.model.path
    if (config := model_config(path)) is not None:
        return Model(name or path, empty_model(config), QWEN_TEXTS, EpisodeConfig.max_pixels)
    try:
        module = skeleton(path)
    except ModelError as error:
        raise ModelError(f"{error}; --model takes tiny, 2b, 8b, 32b or a directory instead") from error
    if not any((Path(path) / file).is_file() for file in ("processor_config.json", "preprocessor_config.json")):
        return Model(name or path, module, QWEN_TEXTS, EpisodeConfig.max_pixels)
    chat = load_chat(path)
    of_lab = name == "tiny" or isinstance(recipe.data, LabQuestions)
    texts = count_texts(chat, question("video-0", 0).sample if of_lab else USUAL)
    return Model(name or path, module, texts, min(chat.max_pixels, EpisodeConfig.max_pixels))


@dataclass(frozen=True)
class Placed:
    """Who does what."""

    learners: int
    groups: int
    """Of a learner, at most."""
    sampled: int
    """Groups of an engine, at most."""
    split: int
    """GPUs that share one copy of the engine's model."""
    playing: int
    """Episodes of an engine at a time."""
    decoding: int
    """Sequences of an engine at a time."""
    engine: Hardware
    """Of the `split` GPUs together."""


def _place(recipe: RLRecipe, hardware: Hardware, copy: int, gpus: int, servers: int) -> Placed:
    if servers >= gpus:
        raise RecipeError(f"--servers {servers} leaves none of {gpus} GPUs to learn")
    split = 1
    while servers and copy / split > SERVED * hardware.memory:
        split *= 2
    if servers % split:
        raise RecipeError(f"a copy of the model takes {split} of these GPUs: --servers must be a multiple of {split}")
    learners = gpus - servers
    sampled = math.ceil(recipe.rollout.prompts / (servers // split or learners))
    episodes = sampled * recipe.rollout.group_size
    playing = episodes if servers else min(episodes, recipe.rollout.max_concurrent)
    faster = {name: split * getattr(hardware, name) for name in ("bandwidth", "bfloat16", "float32")}
    return Placed(
        learners=learners,
        groups=math.ceil(recipe.rollout.prompts / learners),
        sampled=sampled,
        split=split,
        playing=playing,
        decoding=episodes if servers else recipe.rollout.max_concurrent,
        engine=hardware.model_copy(update=faster),
    )


def _within(how: Behaviour, recipe: RLRecipe) -> Behaviour:
    """What the recipe allows of it."""
    episode = recipe.episode
    turns = min(how.turns, episode.max_turns)
    calls = {"parallel": how.calls, "sequential": min(how.calls, turns - 1), "none": 0}[episode.dispatch]
    return replace(
        how,
        turns=turns,
        calls=calls if turns > 1 else 0,
        turn_tokens=min(how.turn_tokens, episode.max_tokens),
        report_tokens=min(how.report_tokens, episode.max_report_tokens),
        window_frames=min(how.window_frames, EpisodeConfig.crop_max_frames),
    )


def _budgets(recipe: RLRecipe, texts: Texts, frame_tokens: int, patches: int, how: Behaviour) -> list[Budget]:
    """By K, as gating draws it."""
    choices = recipe.frame_budgets if recipe.gating else (recipe.episode.frame_budget,)
    fixed = recipe.budget_weights if isinstance(recipe.budget_weights, tuple) else (1.0,) * len(choices)
    group, most = recipe.rollout.group_size, recipe.token_budget
    found = []
    for k, weight in zip(choices, fixed, strict=True):
        long = lengths(k, frame_tokens, texts, how)
        learned = learner_work(group, k, patches, long, how, token_budget=most, subagents=recipe.subagents)
        found.append(Budget(k, weight / sum(fixed), long, prefill_work(group, k, patches, long, how), learned))
    return found


@dataclass(frozen=True)
class Case:
    """What is planned, in full."""

    recipe: RLRecipe
    run: DryRun
    """Of a process that learns."""
    shape: Shape
    parameters: int
    """Without adapters."""
    size: int
    """Bytes of a number."""
    frame_tokens: int
    hardware: Hardware
    placed: Placed
    servers: int
    how: Behaviour
    budgets: tuple[Budget, ...]

    @property
    def patches(self) -> int:
        """Of a frame."""
        return self.frame_tokens * self.shape.patches

    @property
    def copy(self) -> float:
        """Bytes of the weights of an engine, on each of its GPUs."""
        return self.parameters * self.size / self.placed.split

    @property
    def cached(self) -> float:
        """Bytes of keys and values of all that an engine has in hand, at the largest K, on each of its GPUs."""
        placed, how = self.placed, self.how
        longest = max((budget.lengths for budget in self.budgets), key=lambda lengths: lengths.prompt)
        watching = min(placed.playing * how.calls / max(1, how.turns - 1), placed.decoding)
        tokens = placed.playing * (longest.prompt + longest.suffix) + watching * (longest.crop + longest.report)
        return tokens * key_value_bytes(self.shape, self.size) / placed.split

    def playing(self, episodes: int) -> Case:
        """With so many episodes of an engine at a time."""
        return replace(self, placed=replace(self.placed, playing=episodes))


def make_case(recipe: RLRecipe, model: Model, hardware: Hardware, how: Behaviour, gpus: int, servers: int) -> Case:
    module, vision = model.module, model.module.config.vision_config
    shape, size = shape_of(module), BYTES[dtype_name(module, recipe.model)]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    placed = _place(recipe, hardware, parameters * size, gpus, servers)
    run = estimate(recipe, placed.learners, module)
    if servers:  # the engine is elsewhere
        run = replace(run, engine=0, key_values=0)
    frame_tokens = model.frame_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2
    how = _within(how, recipe)
    budgets = _budgets(recipe, model.texts, frame_tokens, frame_tokens * shape.patches, how)
    case = Case(
        recipe=recipe,
        run=run,
        shape=shape,
        parameters=parameters,
        size=size,
        frame_tokens=frame_tokens,
        hardware=hardware,
        placed=placed,
        servers=servers,
        how=how,
        budgets=tuple(budgets),
    )
    if not servers:
        return case
    room = USABLE * hardware.memory - case.copy  # they let requests wait that have none
    return case.playing(max(1, min(placed.playing, int(room / case.playing(1).cached))))
