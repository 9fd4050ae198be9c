"""Where metrics go beside the JSONL file: trackers by name, each from its own package."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from paravt.engines.base import stable_seed
from paravt.errors import RecipeError

TrackerName = Literal["tensorboard", "trackio", "wandb"]


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite values only."""

    def close(self) -> None: ...


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raises RecipeError if the package of one of them is not installed. Nothing is loaded."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a directory of that name is not the package
            raise RecipeError(f"trackers: {name} is not installed; pip install {name}")


def open_tracker(name: TrackerName, out: Path, config: Mapping[str, Any]) -> Tracker:
    """Raises RecipeError if the tracker's package is not installed."""
    check_trackers([name])
    if name == "tensorboard":
        return _TensorBoard(importlib.import_module("torch.utils.tensorboard"), out)
    # A run that is continued goes on in its tracker, which knows it by this.
    run = f"{out.name}-{stable_seed(out.resolve()):x}"
    options: dict[str, Any] = {"project": "paravt", "name": run, "config": dict(config), "resume": "allow"}
    if name == "wandb":
        options |= {"id": run, "dir": str(out)}
    return _Wandb(importlib.import_module(name), options)


class _TensorBoard:
    def __init__(self, package: Any, out: Path) -> None:
        self._writer = package.SummaryWriter(log_dir=str(out / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb, and trackio, which has the same interface."""

    def __init__(self, package: Any, options: Mapping[str, Any]) -> None:
        self._package = package
        package.init(**options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        self._package.finish()
