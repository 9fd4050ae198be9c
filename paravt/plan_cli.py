"""`paravt plan`: what a recipe of reinforcement learning would take, on hardware that need not be here."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paravt.errors import RecipeError
from paravt.terminal import printable, say

if TYPE_CHECKING:
    from paravt.step_plan import Entry, Plan

_BEYOND = "a number of the recipe, the options or the hardware is too large, or too small, for a plan"
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def plan(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe of `paravt rl`.", show_default=False)],
    hardware: Annotated[
        str, typer.Option(help="H100, H200, A100, B200, L40S, RTX4090, cpu, or a YAML file; see docs/plan.md.")
    ] = "H100",
    gpus: Annotated[int, typer.Option(min=1, help="All of them.")] = 1,
    servers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of the GPUs, those that only sample; 0: each one samples and learns. By default as many as the"
            " recipe's engine.devices names.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model: tiny, 2b, 8b, 32b (Qwen3-VL), a directory or a hub id.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the recipe: token_budget=8192 ...")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Guessed: turns of an episode, calls in all but the last.")] = 2,
    calls: Annotated[float, typer.Option(min=0, help="Guessed: sub-agents of an episode.")] = 2.0,
    turn_tokens: Annotated[float, typer.Option(min=1, help="Guessed: sampled in a turn.")] = 256.0,
    report_tokens: Annotated[float, typer.Option(min=1, help="Guessed: sampled by a sub-agent.")] = 96.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: bytes, FLOP, seconds.")] = False,
) -> None:
    """Memory of each GPU, tokens and work of a step, steps per hour: from configurations and published numbers."""
    from paravt.config import RLRecipe, VLLMEngineRecipe, load_recipe
    from paravt.known import hardware as find_hardware
    from paravt.plan import Behaviour
    from paravt.plan_case import find_model
    from paravt.step_plan import make_plan

    loaded = load_recipe(RLRecipe, recipe, override or [])
    machine = find_hardware(hardware)
    if servers is None:
        servers = sum(loaded.engine.gpus) if isinstance(loaded.engine, VLLMEngineRecipe) else 0
    how = Behaviour(turns, calls, turn_tokens, report_tokens)
    found = find_model(loaded, model)
    try:
        made = make_plan(loaded, found, machine, how, gpus=gpus, servers=servers)
    except (OverflowError, ZeroDivisionError):
        raise RecipeError(_BEYOND) from None
    if not all(math.isfinite(entry.value) for part in made.parts.values() for entry in part.values()):
        raise RecipeError(_BEYOND)
    if as_json:
        sys.stdout.write(json.dumps({"hardware": machine.model_dump(), **asdict(made)}) + "\n")
    else:
        show(Console(), made, hardware)
    for warning in made.warnings:
        say(warning)


def show(console: Console, made: Plan, hardware: str) -> None:
    where = f"{made.gpus} x {hardware}" + (f", {made.servers} of them servers" if made.servers else "")
    console.print(Text(printable(f"{made.model} on {where}"), "bold"))
    for title, entries in made.parts.items():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=32)
        table.add_column(justify="right", min_width=18)
        for name, entry in entries.items():
            if entry.value:
                table.add_row(
                    name, amount(entry), Text(entry.kind, "green" if entry.kind == "exact" else "dim"), entry.note
                )
        console.print(table, "")
    table = Table(title="tokens by K", title_justify="left", box=None, pad_edge=False)
    for heading in ("K", "share", "main prompt", "after it", "a sub-agent", "a group in the learner"):
        table.add_column(heading, justify="right")
    for budget in made.budgets:
        long = budget.lengths
        numbers = (long.prompt, long.suffix, long.crop + long.report, budget.learned.tokens)
        table.add_row(str(budget.frames), f"{budget.share:.0%}", *(f"{number:,.0f}" for number in numbers))
    console.print(table, "")
    how = made.behaviour
    console.print(
        "Exact are counts of parameters, and the bytes of what is loaded and trained. Estimated are activations, and"
        f" all that follows from how episodes are guessed to go: {how.turns} turns of {how.turn_tokens:g} tokens,"
        f" {how.calls:g} sub-agents with {how.window_frames:g} frames and reports of {how.report_tokens:g} tokens."
        " Times are a roofline with assumed efficiencies; decoding videos, traffic between GPUs and loading weights"
        " into engines are left out."
    )


def amount(entry: Entry) -> str:
    value, unit = entry.value, str(entry.unit)
    if entry.unit in ("bytes", "FLOP"):
        prefix, scale = next(((p, s) for p, s in _PREFIXES if value >= s), ("", 1.0))
        value, unit = value / scale, f"{prefix}{'B' if entry.unit == 'bytes' else 'FLOP'}"
    return f"{value:,.0f} {unit}".strip() if value >= 1000 or value == int(value) else f"{value:.3g} {unit}".strip()
