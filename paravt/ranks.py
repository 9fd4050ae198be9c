"""The processes of a run: which one this is, and how it speaks to the others.

Under torchrun or Ray, each process learns from its own share of every step (and samples it), and makes the same calls
here in the same order. What is exchanged (numbers, texts, episodes without pixels) goes between processes of one run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from paravt.errors import WorkerError

T = TypeVar("T")

# Of a process that waits for the episodes of another one. One that died is noticed at once.
PATIENCE = timedelta(hours=2)
_GRACE = 20.0
"""Seconds in which a launcher ends the processes of a run after one has died."""


class Ranks:
    """This process among those of the run: one, or as many as torchrun or Ray started. A context manager.

    Ray has connected them already, and ends that, too; under torchrun they are connected here.

    Whichever process fails first ends the run and says why; the others leave without a message of their own.
    """

    def __init__(self) -> None:
        self.rank, self.size, self._store = 0, 1, None
        self._launcher = os.getppid()
        self._local = dist.get_node_local_rank(fallback_rank=0)
        self._here = os.environ.get("LOCAL_WORLD_SIZE")
        self._worker = ThreadPoolExecutor(1, "paravt-learner", self._use_device)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    @property
    def size_here(self) -> int:
        """Processes of the run on this machine, as torchrun says."""
        return int(self._here or self.size)

    def device(self, name: str) -> str:
        """Each process has a GPU of its own."""
        return f"cuda:{self._local}" if name == "cuda" and self.size > 1 else name

    def mesh(self, device: str) -> DeviceMesh | None:
        """What a learner is sharded over; None if this process is alone."""
        return init_device_mesh(torch.device(device).type, (self.size,)) if self.size > 1 else None

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run something in the one thread that computes and exchanges, while the event loop goes on.

        A single thread keeps the order of all exchanges the same in every process.
        """
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, in every process. Raises WorkerError if their launcher is gone."""
        return [value] if self.size == 1 else await self.call(self.exchange, value)

    def exchange(self, value: T) -> list[T]:
        """The same, for a loop that computes and exchanges in its own thread."""
        if self._store is not None and os.getppid() != self._launcher:
            raise WorkerError("the launcher of this process was killed")
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def __enter__(self) -> Ranks:
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        elif dist.is_torchelastic_launched():
            self._store, self.rank, self.size = next(rendezvous("env://"))
        self._use_device()
        if self._store is not None and self.size > 1:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.size > 1 and isinstance(error, RuntimeError):
            time.sleep(_GRACE)  # if it is about another process that died, the launcher ends this one meanwhile
        if self._store is not None and error is not None and not self._fails_first():
            raise SystemExit(1) from None
        self._worker.shutdown()
        if self._store is not None and error is None and dist.is_initialized():
            dist.destroy_process_group()

    def _fails_first(self) -> bool:
        assert self._store is not None
        try:
            return self._store.add("failures", 1) == 1
        except dist.DistError:  # the process that kept the store is gone
            return False

    def _use_device(self) -> None:
        if self.size > 1 and torch.cuda.is_available():
            torch.cuda.set_device(self._local)
