"""Ways for weights to get from the learner to a vLLM server.

`file`   a safetensors file in a directory that both see (a RAM disk, a shared file system)
`gloo`   a broadcast over TCP between CPUs
`nccl`   a broadcast between GPUs, by vLLM's own code on both sides

For the first two the server has to run our worker extension (`worker/paravt_worker.py`). Every server has a group of
its own with the learner, so that one that dies takes no other with it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paravt.errors import EngineError, first_line

Backend = Literal["file", "gloo", "nccl"]
Post = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Sends something to the server, and returns when it is done with it."""

_PATIENCE = timedelta(seconds=120)
"""For the other side to join a group, and for one tensor."""


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights with the name that servers know them by, which no other run uses."""

    version: int
    label: str
    weights: Mapping[str, Tensor]


class Transfer(Protocol):
    """All methods raise EngineError. A `connection` belongs to one server process."""

    backend: Backend

    async def publish(self, policy: Policy) -> None:
        """Make the policy ready to be sent; earlier ones are no longer sent."""

    async def connect(self, workers: int, init: Post) -> Any:
        """Meet a server of so many workers, that is told how by `init`; the connection."""

    async def send(self, connection: Any, policy: Policy, update: Post) -> None:
        """Send the published policy; `update` tells the server what comes."""

    def close(self) -> None: ...


def open_transfer(backend: Backend, *, directory: Path, address: str, device: str) -> Transfer:
    """`address`: of this machine, as servers reach it. `device`: the GPU that `nccl` sends from.

    Raises EngineError if this environment cannot do it.
    """
    if backend == "file":
        return FileTransfer(directory)
    if backend == "gloo":
        return GlooTransfer(address)
    return NcclTransfer(address, device)


class FileTransfer:
    backend: Backend = "file"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._published: Path | None = None

    async def publish(self, policy: Policy) -> None:
        path = self._directory.resolve() / f"{policy.label}.safetensors"
        try:
            await asyncio.to_thread(_write, path, policy.weights)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path}: cannot be written: {str(error).splitlines()[0]}; make room") from error
        self.close()
        self._published = path

    async def connect(self, workers: int, init: Post) -> None:
        await init({})

    async def send(self, connection: None, policy: Policy, update: Post) -> None:
        await update({"path": str(self._directory.resolve() / f"{policy.label}.safetensors")})

    def close(self) -> None:
        if self._published is not None:
            self._published.unlink(missing_ok=True)


def _write(path: Path, weights: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class GlooTransfer:
    backend: Backend = "gloo"

    def __init__(self, address: str) -> None:
        self._address = address

    async def publish(self, policy: Policy) -> None:
        return None

    async def connect(self, workers: int, init: Post) -> Any:
        size = workers + 1
        try:
            await asyncio.get_running_loop().getaddrinfo(self._address, None)
            # It listens at all addresses. That of the machine is for the server: from here it may be out of reach, and
            # torch would try it for minutes, with nothing else going on.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", 0, size, is_master=True, timeout=_PATIENCE, wait_for_workers=False
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(f"engine.address: {self._address}: cannot listen there: {first_line(error)}") from error
        told = {"host": self._address, "port": store.port, "world_size": size, "rank_offset": 1}

        def join() -> Any:
            return dist.ProcessGroupGloo(store, 0, size, _PATIENCE)

        return await _both(init(told), join)

    async def send(self, connection: Any, policy: Policy, update: Post) -> None:
        def broadcast() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            for tensor in policy.weights.values():
                connection.broadcast([tensor.contiguous()], options).wait()

        await _both(update(_announcement(policy)), broadcast)

    def close(self) -> None:
        return None


class NcclTransfer:
    """Not run by us: it needs GPUs. What it calls is vLLM's documented interface for trainers."""

    backend: Backend = "nccl"

    def __init__(self, address: str, device: str) -> None:
        self._address, self._device = address, torch.device(device)
        if self._device.type != "cuda":
            raise EngineError(f"engine.transfer: nccl sends from a GPU, and the model is on {device}; use file or gloo")
        try:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init
        except ImportError as error:
            raise EngineError(f"engine.transfer: nccl needs vllm in this environment too ({error})") from error
        self._join = trainer_init

    async def publish(self, policy: Policy) -> None:
        return None

    async def connect(self, workers: int, init: Post) -> Any:
        try:
            port = await asyncio.to_thread(free_port, self._address)
        except (OSError, ValueError) as error:
            raise EngineError(f"engine.address: {self._address}: cannot listen there: {first_line(error)}") from error
        told = {"master_address": self._address, "master_port": port, "world_size": workers + 1}

        def join() -> Any:
            torch.cuda.set_device(self._device)
            return self._join(told)

        return await _both(init({**told, "rank_offset": 1, "packed": False}), join)

    async def send(self, connection: Any, policy: Policy, update: Post) -> None:
        def broadcast() -> None:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.current_stream()
            for tensor in policy.weights.values():
                connection.broadcast(tensor.to(self._device).contiguous(), src=0, stream=stream)
                stream.synchronize()  # before the copy's memory is used again

        await _both(update(_announcement(policy)), broadcast)

    def close(self) -> None:
        return None


def _announcement(policy: Policy) -> dict[str, Any]:
    weights = policy.weights
    return {
        "names": list(weights),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


async def _both(told: Awaitable[object], ours: Callable[[], Any]) -> Any:
    """Our side of an exchange in a thread, while the server does its own; what ours gives.

    Nobody waits for the thread when the server fails, or at the end of the run: with the other side gone it may be
    stuck, for minutes with gloo, for good with nccl.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        outcome = partial(done.set_exception, EngineError("the transfer of weights broke off"))
        try:
            outcome = partial(done.set_result, ours())
        except RuntimeError as error:  # of gloo, nccl: the other side is gone, or late
            said = EngineError(f"the transfer of weights broke off: {first_line(error)}")
            outcome = partial(done.set_exception, said)
        finally:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(lambda: done.done() or outcome())

    threading.Thread(target=work, name="paravt-transfer", daemon=True).start()
    order = asyncio.ensure_future(told)
    try:
        return (await asyncio.gather(order, done))[1]
    finally:
        order.cancel()  # when ours has failed: its answer is nobody's any more


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])
