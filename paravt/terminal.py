"""What the command line shows of episodes. Everything a model or a file name says is plain text here, never markup."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paravt.answers import extract_letter
from paravt.episode_config import CropDone, CropStarted, Event, OverviewRead, TurnTaken
from paravt.types import Crop, Episode, Window

if TYPE_CHECKING:
    # needs torch, which is slow to import and not needed to show an episode
    from paravt.dry_run import DryRun, SFTDryRun

_STYLES = {"ran": "green", "repaired": "yellow", "bad": "red", "failed": "red", "timed_out": "red", "skipped": "dim"}


def printable(text: str) -> str:
    """Without control characters: model output must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class PrintableFormatter(logging.Formatter):
    """A line without control characters: rows and file names say what they like."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(printable(super().format(record)).split())


def say(message: str) -> None:
    """One line about what the command line is doing, or why it ends, to stderr."""
    line = " ".join(printable(message).split())
    Console(stderr=True, soft_wrap=True).print(Text(f"paravt: {line}"))


def clock(value: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(window: Window | None) -> str:
    return f"{clock(window.start_time)} - {clock(window.end_time)}" if window else "-"


class LiveEpisode:
    """Shows an episode while it runs. Pass `on_event` to `run_episode`."""

    def __init__(self, console: Console) -> None:
        self._status = "reading the overview"
        self._rows: dict[tuple[int, int], Crop | Window] = {}
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._render)

    def __enter__(self) -> LiveEpisode:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def on_event(self, event: Event) -> None:
        if isinstance(event, OverviewRead):
            self._status = f"{len(event.times)} overview frames of {clock(event.duration)}"
        elif isinstance(event, TurnTaken):
            self._status = f"turn {event.index + 1}: " + (
                "answered" if event.turn.answer is not None else f"{len(event.turn.calls)} calls"
            )
        elif isinstance(event, CropStarted):
            self._rows[event.turn, event.index] = event.window
        elif isinstance(event, CropDone):
            self._rows[event.crop.turn, event.crop.index] = event.crop

    def _render(self) -> RenderableType:
        spinner = Spinner("dots", Text(f"{self._status} ({time.monotonic() - self._started:.0f} s)"))
        rows = [self._rows[key] for key in sorted(self._rows)]
        return Group(spinner, crop_table(rows)) if rows else spinner


def crop_table(rows: Sequence[Crop | Window]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("turn", "window", "status", "report"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        if isinstance(row, Window):
            table.add_row("", span(row), Text("watching", "cyan"), "")
        else:
            text = row.report if row.ran else row.error
            shown = Text(printable(_short(text or "", 200)))
            table.add_row(str(row.turn + 1), span(row.window), Text(row.status, _STYLES[row.status]), shown)
    return table


def show_episode(console: Console, episode: Episode) -> None:
    """The answer, what it rests on, and what it cost."""
    answer = _shown_answer(episode)
    console.print(Text.assemble("Answer: ", (answer, "bold"), " (forced)" if episode.forced else ""))
    if episode.crops:
        console.print(crop_table(episode.crops))
    console.print(Text(cost(episode), "dim"))


def _shown_answer(episode: Episode) -> str:
    if episode.answer is None:
        return "(no answer)"
    options, said = episode.sample.options, printable(_short(episode.answer.strip(), 500))
    if not options:
        return said
    letter = extract_letter(episode.answer, options)
    return f"{letter}. {printable(options[ord(letter) - ord('A')])}" if letter else f"{said} (none of the options)"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + " ... (--save keeps all of it)"


def problems(episode: Episode) -> list[str]:
    """What went wrong, a line each; many frames that could not be read are one line."""
    frames = [error for error in episode.errors if error.where == "overview" and error.scored]
    other = [f"{e.where}: {e.message}" for e in episode.errors if e not in frames]
    if len(frames) > 3:
        return [f"overview: {len(frames)} problems, the first: {frames[0].message}", *other]
    return [f"overview: {error.message}" for error in frames] + other


def show_dry_run(console: Console, run: DryRun | SFTDryRun) -> None:
    def gigabytes(size: int) -> str:
        return f"{size / 1e9:.2f} GB"

    from paravt.dry_run import DryRun

    rows = {"parameters": f"{run.parameters:,}, {run.trained:,} trained"}
    memory = {
        "weights": run.weights, "gradients": run.gradients, "optimizer": run.optimizer, "reference": run.reference,
        "gathered blocks": run.gathered,
    }  # fmt: skip
    if isinstance(run, DryRun):
        fewest, most = run.prompts
        rows["steps"] = f"{run.steps}, each {run.episodes} episodes"
        rows["prompts of a process"] = f"{most}" if fewest == most else f"{fewest} or {most}"
        tokens = f"main traces at most {run.most_tokens:,} tokens"
        rows["rows of a step"] = f"about {run.rows:,} if all frames are used, {tokens}"
        memory["engine's own weights"] = run.engine
    else:
        memory["copy to play with"] = run.player
        rows |= {f"stage {name}": f"{steps} steps, each {size} rows" for name, steps, size in run.stages}
    if run.ranks > 1:
        kinds = [f"{each.count} x {each.name} of {each.parameters:,}" for each in run.plan]
        rows[f"sharded over {run.ranks}"] = ", ".join(kinds)
        rows["parameters of a process"] = f"{run.shard:,}"
    rows[f"memory on each of {run.ranks}"] = ", ".join(
        f"{name} {gigabytes(size)}" for name, size in memory.items() if size
    )
    rows["activations"] = f"about {gigabytes(run.activations)} (estimated) in a microbatch"
    if isinstance(run, DryRun):
        rows["keys and values"] = f"at most {gigabytes(run.key_values)} in the local engine"
    rows["all together"] = f"at most about {gigabytes(run.total)}"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def cost(episode: Episode) -> str:
    prompt = sum(trace.prompt_tokens for trace in episode.traces)
    sampled = sum(trace.sampled_tokens for trace in episode.traces)
    parts = ", ".join(f"{part} {value:.1f} s" for part, value in episode.timings.items())
    turns, crops = _count(len(episode.turns), "turn"), _count(episode.tool_calls, "crop")
    return f"{turns}, {crops}, {prompt} prompt and {sampled} sampled tokens\n{parts}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
