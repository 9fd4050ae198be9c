"""A plan: what a step of an RL recipe takes on given hardware, put together from the formulas of `paravt.plan` and the
memory of `paravt.dry_run` for a `Case`.

Left out, since it is small or nobody can know it: decoding videos, what GPUs tell each other, loading new weights into
engines, the optimizer's own work, refills of groups that teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paravt.config import RLRecipe
from paravt.plan import (
    OPERATORS,
    Behaviour,
    Hardware,
    Work,
    activation_bytes,
    decode_seconds,
    forward_flops,
    logits_bytes,
    mean_work,
    training_flops,
)
from paravt.plan_case import USABLE, Budget, Case, Model, make_case


@dataclass(frozen=True)
class Entry:
    """One number. Exact ones follow from configurations alone; docs/plan.md says how the others are estimated."""

    value: float
    unit: Literal["", "bytes", "tokens", "FLOP", "s", "h"]
    kind: Literal["exact", "at most", "estimated"]
    note: str = ""


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


def make_plan(
    recipe: RLRecipe, model: Model, hardware: Hardware, how: Behaviour, *, gpus: int, servers: int = 0
) -> Plan:
    """On `gpus` of the same hardware, of which `servers` only sample, as vLLM servers do; without, every GPU has an
    engine beside its share of the learner.

    Raises RecipeError for what `paravt rl` would refuse, and if a copy of the model can't be split over the servers.
    """
    case = make_case(recipe, model, hardware, how, gpus, servers)
    memory, peak = _memory(case)
    parts = {
        "model": _model(case),
        f"memory of each of {case.placed.learners} GPUs" + (" that learn" if servers else ""): memory,
        "tokens of a step": _tokens(case),
        **_speed(case),
    }
    if servers:
        peak = max(peak, case.copy + case.cached)
        parts[f"memory of each of {servers} GPUs that serve"] = {
            "weights": Entry(case.copy, "bytes", "exact", f"a copy on {case.placed.split}"),
            "keys and values": Entry(case.cached, "bytes", "estimated", "at the largest K"),
        }
    limit = min(recipe.episode.max_context_tokens, model.module.config.text_config.max_position_embeddings)
    warnings = [
        f"K = {b.frames}: an episode of {total:,.0f} tokens is more than the context of {limit:,}"
        for b in case.budgets
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
    return Plan(model.name, gpus, servers, case.how, parts, case.budgets, fits, tuple(warnings))


def _model(case: Case) -> dict[str, Entry]:
    frame = forward_flops(case.shape, Work(patches=case.patches, patch_pairs=case.patches**2))
    token = forward_flops(case.shape, Work(tokens=1, scored=1))
    return {
        "parameters": Entry(case.parameters, "", "exact"),
        "trained": Entry(case.run.trained, "", "exact"),
        "a token, forward": Entry(token.total, "FLOP", "exact", "the text model and its head, without attention"),
        "a frame, forward": Entry(frame.total, "FLOP", "exact", f"the vision tower; {case.frame_tokens} tokens"),
    }


def _memory(case: Case) -> tuple[dict[str, Entry], float]:
    """Of a GPU that learns, and its peak. Sampling and learning take turns, unless episodes are played ahead here."""
    recipe, run = case.recipe, case.run
    tokens = recipe.token_budget
    patches = 0 if recipe.lora else tokens * case.shape.patches
    on = recipe.activation_checkpointing
    kept = {c: activation_bytes(case.shape, case.size, tokens, patches, checkpointing=c) for c in (True, False)}
    logits = logits_bytes(case.shape)
    cached = 0.0 if case.servers else case.cached
    lasting = run.weights + run.optimizer + run.reference + run.engine
    learning = run.gradients + run.gathered + kept[on] + logits
    together = recipe.rollout.max_staleness > 0 and not case.servers
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


def _tokens(case: Case) -> dict[str, Entry]:
    recipe, how, patches = case.recipe, case.how, case.patches
    prompts, episodes = recipe.rollout.prompts, recipe.rollout.prompts * recipe.rollout.group_size
    shares = [budget.share for budget in case.budgets]
    read = mean_work([budget.read for budget in case.budgets], shares) * prompts
    learned = mean_work([budget.learned for budget in case.budgets], shares) * prompts
    return {
        "episodes": Entry(episodes, "", "exact"),
        "sampled in main traces": Entry(episodes * how.turns * how.turn_tokens, "tokens", "estimated"),
        "sampled by sub-agents": Entry(episodes * how.calls * how.report_tokens, "tokens", "estimated"),
        "read by engines": Entry(read.tokens, "tokens", "estimated", "a prompt once for its group"),
        "through the learner": Entry(learned.tokens, "tokens", "estimated", "a prompt once for each microbatch"),
        "frames, engines": Entry(read.patches / patches, "", "estimated", "through the vision tower"),
        "frames, learner": Entry(learned.patches / patches, "", "estimated", "through the vision tower"),
    }


@dataclass(frozen=True)
class _GroupWork:
    """Of a group, at each K."""

    prefill: list[float]
    """FLOP of an engine that reads."""
    decoding: list[float]
    """Seconds of an engine that samples; of all its groups."""
    training: list[float]
    """FLOP of the learner."""


def _group_work(case: Case) -> _GroupWork:
    recipe, shape, placed = case.recipe, case.shape, case.placed
    adapters = case.run.trained if recipe.lora else 0
    found = _GroupWork([], [], [])
    for budget in case.budgets:
        work = training_flops(
            shape, budget.learned, checkpointing=recipe.activation_checkpointing, adapters=adapters
        ).total
        if recipe.loss.kl_coef:
            work += forward_flops(shape, budget.learned).total
        found.training.append(work)
        found.prefill.append(forward_flops(shape, budget.read).total)
        seconds = decode_seconds(
            placed.engine,
            shape,
            case.size,
            budget.lengths,
            case.how,
            episodes=placed.sampled * recipe.rollout.group_size,
            playing=placed.playing,
            decoding=placed.decoding,
            operators=0 if case.servers else OPERATORS[case.size],  # servers replay a pass from a graph
        )
        found.decoding.append(seconds)
    return found


def _speed(case: Case) -> dict[str, dict[str, Entry]]:
    """Work in all processes, and the time of the one that has most, at the mean over K and at the largest K."""
    recipe, hardware, placed, how = case.recipe, case.hardware, case.placed, case.how
    work = _group_work(case)
    read_rate = placed.engine.peak(case.size) * hardware.prefill
    learn_rate = hardware.peak(case.size) * hardware.training

    def mean(values: list[float]) -> float:
        return sum(value * budget.share for value, budget in zip(values, case.budgets, strict=True))

    def times(of: Callable[[list[float]], float]) -> tuple[float, float, float, float]:
        read, learn = placed.sampled * of(work.prefill) / read_rate, placed.groups * of(work.training) / learn_rate
        decode = of(work.decoding)
        together = case.servers and recipe.rollout.max_staleness > 0
        return read, decode, learn, max(read + decode, learn) if together else read + decode + learn

    read, decode, learn, step = times(mean)
    slowest = times(max)[3]
    prompts = recipe.rollout.prompts
    sampled = prompts * recipe.rollout.group_size * (how.turns * how.turn_tokens + how.calls * how.report_tokens)
    token = forward_flops(case.shape, Work(tokens=1, scored=1)).total
    return {
        "work of a step": {
            "read prompts": Entry(prompts * mean(work.prefill), "FLOP", "estimated"),
            "decode": Entry(sampled * token, "FLOP", "estimated", "without attention"),
            "learn": Entry(prompts * mean(work.training), "FLOP", "estimated"),
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
