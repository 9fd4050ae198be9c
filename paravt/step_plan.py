"""A plan: what a step of an RL recipe takes on given hardware, put together from the formulas of `paravt.plan` and the
memory of `paravt.dry_run`.

Left out, since it is small or nobody can know it: decoding videos, what GPUs tell each other, loading new weights into
engines, the optimizer's own work, refills of groups that teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paravt.ask import shipped_model
from paravt.config import LabQuestions, RLRecipe
from paravt.dry_run import BYTES, DryRun, dtype_name, empty_model, estimate, shape_of, skeleton
from paravt.episode_config import EpisodeConfig
from paravt.errors import ModelError, RecipeError
from paravt.known import QWEN_TEXTS, USUAL, count_texts, model_config
from paravt.lab.questions import question
from paravt.models.rendering import load_chat
from paravt.plan import (
    OPERATORS,
    Behaviour,
    Hardware,
    Lengths,
    Shape,
    Texts,
    Work,
    activation_bytes,
    decode_seconds,
    forward_flops,
    key_value_bytes,
    learner_work,
    lengths,
    logits_bytes,
    mean_work,
    prefill_work,
    training_flops,
)

USABLE = 0.9
"""Of a GPU's memory, what tensors can have: the rest is the driver's, or lost between tensors."""
SERVED = 0.7
"""Of a server's memory, what weights may take: the rest is for keys and values."""


@dataclass(frozen=True)
class Entry:
    """One number. Exact ones follow from configurations alone; docs/plan.md says how the others are estimated."""

    value: float
    unit: Literal["", "bytes", "tokens", "FLOP", "s", "h"]
    kind: Literal["exact", "at most", "estimated"]
    note: str = ""


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
class Plan:
    model: str
    gpus: int
    servers: int
    """Of the GPUs, those that only sample."""
    behaviour: Behaviour
    parts: Mapping[str, Mapping[str, Entry]]
    budgets: tuple[Budget, ...]
    fits: bool
    warnings: tuple[str, ...]

    def value(self, part: str, name: str) -> float:
        return self.parts[part][name].value


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
class _Placed:
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


