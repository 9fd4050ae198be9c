"""Layers of the Qwen-VL families with the same parameters and results, computed faster.

Mixins: a family puts each in front of its own class, whose instances then change their class in place, so that
parameters, names and checkpoints stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision  # the same in both families


class BatchedVisionAttention:
    """All sequences of one length, whole frames or windows of frames, as one batch.

    Outside CUDA's flash attention transformers loops over the sequences, which costs more than the attention itself
    where they are short. A sequence is attended to by itself either way: the results are the same.
    """

    def forward(self: Any, hidden_states: Tensor, cu_seqlens: Tensor, **kwargs: Any) -> Tensor:
        total = hidden_states.shape[0]
        qkv = self.qkv(hidden_states).reshape(total, 3, self.num_heads, -1)
        q, k, v = qkv.permute(1, 0, 2, 3).unbind(0)
        q, k = apply_rotary_pos_emb_vision(q, k, *kwargs["position_embeddings"])
        lengths = cu_seqlens.diff()
        distinct = sorted(set(lengths.tolist()))
        if len(distinct) == 1:
            out = _attend(q, k, v, distinct[0], self.scaling)
        else:
            out = torch.empty_like(q)
            length_of_own = lengths.repeat_interleave(lengths)
            for length in distinct:
                at = (length_of_own == length).nonzero()[:, 0]
                out[at] = _attend(q[at], k[at], v[at], length, self.scaling)
        return self.proj(out.reshape(total, -1))  # type: ignore[no-any-return]


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """Of (patches, heads, head_dim), in which every `length` patches are a sequence."""
    q_b, k_b, v_b = (x.reshape(len(x) // length, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q_b, k_b, v_b, scale=scale).transpose(1, 2).reshape(q.shape)


class FusedRMSNorm:
    """One kernel in place of six; in float32 only, where it rounds as the original does."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.float32:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
