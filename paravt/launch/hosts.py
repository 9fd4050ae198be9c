"""Places for vLLM servers on the machines of a Ray cluster.

Each server has an actor of Ray that starts it on the machine where it is itself, with the GPUs that Ray gave it. When
the actor is lost, its server ends with it; Ray makes another, maybe elsewhere, and the engine starts a server there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from paravt.config import VLLMEngineRecipe
from paravt.config.engine import LocalEngineRecipe
from paravt.engines.vllm import ServerProcess, SpawnConfig
from paravt.errors import EngineError

_ROOM = 120.0
"""Seconds for an actor to get a place and start a process there."""
_LOOK = 10.0
"""Seconds for an actor to say how things are."""
_LEAVE_THE_KEEPER = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""A server ends by its keeper when the actor is gone. Ray would kill the keeper, and leave the server to itself."""


class Host:
    """The actor. The server listens on an address of its machine that others reach."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    def start(self, config: SpawnConfig, number: int) -> None:
        if self._server is None:
            if config.devices:
                gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
                config = replace(config, devices=(*config.devices[:number], ",".join(gpus)))
            self._server = ServerProcess(config, number, ray.util.get_node_ip_address())
        if not self._server.alive:
            self._server.start()

    def state(self) -> tuple[str | None, bool]:
        """The server's address, and whether it runs."""
        return (None, False) if self._server is None else (self._server.url, self._server.alive)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def last_words(self) -> str:
        return "it was not started" if self._server is None else self._server.last_words()


class PlacedServer:
    """A `Spawned` server at an actor. Only one process of the run `starts` and stops it."""

    def __init__(self, host: Any, config: SpawnConfig, number: int, starts: bool) -> None:
        self._host, self._config, self._number, self._starts = host, config, number, starts
        self._url = f"http://server-{number}.invalid"  # until it has one

    @property
    def url(self) -> str:
        url, _ = self._state()
        self._url = url or self._url
        return self._url

    @property
    def alive(self) -> bool:
        return self._state()[1]

    def start(self) -> None:
        if not self._starts:
            return
        try:
            _answer(self._host.start.remote(self._config, self._number), _ROOM)
        except GetTimeoutError:
            raise EngineError(f"no machine had room for server {self._number} within {_ROOM:g} seconds") from None
        except RayError:
            raise EngineError(f"the machine of server {self._number} is lost; Ray looks for another") from None

    def stop(self) -> None:
        if self._starts:
            with suppress(RayError):  # with its actor it ends anyway
                _answer(self._host.stop.remote(), _ROOM)

    def last_words(self) -> str:
        try:
            return str(_answer(self._host.last_words.remote(), _LOOK))
        except RayError:
            return "its machine is lost"

    def _state(self) -> tuple[str | None, bool]:
        try:
            url, alive = _answer(self._host.state.remote(), _LOOK)
        except RayError:
            return None, False
        return url, alive


def _answer(call: Any, timeout: float) -> Any:
    """What an actor answers within so many seconds. Raises what its own code raises, and RayError if it is lost or too
    late."""
    try:
        return ray.get(call, timeout=timeout)
    except RayTaskError as error:  # a RayError too, but no loss
        raise error.cause from error


class RayHosts:
    """An actor for each server that a run starts; a context manager, which ends them."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = tuple(actors)

    @classmethod
    def place(cls, engine: LocalEngineRecipe | VLLMEngineRecipe) -> RayHosts:
        environment = {"env_vars": _LEAVE_THE_KEEPER}
        host = ray.remote(num_cpus=1, max_restarts=-1, scheduling_strategy="SPREAD", runtime_env=environment)(Host)
        return cls([host.options(num_gpus=gpus).remote() for gpus in _gpus(engine)])

    @staticmethod
    def wanted(engine: LocalEngineRecipe | VLLMEngineRecipe) -> Counter[str]:
        """What they take of a cluster."""
        gpus = _gpus(engine)
        return Counter({"CPU": len(gpus), "GPU": sum(gpus)})

    @property
    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def server(self, config: SpawnConfig, number: int, starts: bool) -> PlacedServer:
        return PlacedServer(self._actors[number], config, number, starts)

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for actor in self._actors:
            ray.kill(actor)


def _gpus(engine: LocalEngineRecipe | VLLMEngineRecipe) -> list[int]:
    """Of each server that is started."""
    return engine.gpus if isinstance(engine, VLLMEngineRecipe) else []
