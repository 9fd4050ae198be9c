"""Where metrics go beside the JSONL file: trackers by name, each from its own package."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from paravt.errors import RecipeError

TrackerName = Literal["tensorboard", "trackio", "wandb"]


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_tracker(name: TrackerName, out: Path, config: Mapping[str, Any]) -> Tracker:
    """Raises RecipeError if the tracker's package is not installed."""
    module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(f"trackers: {name} is not installed; pip install {name}") from error
    return _TensorBoard(package, out) if name == "tensorboard" else _Wandb(package, out, config)


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

    def __init__(self, package: Any, out: Path, config: Mapping[str, Any]) -> None:
        self._package = package
        package.init(project="paravt", name=out.name, config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=step)

    def close(self) -> None:
        self._package.finish()
