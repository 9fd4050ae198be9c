"""Exact attention over rows that share a prompt, packed as `[prompt, suffix 1, ..., suffix G]`, and so on.

Every token sees the tokens before it in its own piece; a suffix sees its prompt as well. So attention has two parts:
every piece on itself, causal; all suffixes of a prompt on that prompt, without a mask. The prompt is computed once, and
nothing is padded. Each part comes with the log-sum-exp of its scores; they are merged as in flash decoding,

    lse = logaddexp(lse_self, lse_cross),   out = sum over parts of exp(lse_part - lse) * out_part,

and the backward of each part, given the *merged* out and lse, is that part's share of the exact gradient: flash
attention's backward recomputes the probabilities as exp(score - lse) and needs out only for rowsum(out * grad_out).

Kernels: "cpu" (torch's flash attention for CPUs: float32, float64, bfloat16), "varlen" (the flash attention of CUDA
for packed sequences; written after `torch.nn.attention.varlen` and **never run on a GPU yet**: only its bookkeeping is
tested), and "dense" for everything else: a mask over all pairs of tokens, exact too, slower, in memory quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "paravt_packed"
"""The name by which transformers knows this attention."""

Kernel = Literal["cpu", "varlen", "dense"]
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """A prompt and the rows that share it, in tokens. A row alone is all prompt: there is nothing to split."""

    prompt: int
    suffixes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt < 1 or min(self.suffixes, default=1) < 1:
            raise ValueError("every piece of a block has at least one token")


@dataclass(frozen=True)
class Layout:
    """What the packed sequence is made of."""

    blocks: tuple[Block, ...]

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Lengths of all prompts and suffixes, in order."""
        return tuple(length for block in self.blocks for length in (block.prompt, *block.suffixes))

    @cached_property
    def crosses(self) -> tuple[tuple[Span, Span], ...]:
        """Of every block with suffixes: where its prompt is, and where its suffixes are."""
        out, at = [], 0
        for block in self.blocks:
            middle, end = at + block.prompt, at + block.prompt + sum(block.suffixes)
            if end > middle:
                out.append(((at, middle), (middle, end)))
            at = end
        return tuple(out)


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    if device.type == "cpu":
        return "cpu"
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        return "varlen"
    return "dense"


def attention_inputs(layout: Layout, device: torch.device, dtype: torch.dtype, kernel: Kernel | None) -> dict[str, Any]:
    """What to pass to a model that uses the attention `PACKED`. `kernel` None: the fastest there is."""
    kernel = kernel or kernel_for(device, dtype)
    if kernel == "dense":
        return {"attention_mask": dense_mask(layout, device)}
    # Transformers hands any 4-D mask through as it is; without one it would build its own.
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return {"attention_mask": placeholder, "layout": layout, "kernel": kernel}


def dense_mask(layout: Layout, device: torch.device) -> Tensor:
    """(1, 1, T, T), True where the query (second last) sees the key (last)."""
    pieces = torch.tensor(layout.pieces, device=device)
    piece_T = torch.arange(len(pieces), device=device).repeat_interleave(pieces)
    at_T = torch.arange(len(piece_T), device=device)
    mask = piece_T[:, None] == piece_T
    for prompt, suffixes in layout.crosses:
        mask[slice(*suffixes), slice(*prompt)] = True
    return (mask & (at_T[:, None] >= at_T))[None, None]


