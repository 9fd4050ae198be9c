"""The learner: log-probabilities of rows, and one optimizer step on them.

Rows of one prompt go through the model together, prompt once (`packing`, `prefix_attention`); the vocabulary head runs
at scored positions only, in chunks. Every log-probability is one of the sampling distribution: logits divided by the
temperature, ids that are never sampled at -inf. Arrays per token are aligned with `Row.ids` throughout.

Sharded (FSDP2) if a mesh is given: every rank brings its own rows, weights are global already, gradients are summed.
The shards are float32 master weights, gathered in the dtype that the model had. One process trains the weights as they
are.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paravt.errors import RecipeError
from paravt.loss import LossConfig, LossStats, policy_loss
from paravt.models import QwenVL
from paravt.optim import OptimizerConfig, learning_rate, make_optimizer
from paravt.packing import Packed, Shared, bucket, dummy_row, pack, pad, plan, share
from paravt.prefix_attention import PACKED, Kernel, attention_inputs
from paravt.types import Row

_ADAPTER = "default"


@dataclass(frozen=True)
class LoRA:
    rank: int = 16
    """Of the adapters."""
    alpha: float = 32
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Last names of linear layers of the text model; None: all of them."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


@dataclass(frozen=True)
class LearnerConfig:
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    temperature: float = 1.0
    """Of the sampler."""
    token_budget: int = 16_384
    """Most tokens in one microbatch; more are accumulated over several."""
    logits_chunk: int = 512
    """Scored tokens per chunk of the vocabulary head."""
    activation_checkpointing: bool = False
    lora: LoRA | None = None
    param_dtype: torch.dtype | None = None
    """What sharded parameters are gathered in, such as bfloat16; reductions stay in float32. None: as they were."""
    packing: bool = True
    """False: rows of similar length are padded; for devices whose attention is slow on packed rows."""
    share_prompts: bool = True
    """Of packed rows."""
    kernel: Kernel | None = None
    """Of the attention; None: the fastest there is for the device."""


@dataclass(frozen=True)
class StepMetrics:
    """Of one step, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    entropy: float
    """Mean over the counted tokens, of the sampling distribution, in nats."""
    microbatches: int
    """Of each rank."""
    packed_tokens: int
    """That went through the model, padding included."""
    token_means: dict[str, float]
    """See `LossStats.means`; `tokens` is the number of scored tokens of weight other than 0."""


