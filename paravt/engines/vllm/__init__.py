"""The vLLM engine; see `engine`."""

from paravt.engines.vllm.config import VLLMConfig
from paravt.engines.vllm.engine import Learner, VLLMEngine
from paravt.engines.vllm.spawn import (
    CPU_ARGUMENTS,
    WORKER_DIRECTORY,
    ServerProcess,
    SpawnConfig,
    Spawned,
    serve_arguments,
)
from paravt.engines.vllm.transfer import Backend, Transfer, open_transfer

__all__ = [
    "CPU_ARGUMENTS",
    "WORKER_DIRECTORY",
    "Backend",
    "Learner",
    "ServerProcess",
    "SpawnConfig",
    "Spawned",
    "Transfer",
    "VLLMConfig",
    "VLLMEngine",
    "open_transfer",
    "serve_arguments",
]
