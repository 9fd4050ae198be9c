"""Checkpoints of a learner: a model that loads anywhere, and the state to go on from.

A checkpoint is a directory `step-000040` with `model/` (Hugging Face layout, adapters merged), `state/` (trained
parameters and optimizer, by torch's distributed checkpointing, to be read on any number of processes) and `run.json`
(where in the data the run was). It is written under another name and renamed when it is whole, so that a killed run
leaves no half of one under its name.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paravt.errors import DataError, RecipeError, first_line
from paravt.learner import Learner

_NAME = re.compile(r"step-(\d{6,})")
# Adapters only, if there are any: the frozen base is in the model that the run started from.
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_checkpoint(directory: Path, learner: Learner, run: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of the learner's current step and remove older ones, up to `keep`. All ranks call it.

    Raises DataError if it cannot be written (a full disk, say); earlier ones are as they were.
    """
    target = directory / f"step-{learner.steps:06d}"
    partial = directory / f"{target.name}.partial"
    try:
        _write(partial, target, learner, run, keep)
    except (OSError, SafetensorError, CheckpointException, DataError) as error:
        if learner.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise DataError(
            f"{target}: cannot be written: {first_line(_cause(error))}; make room and run the same command again"
        ) from error
    return target


def _write(partial: Path, target: Path, learner: Learner, run: dict[str, Any], keep: int) -> None:
    directory = target.parent
    if learner.first:
        for left in directory.glob("*.partial"):  # of a killed run
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    learner.barrier()
    learner.merge_and_export(partial / "model")
    if learner.peft is not None:
        learner.save_adapters(partial / "adapters")
    new = not learner.optimizer.state
    parameters, optimizer = get_state_dict(learner.scorer, learner.optimizer, options=_OPTIONS)
    if new:  # to have a state at all, torch has made a step with a learning rate of 0, which would count
        for state in learner.optimizer.state.values():
            state["step"].zero_()
        parameters, optimizer = get_state_dict(learner.scorer, learner.optimizer, options=_OPTIONS)
    with _quiet():
        save(
            {"parameters": parameters, "optimizer": optimizer},
            checkpoint_id=partial / "state",
            no_dist=learner.mesh is None,
        )
    if learner.first:
        (partial / "run.json").write_text(json.dumps({"step": learner.steps, **run}) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in complete_checkpoints(directory)[:-keep]:
            # under its own name no half of it is ever found
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))
    learner.barrier()


def _cause(error: BaseException) -> BaseException:
    """The failure to write beneath what torch, or a model, makes of it."""
    if isinstance(error, CheckpointException):  # of all ranks
        error = next(iter(error.failures.values()))[0]
    elif isinstance(error, DataError):
        error = error.__cause__ or error
    beneath: BaseException | None = error
    while beneath is not None and not isinstance(beneath, OSError):
        beneath = beneath.__context__
    return beneath or error


def complete_checkpoints(directory: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and (path / "run.json").exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def choose_checkpoint(directory: Path, resume: str) -> Path | None:
    """Where a run starts from: "auto" is the newest complete checkpoint, or none; "never" is none; or a path.

    Raises RecipeError if "never" finds checkpoints, and if a path is no checkpoint or has later ones beside the run.
    """
    found = complete_checkpoints(directory)
    if resume == "auto":
        return found[-1] if found else None
    if resume == "never":
        if found:
            raise RecipeError(f"{directory.parent}: has checkpoints already; choose another --out, or --resume auto")
        return None
    chosen = Path(resume)
    if not (chosen / "run.json").exists():
        raise RecipeError(f"{resume}: not a checkpoint of a run (a directory with run.json)")
    if any(path.name > chosen.name for path in found):
        raise RecipeError(f"{directory.parent}: has later checkpoints; choose another --out, or remove them")
    return chosen


def load_checkpoint(path: Path, learner: Learner) -> dict[str, Any]:
    """Put the learner where it was; returns the `run` of `save_checkpoint` and the `step`. All ranks call it.

    Raises DataError if the checkpoint is damaged.
    """
    try:
        return _load(path, learner)
    except (OSError, CheckpointException, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{path}: cannot be read: {first_line(_cause(error))}; remove it to go on from an older one"
        ) from error


def _load(path: Path, learner: Learner) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    steps = int(run["step"])
    parameters, optimizer = get_state_dict(learner.scorer, learner.optimizer, options=_OPTIONS)
    state: dict[str, Any] = {"parameters": parameters, "optimizer": optimizer}
    with _quiet():
        load(state, checkpoint_id=path / "state", no_dist=learner.mesh is None)
    set_state_dict(
        learner.scorer,
        learner.optimizer,
        model_state_dict=state["parameters"],
        optim_state_dict=state["optimizer"],
        options=_OPTIONS,
    )
    learner.steps = steps
    return run


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be with one process
        yield


def check_room(out: Path, checkpoints: Path, learner: Learner, keep: int) -> None:
    """Raises RecipeError if the disk cannot hold what a run has still to write beside the `checkpoints` that are there,
    or `out` cannot be written to."""
    model = sum(p.numel() * p.element_size() for p in learner.scorer.parameters())
    trained = sum(p.numel() * p.element_size() for p in learner.scorer.parameters() if p.requires_grad)
    more = max(1, keep + 1 - len(complete_checkpoints(checkpoints)))  # one too many for a moment
    needed = more * (model + 3 * trained)  # weights; trained ones again, with the two moments of Adam
    probe = out / ".writable"
    try:
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise RecipeError(f"{out}: cannot be written to: {error.strerror or error}") from error
    if free < needed:
        raise RecipeError(f"{out}: {more} more checkpoints need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