class Scorer(nn.Module):
    """The whole forward pass as one module, so that sharding has one root around all that reads parameters."""

    def __init__(self, model: QwenVL, config: LearnerConfig) -> None:
        super().__init__()
        self.module = model.module
        self._model, self._config = model, config
        self.register_buffer(
            "_banned", torch.tensor(model.banned_ids, dtype=torch.long, device=model.device), persistent=False
        )
        # For good, and not around each forward pass: activation checkpointing runs layers again during backward.
        self.module.model.language_model.config._attn_implementation = PACKED

    def forward(self, packed: Packed, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """`(log-probabilities (N,), entropies (N,), detached)`, float32 or more. `temperature`: None, the sampler's."""
        inner = self.module.model
        features = {"image": self._model.encode_images(packed.frames)} if packed.frames else None
        dtype = self._config.param_dtype or self.module.dtype
        attention: dict[str, Any] = {}
        if packed.layout is not None:
            attention = attention_inputs(packed.layout, packed.ids_BT.device, dtype, self._config.kernel)
        # Positions and no cache, always: left to itself the model takes positions from whatever ran before, and a cache
        # would silently be dropped under activation checkpointing.
        hidden_BTD = inner(
            input_ids=packed.ids_BT,
            position_ids=packed.positions_3BT,
            mm_encoder_outputs=features,
            use_cache=False,
            **attention,
        ).last_hidden_state
        hidden = torch.split(hidden_BTD.flatten(0, 1)[packed.predictors_N], self._config.logits_chunk)
        targets = torch.split(packed.targets_N, self._config.logits_chunk)
        head = partial(self._head, temperature=self._config.temperature if temperature is None else temperature)
        if len(hidden) == 1 or not torch.is_grad_enabled():
            parts = [head(h, t) for h, t in zip(hidden, targets, strict=True)]
        else:  # the logits of one chunk at a time, in backward too
            parts = [checkpoint(head, h, t, use_reentrant=False) for h, t in zip(hidden, targets, strict=True)]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _head(self, hidden_CD: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits_CV = self.module.lm_head(hidden_CD)
        if logits_CV.dtype in (torch.bfloat16, torch.float16):
            logits_CV = logits_CV.float()
        logits_CV = logits_CV.div_(temperature).index_fill_(1, self._banned, -math.inf)
        normaliser_C = logits_CV.logsumexp(-1)
        with torch.no_grad():
            entropy_C = torch.special.entr((logits_CV - normaliser_C[:, None]).exp()).sum(-1)
        return logits_CV.gather(1, targets_C[:, None])[:, 0] - normaliser_C, entropy_C


class Learner:
    """Trains `model` in place. With a `mesh` the model is sharded over it; all ranks must make the same calls."""

    def __init__(self, model: QwenVL, config: LearnerConfig, mesh: DeviceMesh | None = None) -> None:
        if mesh is not None and model.module.dtype.itemsize < 4:
            config = replace(config, param_dtype=config.param_dtype or model.module.dtype)
            model.module.float()
        self.model, self.config, self.mesh = model, config, mesh
        self.steps = 0
        self.peft: Any = add_adapters(model.module, config.lora, keep_dtype=mesh is not None) if config.lora else None
        self._reference: Scorer | None = None
        if config.loss.kl_coef and self.peft is None:
            frozen = QwenVL(copy.deepcopy(model.module).requires_grad_(False).eval(), model.processor)
            self._reference = self._shard(Scorer(frozen, config))
        if config.activation_checkpointing:
            model.module.activation_checkpointing_enable({"use_reentrant": False})
        self.scorer = self._shard(Scorer(model, config))
        """The root module; parameters are named as in the model, after `module.`."""
        self.optimizer = make_optimizer(self.scorer.parameters(), config.optimizer)
        self._dummy = dummy_row(model) if mesh is not None else None

    # ------------------------------------------------------------------ log-probabilities

    def logprobs(self, rows: Sequence[Row], temperature: float | None = None) -> list[np.ndarray]:
        """Per row (T,), float64, 0.0 where nothing was sampled. `temperature`: None is the sampler's."""
        return self._logprobs(self.scorer, rows, temperature)

    def reference_logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """The same of the policy that training began with: adapters off, or a frozen copy if `kl_coef` is set."""
        if self.peft is not None:
            with self.peft.disable_adapter():
                return self._logprobs(self.scorer, rows)
        if self._reference is None:
            raise ValueError("there is a reference only with kl_coef or adapters")
        return self._logprobs(self._reference, rows)

    @torch.no_grad()
    def _logprobs(self, scorer: Scorer, rows: Sequence[Row], temperature: float | None = None) -> list[np.ndarray]:
        scorer.eval()
        rows, batches = self._plan(rows)
        out = [np.zeros(len(row.ids)) for row in rows]
        for groups in batches:
            packed = self._pack(rows, groups)
            packed.scatter(scorer(packed, temperature)[0], out)
        if isinstance(scorer, FSDPModule):
            scorer.reshard()  # the root keeps its parameters gathered for a backward that doesn't come
        return out[: len(out) - (self._dummy is not None)]

    # ------------------------------------------------------------------ training

    def step(
        self,
        rows: Sequence[Row],
        token_weights: Sequence[np.ndarray],
        old_logprobs: Sequence[np.ndarray] | None = None,
        ref_logprobs: Sequence[np.ndarray] | None = None,
    ) -> StepMetrics:
        """One update on the rows' `advantages`, with `logprobs` as the sampler's.

        `token_weights` sum up to the normalisation that is wanted, over all ranks. Without `old_logprobs` the policy
        that is updated is the old one: right for the first update after they would have been computed.
        Raises FloatingPointError before anything is changed if the gradient is not finite.
        """
        count, (rows, batches) = len(rows), self._plan(rows)
        blanks = [np.zeros(len(row.ids)) for row in rows[count:]]
        weights = [*token_weights, *blanks]
        old = None if old_logprobs is None else [*old_logprobs, *blanks]
        reference = None if ref_logprobs is None else [*ref_logprobs, *blanks]
        ranks = 1 if self.mesh is None else self.mesh.size()
        self.scorer.train()
        self.optimizer.zero_grad()
        stats: LossStats | None = None
        totals = torch.zeros(3, dtype=torch.float64, device=self.model.device)  # loss, entropy, tokens fed
        for groups in batches:
            packed = self._pack(rows, groups)
            logprobs_N, entropies_N = self.scorer(packed)
            dtype = logprobs_N.dtype
            weights_N = packed.gather(weights).to(dtype)
            output = policy_loss(
                logprobs_N,
                logprobs_N.detach() if old is None else packed.gather(old).to(dtype),
                packed.gather([row.logprobs for row in rows]).to(dtype),
                packed.gather([row.advantages for row in rows]).to(dtype),
                weights_N,
                self.config.loss,
                None if reference is None else packed.gather(reference).to(dtype),
            )
            # Sharding averages gradients over ranks. The weights are global: the sum is wanted.
            (output.loss * ranks).backward()  # type: ignore[no-untyped-call]
            stats = output.stats if stats is None else stats + output.stats
            entropy = entropies_N[weights_N != 0].double().sum()
            totals += torch.stack([output.loss.detach().double(), entropy, totals.new_tensor(packed.ids_BT.numel())])
        assert stats is not None  # there is at least one microbatch
        rate = learning_rate(self.config.optimizer, self.steps)
        norm = self._update(rate)
        self._reduce(totals)
        for name, value in vars(stats).items():
            self._reduce(value, dist.ReduceOp.MAX if name == "mismatch_max" else dist.ReduceOp.SUM)
        means = stats.means()
        loss, entropy_sum, fed = totals.tolist()
        self.steps += 1
        entropy_mean = entropy_sum / max(1.0, means["tokens"])
        return StepMetrics(self.steps, loss, norm, rate, entropy_mean, len(batches), int(fed), means)

    def _update(self, rate: float) -> float:
        parameters = [p for p in self.scorer.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.config.optimizer.clip_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"step {self.steps + 1}: the gradient is not finite")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def _plan(self, rows: Sequence[Row]) -> tuple[list[Row], list[list[Shared]]]:
        """Microbatches. Sharded: as many on every rank, every one with an image; the last row is the dummy then."""
        chat, config = self.model.chat, self.config
        shared = share(chat, rows, share_prompts=config.packing and config.share_prompts)
        batches = (plan if config.packing else bucket)(shared, config.token_budget)
        number = torch.tensor(len(batches), device=self.model.device)
        self._reduce(number, dist.ReduceOp.MAX)
        if not number:
            raise ValueError("no row has a scored token")
        if self._dummy is None:
            return list(rows), batches
        rows = [*rows, self._dummy]
        (dummy,) = share(chat, [self._dummy])
        dummy = Shared(dummy.prompt, (len(rows) - 1,), dummy.suffixes)
        batches += [[] for _ in range(int(number) - len(batches))]
        blind = [batch for batch in batches if not any(rows[i].images for group in batch for i in group.rows)]
        for batch in blind:
            batch.append(dummy)
        return rows, batches

    def _pack(self, rows: Sequence[Row], groups: Sequence[Shared]) -> Packed:
        packed = pack(self.model, rows, groups)
        return packed if self.config.packing else pad(packed, self.model.chat.end_id)

    # ------------------------------------------------------------------ sharding and export

    def _shard(self, scorer: Scorer) -> Scorer:
        if self.mesh is None:
            return scorer
        dtype = self.config.param_dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for block in sharded_blocks(scorer.module):
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(scorer, mesh=self.mesh, mp_policy=policy)
        return scorer

    def _reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.mesh is not None:
            dist.all_reduce(tensor, op, group=self.mesh.get_group())

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Full weights on the CPU under the model's own names, adapters merged, tied ones once: for an engine."""
        gathered = dtype if self.peft is None else None  # merging takes all the digits there are
        state = {name.removeprefix("module."): _full(t, gathered) for name, t in self.scorer.state_dict().items()}
        state = _merged(self.model.module, state) if self.peft is not None else state
        tied = set(self.model.module.all_tied_weights_keys)
        return {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items() if name not in tied}

    def save_adapters(self, directory: str | Path) -> None:
        """In peft's format."""
        if self.peft is None:
            raise ValueError("no adapters are trained")
        state = {name: _full(tensor) for name, tensor in self.peft.state_dict().items() if ".lora_" in name}
        if self.first:
            self.peft.save_pretrained(str(directory), state_dict=state)

    def merge_and_export(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """The whole model in the Hugging Face layout, adapters merged; what is trained stays as it is."""
        state = self.weights(dtype)
        if not self.first:
            return
        trained = self.model.module
        with torch.device("meta"):  # a model that is neither sharded nor adapted, to be filled
            module = type(trained)(copy.deepcopy(trained.config)).to(next(iter(state.values())).dtype)
        module.load_state_dict(state, strict=False, assign=True)  # tied weights have no entry of their own
        module.tie_weights()
        module.generation_config = trained.generation_config
        QwenVL(module, self.model.processor).save(directory)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.mesh is None or self.mesh.get_rank() == 0

    def barrier(self) -> None:
        if self.mesh is not None:
            dist.barrier(group=self.mesh.get_group())


def sharded_blocks(module: Any) -> list[nn.Module]:
    """What is sharded on its own, and gathered only while it runs; the rest is the root's."""
    return [*module.model.visual.blocks, *module.model.language_model.layers]


def _full(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", dtype or whole.dtype, copy=True)


def add_adapters(module: Any, lora: LoRA, *, keep_dtype: bool) -> Any:
    """The `PeftModel` around `module`, which is changed in place: base frozen, adapters trained.

    `keep_dtype`: adapters in the dtype of the base, as sharding needs it, instead of float32.
    """
    text = module.model.language_model
    linear = {name.rsplit(".", 1)[-1] for name, part in text.named_modules() if isinstance(part, nn.Linear)}
    if unknown := sorted(set(lora.targets or ()) - linear):
        raise RecipeError(f"lora: the text model has no linear layers {unknown}; it has {sorted(linear)}")
    names = "|".join(map(re.escape, sorted(lora.targets or linear)))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a factor; peft says int
        target_modules=rf".*language_model\..*\.({names})",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks transformers for something by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(module, config, adapter_name=_ADAPTER, autocast_adapter_dtype=not keep_dtype)


def _merged(module: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of `module` with its adapters W + alpha/r B A merged, under the names it had without them.

    LoRA: Hu et al. 2021, eq. 3. The sum is taken in float32 at least, on copies.
    """
    out = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}
    for prefix, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            a, b = (state[f"{prefix}.lora_{x}.{_ADAPTER}.weight"] for x in "AB")
            base = out[f"{prefix}.weight"]
            wide = base.float() if base.itemsize < 4 else base
            out[f"{prefix}.weight"] = (wide + layer.scaling[_ADAPTER] * (b.to(wide) @ a.to(wide))).to(base.dtype)
    return out
