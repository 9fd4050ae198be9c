"""What the options of several commands mean alike. Each raises typer.BadParameter for what makes no sense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import util
from typing import TYPE_CHECKING

import typer

from paravt.errors import RecipeError

if TYPE_CHECKING:
    from paravt.judge import Judge


MOST_FRAMES = 65_536
"""Of an overview: an hour at 18 frames a second. A slip of the finger takes all memory without a word."""


def check_model(model: str | None, server: str | Sequence[str] | None) -> None:
    """One of the two answers, or neither: then it is the small model of the package."""
    if model is not None and server:
        raise typer.BadParameter("give --model or --server, not both")


def check_served(served_model: str | None, server: str | None) -> None:
    if served_model is not None and server is None:
        raise typer.BadParameter("--served-model needs --server")


def open_judge(url: str | None, name: str | None) -> Judge | None:
    """None if no judge is asked for."""
    if (url is None) != (name is None):
        raise typer.BadParameter("--judge and --judge-model belong together")
    if url is None or name is None:
        return None
    from paravt.judge import Judge

    return Judge(url, name)


def split_names(text: str) -> list[str]:
    """Those between commas, each once."""
    return list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def frame_budgets(text: str) -> list[int]:
    """The numbers K of `--frames`."""
    names = split_names(text)
    if not names or not all(
        name.isascii() and name.isdigit() and len(name) < 9 and 0 < int(name) <= MOST_FRAMES for name in names
    ):
        raise typer.BadParameter(f"--frames {text}: numbers from 1 to {MOST_FRAMES}, separated by commas")
    return list(dict.fromkeys(map(int, names)))


def finite(value: float) -> float:
    """Of an option: a range without an upper end lets infinity through."""
    if not math.isfinite(value):
        raise typer.BadParameter("must be a finite number")
    return value


def need_serve(*modules: str) -> None:
    """Raises RecipeError unless these modules of the extra `serve` are installed."""
    if missing := [name for name in modules if util.find_spec(name) is None]:
        raise RecipeError(f"{', '.join(missing)}: not installed; pip install 'paravt[serve]'")
