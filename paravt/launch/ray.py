"""A run on a Ray cluster: the processes that learn, the servers that sample and the workers that decode.

Ray finds places for all of them. The processes that learn run under its `TorchTrainer`, all of them or none: when one
is lost, or the machine that it was on, they are started again and go on from the newest complete checkpoint. What is
wrong with the run itself ends it, as it does without Ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import ray
from ray.exceptions import RayError
from ray.train import (
    ControllerError,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer
from rich.console import Console

from paravt.checkpoint import choose_checkpoint
from paravt.config import LabQuestions, RLRecipe
from paravt.errors import ParaVTError, RecipeError, WorkerError, first_line
from paravt.lab.factory import train_rl
from paravt.launch.decoders import Decoders
from paravt.launch.hosts import RayHosts
from paravt.launch.screen import Screen, shown
from paravt.provenance import lock_directory
from paravt.ranks import PATIENCE
from paravt.terminal import PrintableFormatter, say
from paravt.video import FrameSource

_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
"""Ray's own setting; its default of a minute is short where torch comes from a network disk."""
_STARTING = 300
_CONNECT = 10.0
"""Seconds for a cluster's head to take a connection."""
_GRACE = 300.0
"""Seconds in which the processes of an attempt end after the next one was begun; a file server takes 90 and more to
notice that a machine that held a lock is gone."""


@dataclass(frozen=True)
class _Job:
    """What the processes that learn are told, the same in every attempt but for `hosts`."""

    recipe: RLRecipe
    out: Path
    resume: str
    began: str
    """The name of the checkpoint that the command found or was given; "" without one."""
    marker: Path
    """A directory in `out`, made for this command: a machine that has it shares `out`."""
    directory: Path
    """Where the command was given."""
    reader: FrameSource | None
    screen: Screen
    hosts: RayHosts


def start(
    recipe: RLRecipe,
    out: Path,
    address: str,
    *,
    processes: int,
    resume: str,
    decode_workers: int,
    max_failures: int,
) -> None:
    """Train in so many processes on the cluster at `address`; "local" is one of this machine alone, for this run.

    Lost processes are replaced `max_failures` times. Raises WorkerError when that is not enough, RecipeError if there
    is no such cluster, and what the run itself raises.
    """
    if decode_workers and isinstance(recipe.data, LabQuestions):
        raise RecipeError("--decode-workers: the lab's videos are drawn, not read; leave it out")
    out = out.absolute()
    chosen = choose_checkpoint(out / "checkpoints", resume)
    lock_directory(out).close()  # one that is in use is not waited for
    began = chosen.name if chosen is not None else ""
    marker = out / "ray" / uuid.uuid4().hex
    wanted = _wanted(recipe, processes, decode_workers)
    os.environ.setdefault(_START_TIMEOUT, str(_STARTING))
    # of the command, also between attempts: another one would take away what this one's processes look for
    with lock_directory(out / "ray"), _cluster(address, wanted):
        has = ray.cluster_resources()
        if missing := [
            f"{n:g} {what}, it has {has.get(what, 0):g}" for what, n in wanted.items() if has.get(what, 0) < n
        ]:
            if address == "local":  # nobody can join it
                raise RecipeError(f"--ray local: this machine is too small ({'; '.join(missing)})")
            say(f"the run wants more of the cluster than there is now ({'; '.join(missing)}): waiting for machines")
        reader = Decoders.place(decode_workers) if decode_workers else None
        try:
            marker.mkdir(parents=True)
            with shown() as screen:
                job = partial(
                    _Job, recipe=recipe, out=out, resume=resume, began=began, marker=marker, directory=Path.cwd(),
                    reader=reader, screen=screen,
                )  # fmt: skip
                _until_done(job, recipe, processes, max_failures)
        finally:
            shutil.rmtree(marker.parent, ignore_errors=True)


def _until_done(job: Callable[..., _Job], recipe: RLRecipe, processes: int, max_failures: int) -> None:
    """Attempts, until one is done or too many were lost."""
    lost = 0
    while True:
        try:
            with RayHosts.place(recipe.engine) as hosts:
                _fit(job(hosts=hosts), processes)
            return
        except ControllerError as error:
            if type(error.controller_failure).__name__ == "WorkerGroupStartupTimeoutError":
                say(f"no room for {processes} processes yet: waiting for machines")
                continue
            reason = f"Ray could not start the processes: {first_line(error.controller_failure)}"
        except WorkerGroupError as error:
            reason = _reason(error, processes)
        except RayError as error:  # of its controller
            reason = f"Ray lost the run: {first_line(error)}"
        lost += 1
        if lost > max_failures:
            raise WorkerError(f"{reason}; --max-failures {max_failures} allows no more, the same command goes on")
        say(f"{reason}; going on from the newest checkpoint ({lost} of at most {max_failures} times)")


