"""What the local engine works on: a pool with the keys and values of running sequences, a store with those of finished
ones, and requests, which are made of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling, stable_seed
from paravt.errors import EngineError
from paravt.models import QwenVL
from paravt.types import Frame, StopReason, Usage

_ROUND = 256
"""Capacities are multiples of this, so that decoding rarely has to grow the pool."""


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


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

    def write(self, slot: int, kv: Seq[Tensor], length: int) -> None:
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

SHARED_PREFIX = "paravt_shared_prefix"


def shared_prefix_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_mask: Tensor,
    scaling: float,
    trunks: Seq[Trunk],
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


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """A finished sequence: `key` (T,) identifies its tokens and images, `kv` is as `KVPool.read` gives it."""

    key: np.ndarray
    kv: list[Tensor]

    @property
    def bytes(self) -> int:
        return _bytes(self.kv)


def _bytes(kv: Seq[Tensor]) -> int:
    return sum(layer.numel() * layer.element_size() for layer in kv)


class PrefixStore:
    """Finished sequences, the least recently used first; never more than `max_bytes` of keys and values."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.entries: list[StoredPrefix] = []

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def longest(self, key: np.ndarray) -> tuple[StoredPrefix | None, int]:
        """The entry that shares the longest prefix with `key`, the newest of several, and the length of that prefix."""
        best: tuple[StoredPrefix | None, int] = (None, 0)
        for entry in reversed(self.entries):
            if (length := common_prefix(entry.key, key)) > best[1]:
                best = (entry, length)
        return best

    def touch(self, entry: StoredPrefix) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)

    def add(self, key: np.ndarray, kv: Seq[Tensor]) -> None:
        """Store a copy. Entries that the new one continues go; nothing is stored that an entry already holds."""
        entry, length = self.longest(key)
        if entry is not None and length == len(key):
            self.touch(entry)
        elif (size := _bytes(kv)) <= self.max_bytes:
            self.entries = [e for e in self.entries if common_prefix(e.key, key) < len(e.key)]
            while self.bytes + size > self.max_bytes:
                self.entries.pop(0)
            self.entries.append(StoredPrefix(key.copy(), [layer.clone() for layer in kv]))

    def clear(self) -> None:
        self.entries = []


class Update:
    """A call of `load_policy`."""

    def __init__(self, version: int, weights: Mapping[str, Any]) -> None:
        self.version, self.weights = version, weights
        self.future: Future[None] = Future()


class Request:
    """A call of `generate`."""

    def __init__(self, prompt: Prompt, sampling: Sampling, n: int) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.future: Future[list[Completion]] = Future()
        self.completions: list[Completion | None] = [None] * n

    def sequences(self, model: QwenVL) -> list[Sequence]:
        """Raises EngineError or ValueError for a prompt that the model cannot take."""
        ids, frames = self.prompt.ids, self.prompt.images
        config = model.module.config.text_config
        room = config.max_position_embeddings - len(ids) + 1  # the last token sampled is never fed
        if room < 1:
            raise EngineError(f"a prompt of {len(ids)} tokens: the model takes {config.max_position_embeddings}")
        if not ids or min(ids) < 0 or max(ids) >= config.vocab_size:
            raise EngineError("the prompt is empty, or holds ids that the model does not have")
        key, starts = prefix_key(ids, frames, model.chat)
        max_tokens = min(self.sampling.max_tokens, room)
        positions, after = model.positions(ids, frames)
        generated = np.broadcast_to(np.arange(after, after + max_tokens), (3, max_tokens))
        positions = np.concatenate([positions, generated], 1)
        samples = range(len(self.completions))
        return [Sequence(self, i, key, starts, positions, max_tokens, model.device) for i in samples]


class Sequence:
    """One sample of a request. The pool holds the keys and values of its first `length` tokens."""

    def __init__(
        self,
        request: Request,
        index: int,
        prompt_key: np.ndarray,
        image_starts: np.ndarray,
        positions: np.ndarray,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.request, self.index = request, index
        self.sampling, self.future = request.sampling, request.future
        self.prompt_length = len(prompt_key)
        self.prompt_key = prompt_key[:-1]
        """What prefill can reuse; decoding always feeds the last token, for its logits."""
        self.trunk = self.prompt_key.tobytes()
        """Equal for sequences that can share their prompt while they decode."""
        self.key = np.concatenate([prompt_key, np.zeros(max_tokens, np.int64)])
        self.positions = positions
        self.length = self.reused = 0
        self.logprobs: list[float] = []
        self._image_starts, self._max_tokens = image_starts, max_tokens
        self.generator = torch.Generator(device).manual_seed(stable_seed(request.sampling.seed, index))

    def frames_from(self, start: int) -> Seq[Frame]:
        return self.request.prompt.images[int(np.searchsorted(self._image_starts, start)) :]

    def append(self, token: int, logprob: float) -> None:
        self.key[self.prompt_length + len(self.logprobs)] = token
        self.logprobs.append(logprob)

    def stop_reason(self, stop_ids: frozenset[int]) -> StopReason | None:
        if int(self.key[self.prompt_length + len(self.logprobs) - 1]) in stop_ids:
            return "stop"
        return "length" if len(self.logprobs) == self._max_tokens else None

    def finish(self, chat: TokenChat, policy_version: int) -> None:
        ids = self.key[self.prompt_length : self.prompt_length + len(self.logprobs)].tolist()
        self.request.completions[self.index] = Completion(
            ids=tuple(ids),
            text=chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
            logprobs=tuple(self.logprobs),
            stop_reason=self.stop_reason(chat.stop_ids) or "length",
            policy_version=policy_version,
            usage=Usage(self.prompt_length, len(ids), self.reused),
        )
        done = [completion for completion in self.request.completions if completion is not None]
        if len(done) == len(self.request.completions):
            resolve(self.future, done)


def prefix_key(ids: Seq[int], frames: Seq[Frame], chat: TokenChat) -> tuple[np.ndarray, np.ndarray]:
    """What identifies a prompt to the prefix cache: its ids, with a negative value from the frame's content (and
    size) in place of each placeholder. Also where the images start. Raises EngineError if frames and ids disagree."""
    key = np.array(ids, np.int64)
    places = np.flatnonzero(key == chat.image_id)
    counts = np.array([chat.image_tokens(frame) for frame in frames], np.int64)
    ends = counts.cumsum()
    if ends[-1:].sum() != len(places) or (places[ends - 1] - places[ends - counts] + 1 != counts).any():
        raise EngineError(f"{len(places)} image placeholders do not fit the sizes of {len(frames)} frames")
    if ids[-1] == chat.image_id:
        raise EngineError("a prompt cannot end with an image placeholder")
    names = (f"{frame.key}\x1f{frame.pixels.shape}" for frame in frames)
    values = [-1 - stable_seed(name) for name in names]
    key[places] = np.repeat(np.array(values, np.int64), counts)
    return key, places[ends - counts]


def resolve(future: Future[Any], result: object) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(result)


def fail(future: Future[Any], reason: str) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(EngineError(reason))
