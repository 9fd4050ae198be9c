"""What samples the episodes of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paravt.config.base import Positive, Strict
from paravt.engines.vllm.config import VLLMConfig
from paravt.engines.vllm.transfer import Backend

Seconds = Annotated[float, Field(gt=0)]


class LocalEngineRecipe(Strict):
    """transformers, in the processes of the run."""

    kind: Literal["local"] = "local"


class VLLMEngineRecipe(Strict):
    """vLLM servers, whose weights follow the learner's; see docs/scale.md."""

    kind: Literal["vllm"]
    servers: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["spawn"] = "spawn"
    """Addresses of running servers, or `spawn`: they are started with the run, on its machine (any one with `--ray`),
    and end with it."""
    replicas: Positive = 1
    """Servers to start."""
    python: str = "python"
    """An interpreter that has vLLM, of the servers to start."""
    arguments: tuple[str, ...] = ()
    """More of `vllm serve`, of the servers to start: `[--tensor-parallel-size, "2"]`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of the servers to start."""
    devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server to start, such as `["4,5", "6,7"]` (with `--ray` only their number counts);
    empty: they run on the CPU."""
    transfer: Backend = "file"
    """How weights get there: a file in `directory`; `gloo`, over TCP between CPUs; `nccl`, between GPUs."""
    directory: str | None = None
    """Of the file, which the servers must see under the same name; null: `weights` in the run's directory."""
    address: str = "127.0.0.1"
    """Of the run's machine, as the servers reach it; for gloo and nccl. With `--ray` it is found, if not given."""
    max_concurrency: Positive = 64
    """Requests of a process at a time, at each server."""
    tries: Positive = 3
    """Servers that a request is sent to before its episode fails."""
    timeout: Seconds = 600
    """Seconds for a request, and for each step of an update of weights."""
    patience: Seconds = 600
    """Seconds to wait for a server while there is none."""
    start_timeout: Seconds = 600
    """Seconds for a server to become healthy."""
    health_every: Seconds = 5
    """Seconds between two health checks of a server."""
    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """How far a server's log-probabilities may be from the learner's after an update; null: 0.001 in float32, 0.3 in 16
    bits."""

    @model_validator(mode="after")
    def _possible(self) -> VLLMEngineRecipe:
        if self.servers != "spawn" and {"replicas", "python", "arguments", "environment", "devices"} & self.changed:
            raise ValueError("replicas, python, arguments, environment and devices are for servers: spawn")
        if self.servers != "spawn" and len({url.rstrip("/") for url in self.servers}) < len(self.servers):
            raise ValueError("servers: an address is there twice; two updates of a server at a time would mix")
        if any("=" in name or not name or "\0" in name + value for name, value in self.environment.items()):
            raise ValueError("environment: a name is empty or has '=' in it, or there is a zero byte")
        gpus = [gpu.strip() for each in self.devices for gpu in each.split(",")]
        if not all(gpus):
            raise ValueError("devices: an entry names no GPU; for servers on the CPU leave devices out")
        if len(set(gpus)) < len(gpus) and "--gpu-memory-utilization" not in " ".join(self.arguments):
            raise ValueError("devices: a GPU is there twice; servers that share one need --gpu-memory-utilization")
        if self.servers == "spawn" and self.transfer == "nccl" and not self.devices:
            raise ValueError("transfer: nccl is between GPUs; give devices, or use file or gloo")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"devices: {len(self.devices)} for {self.replicas} replicas")
        return self

    @property
    def changed(self) -> set[str]:
        """Settings that are not at their defaults."""
        fields = type(self).model_fields.items()
        return {name for name, f in fields if getattr(self, name) != f.get_default(call_default_factory=True)}

    @property
    def gpus(self) -> list[int]:
        """Of each server that is started with the run; none for servers that run already."""
        if self.servers != "spawn":
            return []
        return [len(devices.split(",")) for devices in self.devices] or [0] * self.replicas

    def client_config(self, tolerance: float) -> VLLMConfig:
        """`tolerance` of the canary, where the recipe leaves it open."""
        return VLLMConfig(
            max_concurrency=self.max_concurrency,
            tries=self.tries,
            timeout=self.timeout,
            patience=self.patience,
            start_timeout=self.start_timeout,
            health_every=self.health_every,
            canary_tolerance=self.canary_tolerance or tolerance,
        )
