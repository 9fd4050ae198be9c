"""The local engine's memory: a pool with the keys and values of running sequences, a store with those of finished
ones, and an attention that reads a shared prompt once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_ROUND = 256
"""Capacities are multiples of this, so that decoding rarely has to grow the pool."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


T = TypeVar("T")


class PrefixIndex(Generic[T]):
    """Finds, among many keys, one that shares the longest prefix with another: in sorted order it is a neighbour."""

    def __init__(self, entries: Iterable[tuple[np.ndarray, T]] = ()) -> None:
        self._names: list[bytes] = []
        self._items: list[T] = []
        for key, item in entries:
            self.add(key, item)

    def add(self, key: np.ndarray, item: T) -> None:
        name = key.tobytes()
        at = bisect_left(self._names, name)
        self._names.insert(at, name)
        self._items.insert(at, item)

    def remove(self, key: np.ndarray) -> None:
        """Of a key that is there once."""
        at = bisect_left(self._names, key.tobytes())
        del self._names[at], self._items[at]

    def longest(self, key: np.ndarray) -> tuple[T | None, int]:
        """The item, and the length of what its key and `key` begin with together; (None, 0) if that is nothing."""
        best: tuple[T | None, int] = (None, 0)
        at = bisect_left(self._names, key.tobytes())
        for i in range(max(0, at - 1), min(at + 1, len(self._names))):
            length = common_prefix(np.frombuffer(self._names[i], np.int64), key)
            if length > best[1]:
                best = (self._items[i], length)
        return best


class KVPool:
    """One slot per running sequence; per layer a tensor (2, slots, kv_heads, capacity, head_dim), keys then values.

    Sequences occupy the slots 0, 1, ... without gaps, so that a forward pass reads a slice of each tensor, never a
    gathered copy. Every layer grows by itself: running out of memory half-way leaves a pool that still works.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._empty = torch.zeros(2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.layers: list[Tensor] = [self._empty] * layers

    def reserve(self, slots: int, width: int) -> None:
        """Make room for `slots` sequences of `width` tokens; contents are kept."""
        for i, old in enumerate(self.layers):
            _, old_slots, heads, old_width, dim = old.shape
            if slots <= old_slots and width <= old_width:
                continue
            new_slots = old_slots if slots <= old_slots else max(slots, 2 * old_slots)
            new_width = old_width if width <= old_width else -(-max(width, 2 * old_width) // _ROUND) * _ROUND
            # Zeros: attention weighs what is masked by 0, and 0 times the NaN in fresh memory would be NaN.
            new = old.new_zeros(2, new_slots, heads, new_width, dim)
            new[:, :old_slots, :, :old_width] = old
            self.layers[i] = new

    def clear(self) -> None:
        """Give the memory back."""
        self.layers = [self._empty] * len(self.layers)

    def read(self, slot: int, length: int) -> list[Tensor]:
        """Per layer a view (2, kv_heads, length, head_dim)."""
        return [layer[:, slot, :, :length] for layer in self.layers]

    def write(self, slot: int, kv: Sequence[Tensor], length: int) -> None:
        """Put the first `length` tokens of `kv`, as `read` gives it, into `slot`."""
        for layer, source in zip(self.layers, kv, strict=True):
            layer[:, slot, :, :length] = source[:, :, :length]


class Block:
    """What the model takes as its cache in one forward pass: row r extends the sequence in slot `first + r`.

    `columns` (B, F) are where the new tokens go. Rows may be padded on the right: what padding writes lies beyond
    the row's end, is hidden by the mask, and is overwritten before it could be seen.
    """

    def __init__(self, pool: KVPool, first: int, columns: Tensor, width: int) -> None:
        self._pool = pool
        self._slots = slice(first, first + columns.shape[0])
        self._rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
        self._columns = columns
        self._width = width

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new (B, kv_heads, F, head_dim) and return all (B, kv_heads, width, head_dim), as views."""
        all_keys, all_values = self._pool.layers[layer_idx][:, self._slots].unbind(0)
        all_keys[self._rows, :, self._columns] = keys.transpose(1, 2)
        all_values[self._rows, :, self._columns] = values.transpose(1, 2)
        return all_keys[:, :, : self._width], all_values[:, :, : self._width]

    # Transformers asks for these where it is given no mask, that is where a plain causal one is right.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width - self._columns.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._width, 0