def _place(recipe: RLRecipe, hardware: Hardware, copy: int, gpus: int, servers: int) -> _Placed:
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
    return _Placed(
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


def make_plan(
    recipe: RLRecipe, model: Model, hardware: Hardware, how: Behaviour, *, gpus: int, servers: int = 0
) -> Plan:
    """On `gpus` of the same hardware, of which `servers` only sample, as vLLM servers do; without, every GPU has an
    engine beside its share of the learner.

    Raises RecipeError for what `paravt rl` would refuse, and if a copy of the model can't be split over the servers.
    """
    module = model.module
    shape, size = shape_of(module), BYTES[dtype_name(module, recipe.model)]
    whole = sum(parameter.numel() for parameter in module.parameters())
    placed = _place(recipe, hardware, whole * size, gpus, servers)
    run = estimate(recipe, placed.learners, module)
    if servers:  # the engine is elsewhere
        run = replace(run, engine=0, key_values=0)
    vision, context = module.config.vision_config, module.config.text_config.max_position_embeddings
    frame_tokens = model.frame_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2
    how = _within(how, recipe)
    budgets = _budgets(recipe, model.texts, frame_tokens, frame_tokens * shape.patches, how)
    if servers:  # they let requests wait that have no room
        room = USABLE * hardware.memory - whole * size / placed.split
        one = _cached(shape, size, replace(placed, playing=1), how, budgets)
        placed = replace(placed, playing=max(1, min(placed.playing, int(room / one))))

    memory, peak = _memory(recipe, run, shape, size, placed, how, budgets, apart=bool(servers))
    parts = {
        "model": _model(shape, whole, run, frame_tokens),
        f"memory of each of {placed.learners} GPUs" + (" that learn" if servers else ""): memory,
        "tokens of a step": _tokens(recipe, how, budgets, frame_tokens * shape.patches),
        **_speed(recipe, run, shape, size, hardware, placed, how, budgets, apart=bool(servers)),
    }
    if servers:
        cached = _cached(shape, size, placed, how, budgets)
        peak = max(peak, whole * size / placed.split + cached)
        parts[f"memory of each of {servers} GPUs that serve"] = {
            "weights": Entry(whole * size / placed.split, "bytes", "exact", f"a copy on {placed.split}"),
            "keys and values": Entry(cached, "bytes", "estimated", "at the largest K"),
        }
    limit = min(recipe.episode.max_context_tokens, context)
    warnings = [
        f"K = {b.frames}: an episode of {total:,.0f} tokens is more than the context of {limit:,}"
        for b in budgets
        if (total := b.lengths.prompt + b.lengths.suffix) > limit
    ]
    if recipe.engine.kind == "vllm" and not servers:
        warnings.append(
            "the recipe samples on vLLM servers, none of which are among these GPUs: planned is the engine inside the"
            " run instead; --servers says how many of the GPUs are theirs"
        )
    fits = peak <= USABLE * hardware.memory
    memory["peak"] = replace(memory["peak"], note=f"of {hardware.memory / 1e9:g} GB, {USABLE:.0%} can be had")
    if not fits:
        warnings.append(
            f"does not fit: {peak / 1e9:.1f} GB, of {hardware.memory / 1e9:.0f} GB of which tensors can have"
            f" {USABLE:.0%}; try more GPUs, --servers, lora, or a smaller token_budget or rollout.max_concurrent"
        )
    return Plan(model.name, gpus, servers, how, parts, tuple(budgets), fits, tuple(warnings))


def _model(shape: Shape, whole: int, run: DryRun, frame_tokens: int) -> dict[str, Entry]:
    patches = frame_tokens * shape.patches
    frame = forward_flops(shape, Work(patches=patches, patch_pairs=patches**2))
    token = forward_flops(shape, Work(tokens=1, scored=1))
    return {
        "parameters": Entry(whole, "", "exact"),
        "trained": Entry(run.trained, "", "exact"),
        "a token, forward": Entry(token.total, "FLOP", "exact", "the text model and its head, without attention"),
        "a frame, forward": Entry(frame.total, "FLOP", "exact", f"the vision tower; {frame_tokens} tokens"),
    }


def _cached(shape: Shape, size: int, placed: _Placed, how: Behaviour, budgets: list[Budget]) -> float:
    """Bytes of keys and values of all that an engine has in hand, at the largest K, on each of its GPUs."""
    longest = max((budget.lengths for budget in budgets), key=lambda size: size.prompt)
    watching = min(placed.playing * how.calls / max(1, how.turns - 1), placed.decoding)
    tokens = placed.playing * (longest.prompt + longest.suffix) + watching * (longest.crop + longest.report)
    return tokens * key_value_bytes(shape, size) / placed.split


def _memory(
    recipe: RLRecipe, run: DryRun, shape: Shape, size: int, placed: _Placed, how: Behaviour, budgets: list[Budget],
    *, apart: bool,
) -> tuple[dict[str, Entry], float]:  # fmt: skip
    """Of a GPU that learns, and its peak. Sampling and learning take turns, unless episodes are played ahead here."""
    tokens = recipe.token_budget
    patches = 0 if recipe.lora else tokens * shape.patches
    on = recipe.activation_checkpointing
    kept = {c: activation_bytes(shape, size, tokens, patches, checkpointing=c) for c in (True, False)}
    logits = logits_bytes(shape)
    cached = 0.0 if apart else _cached(shape, size, placed, how, budgets)
    lasting = run.weights + run.optimizer + run.reference + run.engine
    learning = run.gradients + run.gathered + kept[on] + logits
    together = recipe.rollout.max_staleness > 0 and not apart
    peak = lasting + (learning + cached if together else max(learning, cached))
    used, unused = "while learning", "if the recipe said so"
    return {
        "weights": Entry(run.weights, "bytes", "exact"),
        "optimizer": Entry(run.optimizer, "bytes", "exact"),
        "reference": Entry(run.reference, "bytes", "exact"),
        "engine's own weights": Entry(run.engine, "bytes", "exact"),
        "gradients": Entry(run.gradients, "bytes", "exact", used),
        "gathered blocks": Entry(run.gathered, "bytes", "exact", used),
        "activations, checkpointed": Entry(kept[True], "bytes", "estimated", used if on else unused),
        "activations, all kept": Entry(kept[False], "bytes", "estimated", unused if on else used),
        "logits": Entry(logits, "bytes", "estimated", used),
        "keys and values": Entry(cached, "bytes", "estimated", "while sampling, at the largest K"),
        "keys and values, contexts full": Entry(run.key_values, "bytes", "at most", "not in the peak"),
        "peak": Entry(peak, "bytes", "estimated"),
    }, peak


def _tokens(recipe: RLRecipe, how: Behaviour, budgets: list[Budget], patches: int) -> dict[str, Entry]:
    prompts, episodes = recipe.rollout.prompts, recipe.rollout.prompts * recipe.rollout.group_size
    shares = [budget.share for budget in budgets]
    read = mean_work([budget.read for budget in budgets], shares) * prompts
    learned = mean_work([budget.learned for budget in budgets], shares) * prompts
    return {
        "episodes": Entry(episodes, "", "exact"),
        "sampled in main traces": Entry(episodes * how.turns * how.turn_tokens, "tokens", "estimated"),
        "sampled by sub-agents": Entry(episodes * how.calls * how.report_tokens, "tokens", "estimated"),
        "read by engines": Entry(read.tokens, "tokens", "estimated", "a prompt once for its group"),
        "through the learner": Entry(learned.tokens, "tokens", "estimated", "a prompt once for each microbatch"),
        "frames, engines": Entry(read.patches / patches, "", "estimated", "through the vision tower"),
        "frames, learner": Entry(learned.patches / patches, "", "estimated", "through the vision tower"),
    }


def _speed(
    recipe: RLRecipe, run: DryRun, shape: Shape, size: int, hardware: Hardware, placed: _Placed, how: Behaviour,
    budgets: list[Budget], *, apart: bool,
) -> dict[str, dict[str, Entry]]:  # fmt: skip
    """Work in all processes, and the time of the one that has most, at the mean over K and at the largest K."""
    adapters = run.trained if recipe.lora else 0
    operators = 0 if apart else OPERATORS[size]  # servers replay a pass from a graph
    prefill, training, decoding = [], [], []
    for budget in budgets:
        work = training_flops(
            shape, budget.learned, checkpointing=recipe.activation_checkpointing, adapters=adapters
        ).total
        if recipe.loss.kl_coef:
            work += forward_flops(shape, budget.learned).total
        training.append(work)
        prefill.append(forward_flops(shape, budget.read).total)
        decoding.append(
            decode_seconds(
                placed.engine, shape, size, budget.lengths, how,
                episodes=placed.sampled * recipe.rollout.group_size, playing=placed.playing,
                decoding=placed.decoding, operators=operators,
            )
        )  # fmt: skip
    read_rate, learn_rate = placed.engine.peak(size) * hardware.prefill, hardware.peak(size) * hardware.training

    def mean(values: list[float]) -> float:
        return sum(value * budget.share for value, budget in zip(values, budgets, strict=True))

    def times(of: Any) -> tuple[float, float, float, float]:
        read, learn = placed.sampled * of(prefill) / read_rate, placed.groups * of(training) / learn_rate
        decode = of(decoding)
        together = apart and recipe.rollout.max_staleness > 0
        return read, decode, learn, max(read + decode, learn) if together else read + decode + learn

    read, decode, learn, step = times(mean)
    slowest = times(max)[3]
    prompts = recipe.rollout.prompts
    sampled = prompts * recipe.rollout.group_size * (how.turns * how.turn_tokens + how.calls * how.report_tokens)
    token = forward_flops(shape, Work(tokens=1, scored=1)).total
    return {
        "work of a step": {
            "read prompts": Entry(prompts * mean(prefill), "FLOP", "estimated"),
            "decode": Entry(sampled * token, "FLOP", "estimated", "without attention"),
            "learn": Entry(prompts * mean(training), "FLOP", "estimated"),
        },
        "time of a step": {
            "read prompts": Entry(read, "s", "estimated", f"{hardware.prefill:.0%} of the peak"),
            "decode": Entry(decode, "s", "estimated", f"{hardware.reading:.0%} of the bandwidth"),
            "learn": Entry(learn, "s", "estimated", f"{hardware.training:.0%} of the peak"),
            "step": Entry(step, "s", "estimated", "at the mean over K"),
            "step, slowest": Entry(slowest, "s", "estimated", "a process has the largest K for all its prompts"),
            "steps per hour": Entry(3600 / step, "", "estimated"),
            "steps per hour, slowest": Entry(3600 / slowest, "", "estimated"),
            f"{recipe.steps} steps": Entry(recipe.steps * step / 3600, "h", "estimated"),
        },
    }