class _Trainer(TorchTrainer):  # type: ignore[misc]
    def _register_sigint_handler(self, controller: object) -> None:
        """Ray's own would take Ctrl-C for itself: the command is to end as it does without Ray."""


def _fit(job: _Job, processes: int) -> None:
    """One attempt. Raises TrainingFailedError."""
    gpu = job.recipe.model.device.startswith("cuda")
    trainer = _Trainer(
        _learn,
        train_loop_config={"job": job},
        torch_config=TorchConfig("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout_s=int(PATIENCE.total_seconds())),
        scaling_config=ScalingConfig(num_workers=processes, use_gpu=gpu),
        run_config=RunConfig(
            name=job.marker.name,
            storage_path=str(job.marker.parent),  # checkpoints are the run's own, though
            # Ray would try again whatever it was that failed: `_until_done` knows better
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            logging_config=LoggingConfig("CRITICAL"),
        ),
    )
    trainer.fit()


def _reason(error: WorkerGroupError, processes: int) -> str:
    """What was lost, in words, if another attempt makes sense. Raises what the run ended with otherwise."""
    failures: Mapping[int, Exception] = error.worker_failures
    lost = [rank for rank, cause in failures.items() if type(cause).__module__.partition(".")[0] == "ray"]
    if lost:  # what others say then (a checkpoint that cannot be read) comes of that
        return f"process {lost[0]} of {processes} was lost"
    for cause in failures.values():
        full = isinstance(cause, OSError) and not isinstance(cause, ConnectionError)  # a disk
        if isinstance(cause, ParaVTError | FloatingPointError) or full:
            raise cause
    rank, cause = next(iter(failures.items()))
    if not isinstance(cause, RuntimeError | ConnectionError):  # not what a lost connection or a GPU gives: a bug
        raise error
    return f"process {rank} of {processes} failed ({first_line(cause)})"


def _learn(config: Mapping[str, _Job]) -> None:
    """One of the processes that learn. `config` as Ray hands it on."""
    job = config["job"]
    log = logging.StreamHandler(job.screen)
    log.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[log], force=True)
    try:
        os.chdir(job.directory)  # relative paths of the recipe
    except OSError as error:
        raise RecipeError(f"{job.directory}: {error.strerror} on {_node()}; start from a shared directory") from None
    if not job.marker.is_dir():
        raise RecipeError(
            f"{job.out}: not the same directory on {_node()}; --out has to be one that all machines share"
        )
    newest = choose_checkpoint(job.out / "checkpoints", "auto")
    resume = "auto" if newest is not None and newest.name > job.began else job.resume
    if ray.train.get_context().get_world_rank() == 0:
        _wait_for_predecessor(job.out)
    train_rl(job.recipe, job.out, Console(file=cast("IO[str]", job.screen)), resume, job.reader, job.hosts)


def _node() -> str:
    return str(ray.util.get_node_ip_address())


def _wait_for_predecessor(out: Path) -> None:
    """Until no process of an earlier attempt has the directory. If one keeps it, the run says so."""
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        try:
            lock_directory(out).close()
            return
        except RecipeError:
            time.sleep(0.5)


def _wanted(recipe: RLRecipe, processes: int, decode_workers: int) -> Counter[str]:
    """What all parts of a run take of a cluster together."""
    gpu = recipe.model.device.startswith("cuda")
    wanted = Counter({"GPU" if gpu else "CPU": processes})
    wanted["CPU"] += decode_workers
    return wanted + RayHosts.wanted(recipe.engine)


def _check(address: str) -> None:
    """Raises RecipeError if nobody listens there: Ray would try for two minutes and then leave by itself."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise RecipeError(f"--ray {address}: not the address of a cluster's head (host:port), nor auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last: of a name like a..b
        raise RecipeError(
            f"--ray {address}: no Ray cluster there ({error}); start one with ray start --head"
        ) from error


@contextmanager
def _cluster(address: str, wanted: Mapping[str, int]) -> Iterator[None]:
    """Connected to a cluster, or to one that is started, and ended, here."""
    _check(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here tells nobody
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":  # what takes turns on a small machine still has a place
        cpus = max(os.cpu_count() or 1, wanted.get("CPU", 0))
        options |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(**options)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise RecipeError(f"--ray {address}: no Ray cluster there ({first_line(error)})") from error
    try:
        yield
    finally:
        ray.shutdown()