Trunk: TypeAlias = tuple[Tensor | slice, int, int]
"""Rows of a batch that begin with the same tokens, one of these rows, and how many tokens they share."""

SHARED_PREFIX, GROUPED = "paravt_shared_prefix", "paravt_grouped"


def shared_prefix_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_mask: Tensor,
    scaling: float,
    trunks: Sequence[Trunk],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row that reads what rows share once, where decoding reads it for every row.

    `query` (B, heads, 1, head_dim); `own_mask` (B, 1, 1, S), additive, tells which of the last S columns are the
    row's own, that is not in its trunk. Exact: the scores of both parts go through one softmax.
    """
    rows, kv_heads, width, dim = keys.shape
    query = query.reshape(rows, kv_heads, -1, dim) * scaling
    start = width - own_mask.shape[-1]
    scores = query.new_full((*query.shape[:3], max(length for _, _, length in trunks)), -torch.inf)
    for members, one, length in trunks:
        together = query[members].transpose(0, 1).flatten(1, 2)  # (kv_heads, G * group, head_dim)
        part = together @ keys[one, :, :length].mT
        scores[members, :, :, :length] = part.view(kv_heads, -1, query.shape[2], length).transpose(0, 1)
    own_scores = query @ keys[:, :, start:].mT + own_mask
    weights = torch.cat([scores, own_scores], -1).softmax(-1)
    out = weights[..., scores.shape[-1] :] @ values[:, :, start:]
    for members, one, length in trunks:
        together = weights[members, :, :, :length].transpose(0, 1).flatten(1, 2)
        part = together @ values[one, :, :length]
        out[members] += part.view(kv_heads, -1, query.shape[2], dim).transpose(0, 1)
    return out.reshape(rows, 1, -1, dim), None


def grouped_attention(
    module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention under a mask (B, 1, F, S) that reads each key and value head once for the query heads that share it.

    For CPUs: where there is a mask, transformers first copies keys and values for every query head.
    """
    out = scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
AttentionInterface.register(GROUPED, grouped_attention)


@contextmanager
def using_attention(module: Any, implementation: str | None) -> Iterator[None]:
    """What the text model attends with inside; None: what it attends with anyway."""
    config = module.config.text_config
    before, config._attn_implementation = config._attn_implementation, implementation or config._attn_implementation
    try:
        yield
    finally:
        config._attn_implementation = before


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """A finished sequence: `key` (T,) identifies its tokens and images, `kv` is as `KVPool.read` gives it."""

    key: np.ndarray
    kv: list[Tensor]

    @property
    def bytes(self) -> int:
        return _bytes(self.kv)


def _bytes(kv: Sequence[Tensor]) -> int:
    return sum(layer.numel() * layer.element_size() for layer in kv)


class PrefixStore:
    """Finished sequences, the least recently used first; never more than `max_bytes` of keys and values.

    No key in it is a prefix of another one.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        self.bytes = 0
        self._recent: dict[StoredPrefix, None] = {}
        self._index: PrefixIndex[StoredPrefix] = PrefixIndex()

    @property
    def entries(self) -> list[StoredPrefix]:
        return list(self._recent)

    def longest(self, key: np.ndarray) -> tuple[StoredPrefix | None, int]:
        """An entry that shares the longest prefix with `key`, and the length of that prefix."""
        return self._index.longest(key)

    def touch(self, entry: StoredPrefix) -> None:
        del self._recent[entry]
        self._recent[entry] = None

    def add(self, key: np.ndarray, kv: Sequence[Tensor]) -> None:
        """Store a copy. An entry that the new one continues goes; nothing is stored that an entry already holds."""
        entry, length = self.longest(key)
        if entry is not None and length == len(key):
            self.touch(entry)
        elif (size := _bytes(kv)) <= self.max_bytes:
            if entry is not None and length == len(entry.key):
                self._drop(entry)
            while self.bytes + size > self.max_bytes:
                self._drop(next(iter(self._recent)))
            new = StoredPrefix(key.copy(), [layer.clone() for layer in kv])
            self._recent[new] = None
            self._index.add(new.key, new)
            self.bytes += size

    def _drop(self, entry: StoredPrefix) -> None:
        del self._recent[entry]
        self._index.remove(entry.key)
        self.bytes -= entry.bytes
