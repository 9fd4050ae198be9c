"""The attention of packed rows by itself: its mask, its output and its gradient, against the plain definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paravt.prefix_attention as prefix_attention
from paravt.prefix_attention import Block, Layout, dense_mask, packed_attention

LAYOUT = Layout((Block(9, (4, 7, 1)), Block(5), Block(3, (6, 6))))


def reference_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * 0.3).masked_fill(~dense_mask(layout, q.device), -torch.inf)
    return scores.softmax(-1) @ v


def test_the_mask_by_hand() -> None:
    mask = dense_mask(Layout((Block(2, (1, 2)), Block(1))), torch.device("cpu"))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("kernel", ["cpu", "varlen"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_attention_and_its_gradient(
    kernel: Any, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "varlen" with stand-ins for the two CUDA operators, after their contract: what is tested is our bookkeeping."""
    if kernel == "varlen":
        monkeypatch.setattr(prefix_attention.torch.ops.aten, "_flash_attention_forward", varlen_forward, raising=False)
        monkeypatch.setattr(
            prefix_attention.torch.ops.aten, "_flash_attention_backward", varlen_backward, raising=False
        )
    noise = torch.Generator().manual_seed(0)
    tokens = sum(LAYOUT.pieces)
    shapes = [(1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8), (1, 4, tokens, 8)]
    q, k, v, upstream = (torch.randn(s, generator=noise, dtype=torch.float64).to(dtype) for s in shapes)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    packed_attention(*inputs, LAYOUT, 0.3, kernel).backward(upstream)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference_attention(*exact, LAYOUT)
    expected.backward(upstream.double())
    out = packed_attention(q, k, v, LAYOUT, 0.3, kernel)
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)
    for got, wanted in zip(inputs, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, atol=bound, rtol=bound)


def _sequences(cum_q: Tensor, cum_k: Tensor) -> list[tuple[slice, slice]]:
    bounds = zip(*(zip(c.tolist(), c.tolist()[1:], strict=False) for c in (cum_q, cum_k)), strict=True)
    return [(slice(*a), slice(*b)) for a, b in bounds]


def varlen_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale):  # type: ignore[no-untyped-def]
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert q.is_contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    for a, b in _sequences(cum_q, cum_k):
        assert a.stop - a.start <= max_q
        assert b.stop - b.start <= max_k
        args = (x.transpose(0, 1)[None] for x in (q[a], k[b], v[b]))
        piece, piece_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, 0.0, causal, scale=scale)
        out[a], lse[:, a] = piece[0].transpose(0, 1), piece_lse[0]
    return out, lse, None, None, None


def varlen_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale):  # type: ignore[no-untyped-def]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for a, b in _sequences(cum_q, cum_k):
        first = (x.transpose(0, 1)[None] for x in (g[a], q[a], k[b], v[b], out[a]))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *first, lse[None, :, a], 0.0, causal, scale=scale
        )
        for whole, where, part in zip(grads, (a, b, b), parts, strict=True):
            whole[where] = part[0].transpose(0, 1)
    return grads