def packed_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    kernel: Kernel = "cpu",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function as transformers calls it; what has no layout is ordinary attention."""
    if layout is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(query, key, value, layout, scale, kernel).transpose(1, 2), None


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernel: Kernel = "cpu"
) -> Tensor:
    """(1, heads, T, head_dim) of queries (1, heads, T, head_dim), keys and values (1, kv_heads, T, head_dim)."""
    if query.shape[0] != 1 or query.shape[2] != sum(layout.pieces):
        raise ValueError(f"queries {tuple(query.shape)} for a layout of {sum(layout.pieces)} tokens")
    return _PackedAttention.apply(query, key, value, layout, scale, kernel)  # type: ignore[no-any-return]


AttentionInterface.register(PACKED, packed_attention_forward)
AttentionMaskInterface.register(PACKED, sdpa_mask)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, kernel: Kernel
    ) -> Tensor:
        run = _varlen_forward if kernel == "varlen" else _cpu_forward
        out, lse = run(query, key, value, layout.pieces, layout.pieces, True, scale)
        if layout.crosses:
            prompts, suffixes = zip(*layout.crosses, strict=True)
            other, other_lse = run(
                _take(query, suffixes), _take(key, prompts), _take(value, prompts),
                _lengths(suffixes), _lengths(prompts), False, scale,
            )  # fmt: skip
            own, own_lse = _take(out, suffixes), _take(lse, suffixes)
            merged_lse = torch.logaddexp(own_lse, other_lse)
            merged = own * (own_lse - merged_lse).exp().unsqueeze(-1)
            merged += other * (other_lse - merged_lse).exp().unsqueeze(-1)
            _put(out, suffixes, merged)
            _put(lse, suffixes, merged_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        run = _varlen_backward if ctx.kernel == "varlen" else _cpu_backward
        pieces, crosses, scale = ctx.layout.pieces, ctx.layout.crosses, ctx.scale
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = run(grad, query, key, value, out, lse, pieces, pieces, True, scale)
        if crosses:
            prompts, suffixes = zip(*crosses, strict=True)
            others = run(
                _take(grad, suffixes), _take(query, suffixes), _take(key, prompts), _take(value, prompts),
                _take(out, suffixes), _take(lse, suffixes), _lengths(suffixes), _lengths(prompts), False, scale,
            )  # fmt: skip
            for whole, part, spans in zip(grads, others, (suffixes, prompts, prompts), strict=True):
                _put(whole, spans, _take(whole, spans) + part)
        return *grads, None, None, None


def _take(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """The spans of the token dimension (2), one after the other; a view if there is one span."""
    parts = [tensor[:, :, start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _put(tensor: Tensor, spans: Sequence[Span], values: Tensor) -> None:
    for (start, stop), part in zip(spans, torch.split(values, _lengths(spans), 2), strict=True):
        tensor[:, :, start:stop] = part


def _lengths(spans: Sequence[Span]) -> list[int]:
    return [stop - start for start, stop in spans]


# Kernels. Sequence i has `q_lengths[i]` of the packed queries and `k_lengths[i]` of the packed keys and values, and
# sees nothing else. Tensors are (1, heads, tokens, head_dim), lse (1, heads, tokens), float32 at least.


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int], causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _, heads, tokens, dim = query.shape
    # Tokens before heads in memory: the output projection then reads it without a copy.
    out = query.new_empty(1, tokens, heads, dim).transpose(1, 2)
    lse = torch.empty(1, heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
    to, parts = torch.split(out, list(q_lengths), 2), torch.split(lse, list(q_lengths), 2)
    inputs = zip(
        torch.split(query, list(q_lengths), 2), *(torch.split(x, list(k_lengths), 2) for x in (key, value)), strict=True
    )
    for i, (q, k, v) in enumerate(inputs):
        piece, piece_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        to[i].copy_(piece)
        parts[i].copy_(piece_lse)
    return out, lse


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, q_lengths: Sequence[int],
    k_lengths: Sequence[int], causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    by_queries = [torch.split(x, list(q_lengths), 2) for x in (grad, query, out, lse)]
    by_keys = [torch.split(x, list(k_lengths), 2) for x in (key, value)]
    pieces = []
    for g, q, o, el, k, v in zip(*by_queries, *by_keys, strict=True):
        pieces.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, el, 0.0, causal, scale=scale
            )
        )
    d_query, d_key, d_value = (torch.cat(parts, 2) for parts in zip(*pieces, strict=True))
    return d_query, d_key, d_value


def _varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int], causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = (_tokens_first(x) for x in (query, key, value))
    bounds = (_bounds(q_lengths, q.device), _bounds(k_lengths, q.device), max(q_lengths), max(k_lengths))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False, scale=scale)
    return out.transpose(0, 1)[None], lse[None]


def _varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, q_lengths: Sequence[int],
    k_lengths: Sequence[int], causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g, q, k, v, o = (_tokens_first(x) for x in (grad, query, key, value, out))
    bounds = (_bounds(q_lengths, q.device), _bounds(k_lengths, q.device), max(q_lengths), max(k_lengths))
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    unused = torch.empty(0, device=q.device)
    d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
        g, q, k, v, o, lse[0].contiguous(), *bounds, 0.0, causal, rng_state, unused, scale=scale
    )
    return d_query.transpose(0, 1)[None], d_key.transpose(0, 1)[None], d_value.transpose(0, 1)[None]


def _tokens_first(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1).contiguous()


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
