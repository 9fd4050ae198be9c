"""Inside of vLLM: weight transfer by a file or by gloo, for servers whose workers can do neither.

    PYTHONPATH=<this directory> vllm serve MODEL --worker-extension-cls paravt_worker.Extension \
        --weight-transfer-config '{"backend": "paravt"}'

vLLM imports the module in each worker, before the model is loaded. It imports nothing of the package beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

_PATIENCE = timedelta(seconds=120)


def repack_tied_head(model: Any) -> None:
    """On CPUs the head multiplies with a packed copy of its weights. A head that is tied to the embedding has no tensor
    of its own among those that are loaded, so nothing would pack it anew, and it would go on with the old ones."""
    if not current_platform.is_cpu() or not getattr(model.config, "tie_word_embeddings", False):
        return
    embedding = next(part for name, part in model.named_modules() if name.endswith("embed_tokens"))
    for part in model.modules():
        if isinstance(part, ParallelLMHead):
            part.weight = embedding.weight
            part.quant_method.process_weights_after_loading(part)


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """Of gloo; a file needs none of it."""

    host: str = ""
    port: int = 0
    world_size: int = 2
    rank_offset: int = 1


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    path: str = ""
    """A safetensors file; "": the tensors that follow come over gloo."""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class Engine(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls, update_info_cls = Init, Update
    group: Any = None
    """With the sender, which has rank 0."""
    under_way = False
    """Whether an update has begun that did not end, or broke off."""

    def init_transfer_engine(self, init_info: Init) -> None:
        if init_info.host:
            parallel = self.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + dist.get_rank()
            at, size = (init_info.host, init_info.port), init_info.world_size
            store = dist.TCPStore(*at, size, False, _PATIENCE)  # type: ignore[attr-defined]
            rank = init_info.rank_offset + worker
            self.group = dist.ProcessGroupGloo(store, rank, size, _PATIENCE)

    def start_weight_update(self) -> None:
        if self.under_way:  # layers that it half loaded would count what they have towards this one
            finalize_layerwise_reload(self.model, self.model_config)
        self.under_way = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        tensors = self._from_file(update_info.path) if update_info.path else self._from_group(update_info)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.under_way = False
        repack_tied_head(self.model)

    def shutdown(self) -> None:
        self.group = None

    def _from_file(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)

    def _from_group(self, update: Update) -> Iterator[tuple[str, torch.Tensor]]:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], options).wait()
            yield name, tensor


WeightTransferEngineFactory.register_engine("paravt", Engine)


class Extension:
    """vLLM's workers get it as a base; it is here for the module to be imported."""
