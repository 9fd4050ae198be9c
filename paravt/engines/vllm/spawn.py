"""vLLM servers as processes of our own, which never outlive us."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from paravt.errors import EngineError

log = logging.getLogger(__name__)

WORKER_DIRECTORY = Path(__file__).parent / "worker"
"""To be on a server's PYTHONPATH, for the worker extension."""
KEEPER = Path(__file__).parent / "keeper.py"
_CPU = {
    "CUDA_VISIBLE_DEVICES": "",  # the learner's, if there is one
    # one thread for each process: more threads than cores wait for one another most of the time
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
CPU_ARGUMENTS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Of `vllm serve` on CPUs. A prompt that does not fit into a batch would be read in parts, and there vLLM 0.32 ends at
one that is sampled with a seed ("CPU Generator does not use offset")."""
# What torchrun tells the processes of a run. A server is none of them: with it, its workers would look for each other
# at the launcher's store, and wait there.
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
             "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_STOP = 30.0
"""Seconds for a server to be gone; its keeper takes about 10 if it has to use force."""


@dataclass(frozen=True)
class SpawnConfig:
    python: str
    """An interpreter that has vLLM."""
    arguments: tuple[str, ...]
    """Of `vllm serve`, the model first."""
    environment: Mapping[str, str]
    """Beside this process's own."""
    devices: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of each server; () for CPUs."""
    logs: Path
    """A directory."""


class Spawned(Protocol):
    """A server of our own, wherever it runs. Who asks waits for the answer: not for an event loop."""

    @property
    def url(self) -> str:
        """Where it listens; another address when it was started again elsewhere."""

    @property
    def alive(self) -> bool: ...

    def start(self) -> None:
        """Raises EngineError if it cannot be started."""

    def stop(self) -> None:
        """Returns when it is gone."""

    def last_words(self) -> str:
        """Why it ended, in a line."""


class ServerProcess:
    """Server number `number`, on this machine. Raises EngineError if there is no such interpreter.

    `address` is the one of this machine's that it listens on.
    """

    def __init__(self, config: SpawnConfig, number: int, address: str = "127.0.0.1") -> None:
        python = shutil.which(config.python)
        if python is None:
            raise EngineError(f"engine.python: {config.python}: no such program; name an interpreter that has vLLM")
        # Bound for as long as this is there, but not listening: the server can listen at it, now and started again,
        # and nobody else is given it meanwhile.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind((address, 0))
        self.port = int(self._place.getsockname()[1])
        self.url = f"http://{address}:{self.port}"
        self._python = python
        self.log = config.logs / f"server-{number}.log"
        host = ["--host", address, "--port", str(self.port)]
        vllm = [python, "-m", "vllm.entrypoints.cli.main", "serve"]
        # isolated: neither this directory nor PYTHONPATH is looked into for modules
        self._command = [sys.executable, "-I", str(KEEPER), *vllm, *config.arguments, *host]
        own = {
            # opens the endpoints that pause, update and reset
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(WORKER_DIRECTORY),
            **({"CUDA_VISIBLE_DEVICES": config.devices[number]} if config.devices else _CPU),
        }
        inherited = {k: v for k, v in os.environ.items() if k not in _LAUNCHER and not k.startswith("TORCHELASTIC_")}
        self._environment = {**inherited, **own, **config.environment}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that all others of the server descend from; None before its start."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises EngineError if no process can be started."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                # a session of its own: Ctrl-C is for us, and we end it
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:  # a full disk, no room for a process
            raise EngineError(f"{self.url}: the server cannot be started: {error.strerror or error}") from error

    def stop(self) -> None:
        """Returns when it is gone, or cannot be ended, which is said."""
        if self._process is None:
            return
        pipe: IO[bytes] | None = self._process.stdin
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
        # its keeper ends it when the pipe does, or when told: somebody else may hold the pipe's other end
        for insist in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_STOP)
                return
            except subprocess.TimeoutExpired:
                insist()
        log.warning("%s did not end in time; look for processes of `vllm serve ... --port %d`", self.url, self.port)

    def last_words(self) -> str:
        """The last line of its log that says what went wrong."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]
        except OSError:
            return "it left no log"
        if lines and "No module named 'vllm'" in lines[-1]:
            return f"engine.python: {self._python} has no vLLM; name an interpreter that has it"
        said = [line.strip() for line in lines if "Error" in line] or [line.strip() for line in lines if line.strip()]
        return f"{said[-1][:300] if said else 'nothing was said'} ({self.log})"


def serve_arguments(
    model: str,
    *,
    dtype: str,
    context: int,
    images: int,
    sequences: int,
    pixels: tuple[int, int],
    transfer: str,
    more: Sequence[str],
) -> tuple[str, ...]:
    """Of `vllm serve`. `context` in tokens, `images` of a prompt, `sequences` at a time; `pixels` are the smallest and
    the largest frame that the image processor must leave as it is."""
    own = transfer != "nccl"
    worker = ("--worker-extension-cls", "paravt_worker.Extension") if own else ()
    backend = "paravt" if own else transfer
    return (
        model,
        "--served-model-name",
        "policy",
        "--dtype",
        dtype,
        "--max-model-len",
        str(context),
        "--max-num-seqs",
        str(sequences),
        "--limit-mm-per-prompt",
        json.dumps({"image": images, "video": 0}),
        "--mm-processor-kwargs",
        # of images alone: the limits of videos are for all of their frames together
        json.dumps({"images_kwargs": {"size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]}}}),
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        *worker,
        "--weight-transfer-config",
        json.dumps({"backend": backend}),
        *more,
    )
