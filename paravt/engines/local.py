"""The local engine: transformers in this process, with continuous batching and reuse of shared prefixes.

One worker thread owns the model. Each of the n samples of a request is a sequence with a slot in the KV pool. An
iteration of the worker admits what waits (prefill: all of a prompt but its last token), then does one decoding step
for all running sequences: it feeds the last token that each has and samples the next one. So a sequence whose prompt
is known up to its last token needs no prefill at all, and n samples of a prompt differ from the first step on.

Reuse is one rule: a sequence starts from a copy of the longest prefix that a running or a stored sequence shares
with it. That covers groups, repeated prompts and the turns of a trace. While sequences with the same prompt decode,
they read one copy of it where that pays (`shared_prefix_attention`).

Left out: paged memory (a slot is as wide as the widest sequence), chunked prefill (a prompt is fed in one pass), and
a cache of image features apart from the keys and values.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.kv import (
    GROUPED,
    SHARED_PREFIX,
    Block,
    KVPool,
    PrefixIndex,
    PrefixStore,
    StoredPrefix,
    Trunk,
    using_attention,
)
from paravt.engines.requests import Request, TokenSequence, Update, fail, resolve
from paravt.errors import EngineError, first_line
from paravt.models import QwenVL, load_model
from paravt.types import Frame


@dataclass
class EngineStats:
    """Counts since the engine was made. `fed_tokens` went through the model (padding not counted)."""

    fed_tokens: int = 0
    encoded_images: int = 0
    passes: int = 0


_Source: TypeAlias = TokenSequence | StoredPrefix | None
_Admission: TypeAlias = tuple[TokenSequence, _Source, int]


class LocalEngine:
    """An `Engine` over a model in this process; close it, or use it as an async context manager.

    `max_batch` sequences run at a time, `prefill_tokens` (padding included) are prefilled between two decoding
    steps, and finished sequences are kept for reuse in up to `prefix_cache_bytes`. The module may be shared with a
    learner that works while no request runs; the engine puts it into eval mode whenever it generates.
    """

    def __init__(
        self,
        model: QwenVL,
        *,
        max_batch: int = 32,
        prefill_tokens: int = 8192,
        prefix_cache_bytes: int = 1 << 30,
        policy_version: int = 0,
    ) -> None:
        self.model = model
        self.stats = EngineStats()
        self.policy_version = policy_version
        self._max_batch, self._prefill_tokens = max_batch, prefill_tokens
        text = model.module.config.text_config
        self._pool = KVPool(
            text.num_hidden_layers, text.num_key_value_heads, model.head_dim, model.module.dtype, model.device
        )
        self._store = PrefixStore(prefix_cache_bytes)
        self._banned = torch.tensor(model.banned_ids, device=model.device)
        self._inbox: queue.SimpleQueue[list[Request] | Update | None] = queue.SimpleQueue()
        # What was asked stays in one of these lists until it runs or has its answer: whatever kills the worker, the
        # callers of what is left in them hear of it.
        self._arrived: list[Request] = []
        self._waiting: list[TokenSequence | Update] = []
        self._active: list[TokenSequence] = []  # in the order of their slots
        self._closed = False
        self._lock = threading.Lock()  # between a last request and the end of the worker
        self._thread = threading.Thread(target=self._work, name="paravt-local-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, path: str | Path, dtype: str = "auto", device: str = "cpu", **options: int) -> LocalEngine:
        """Raises ModelError if the checkpoint cannot be loaded."""
        return cls(load_model(path, dtype, device), **options)

    # ------------------------------------------------------------------ the protocol; on the callers' event loops

    @property
    def chat(self) -> TokenChat:
        return self.model.chat

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        (answer,) = self.submit([(prompt, sampling, n)])
        return await answer

    def submit(self, calls: Sequence[tuple[Prompt, Sampling, int]]) -> list[asyncio.Future[list[Completion]]]:
        """Many calls of `generate` that arrive as one, in this order. Cancelling a future frees what its call held."""
        requests = [Request(*call) for call in calls]
        self._submit(requests)
        return [asyncio.wrap_future(request.future) for request in requests]

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        """Replace the weights once the requests made before have ended; requests made later wait for that.

        None if whoever shares the module has changed them in place: what was computed with the old ones is dropped.
        Raises EngineError, and changes nothing, if names or shapes differ from the model's.
        """
        update = Update(version, weights)
        self._submit(update)
        await asyncio.wrap_future(update.future)

    async def close(self) -> None:
        """Requests that still run fail with EngineError."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> LocalEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _submit(self, job: list[Request] | Update) -> None:
        with self._lock:
            if self._closed:
                raise EngineError("the local engine is closed")
            self._inbox.put(job)

    # ------------------------------------------------------------------ scheduling; from here on, the worker thread

    def _work(self) -> None:
        reason = "the worker of the local engine died; its traceback is on stderr"
        try:
            while self._receive():
                self._drop_dead()
                self._admit()
                self._decode()
            reason = "the local engine was closed"
        finally:  # nobody is left waiting, whatever happened
            with self._lock:
                self._closed = True
                while not self._inbox.empty():
                    job = self._inbox.get()
                    for left in job if isinstance(job, list) else filter(None, [job]):
                        fail(left.future, reason)
            for item in [*self._active, *self._waiting, *self._arrived]:
                fail(item.future, reason)
            self._pool.clear()
            self._store.clear()

    def _receive(self) -> bool:
        """Take in what has arrived, and wait for it if there is nothing to do. False if the engine is to close."""
        idle = not self._active and not self._waiting
        if idle and self.model.device.type != "cpu":  # a learner may want the memory
            self._pool.clear()  # on a CPU with the next update: the first use of fresh memory is slow there
        while True:
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if job is None:
                return False
            if isinstance(job, Update):
                self._waiting.append(job)
                continue
            self._arrived += job
            while self._arrived:
                request = self._arrived[0]
                try:
                    self._waiting += request.sequences(self.model)
                except (ValueError, EngineError) as error:
                    fail(request.future, first_line(error))
                del self._arrived[0]

    def _drop_dead(self) -> None:
        """Forget what was cancelled or has failed."""
        self._waiting = [item for item in self._waiting if not item.future.done()]
        for slot in reversed(range(len(self._active))):
            if self._active[slot].future.done():
                self._release(slot)

    def _release(self, slot: int) -> None:
        """Free a slot; the last sequence moves into it."""
        last = self._active.pop()
        if slot < len(self._active):
            self._pool.write(slot, self._pool.read(len(self._active), last.length), last.length)
            self._active[slot] = last

    def _admit(self) -> None:
        while self._waiting and isinstance(update := self._waiting[0], Update) and not self._active:
            self._guard([update], partial(self._apply, update))
            del self._waiting[0]
        budget = self._prefill_tokens
        while budget > 0 and (batch := self._next_batch(budget)):
            rows = [sequence for sequence, _, _ in batch]
            ran = self._guard(rows, partial(self._prefill, batch))
            self._waiting = [item for item in self._waiting if item not in rows]
            self._active += rows if ran else []
            budget -= len(rows) * max(row.prompt_length - 1 - row.reused for row in rows)

    def _next_batch(self, budget: int) -> list[_Admission]:
        """What to prefill together: sequences, each with the one whose prefix it reuses and that prefix's length.

        In order of arrival, but passing over those that would cost too much padding, and those that would share more
        with a member of the batch than with anything before it: they come after it, and find its keys and values.
        """
        batch: list[_Admission] = []
        chosen: PrefixIndex[TokenSequence] = PrefixIndex()
        running: PrefixIndex[TokenSequence] | None = None
        widest = useful = 0
        for item in self._waiting:
            if isinstance(item, Update) or len(self._active) + len(batch) == self._max_batch:
                break
            running = running or PrefixIndex((other.key[: other.length], other) for other in self._active)
            source, reused = self._longest_prefix(item, running)
            feed = item.prompt_length - 1 - reused
            padded = max(widest, feed) * (len(batch) + 1)
            alone = not batch and budget == self._prefill_tokens  # a prompt beyond the budget gets a pass of its own
            if (padded > budget and not alone) or 3 * padded > 4 * (useful + feed):
                continue
            gain = chosen.longest(item.prompt_key)[1] - reused
            if gain > 0 and 4 * gain >= feed:
                continue
            batch.append((item, source, reused))
            chosen.add(item.prompt_key, item)
            widest, useful = max(widest, feed), useful + feed
        return batch

    def _longest_prefix(self, sequence: TokenSequence, running: PrefixIndex[TokenSequence]) -> tuple[_Source, int]:
        # A match cannot end inside an image: a key holds whole images, and equal values in it mean equal images.
        stored, length = self._store.longest(sequence.prompt_key)
        other, shared = running.longest(sequence.prompt_key)
        return (other, shared) if shared > length else (stored, length)

    def _guard(self, items: Sequence[TokenSequence | Update], action: Callable[[], None]) -> bool:
        """Run a step of the model. What torch raises (out of memory, bad shapes) fails the requests of these items."""
        try:
            action()
        except (RuntimeError, ValueError, EngineError) as error:
            what = "" if isinstance(error, EngineError) else "the model failed: "
            for item in items:
                fail(item.future, what + first_line(error))
            return False
        return True

    def _apply(self, update: Update) -> None:
        update.load(self.model.module)
        self._store.clear()
        self._pool.clear()
        self.policy_version = update.version
        resolve(update.future, None)

    # ------------------------------------------------------------------ the model

    @torch.inference_mode()
    def _prefill(self, batch: list[_Admission]) -> None:
        """Fill the next free slots with all of the prompts but their last tokens."""
        first, rows = len(self._active), [sequence for sequence, _, _ in batch]
        self._pool.reserve(first + len(rows), max(row.prompt_length for row in rows))
        for slot, (row, source, reused) in enumerate(batch, first):
            if isinstance(source, StoredPrefix):
                self._store.touch(source)
                self._pool.write(slot, source.kv, reused)
            elif source is not None:
                self._pool.write(slot, self._pool.read(self._active.index(source), reused), reused)
            row.length = row.reused = reused
        feeds = [row.prompt_length - 1 - row.length for row in rows]
        if any(feeds):
            self._forward(rows, first, feeds)

    def _forward(self, rows: Sequence[TokenSequence], first: int, feeds: Sequence[int]) -> Tensor:
        """Feed each row its next `feeds[r]` tokens; the rows sit in the slots from `first` on. Returns the last
        layer's states (B, max(feeds), hidden), of which those beyond a row's feed mean nothing."""
        module, device = self.model.module, self.model.device
        if module.training:
            module.eval()
        longest = max(feeds)
        ids = np.full((len(rows), longest), self.chat.end_id)
        positions = np.zeros((3, len(rows), longest), np.int64)
        frames: list[Frame] = []
        for r, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            key = row.key[row.length : row.length + feed]
            ids[r, :feed] = np.where(key < 0, self.chat.image_id, key)
            positions[:, r, :feed] = row.positions[:, row.length : row.length + feed]
            frames += row.frames_from(row.length)
        starts = [row.length for row in rows]
        width = max(start + feed for start, feed in zip(starts, feeds, strict=True))
        self._pool.reserve(first + len(rows), max(starts) + longest)
        columns = (torch.tensor(starts)[:, None] + torch.arange(longest)).to(device)
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "position_ids": torch.from_numpy(positions).to(device),
            "cache": Block(self._pool, first, columns, width),
            "mm_encoder_outputs": {"image": self.model.encode_images(frames)} if frames else None,
        }
        trunks = self._trunks(rows, width)
        at = torch.arange(width, device=device)
        if trunks:
            begins = torch.tensor([row.prompt_length - 1 for row in rows], device=device)[:, None]
            own = (at <= columns) & (at >= begins)
            mask = torch.where(own, 0.0, -math.inf)[:, None, None, int(begins.min()) :]
            with using_attention(module, SHARED_PREFIX):
                output = module.model(**inputs, attention_mask=mask, trunks=trunks)
        elif len(set(starts)) == 1 and (longest == 1 or starts[0] == 0):
            output = module.model(**inputs)  # causal attention is right, and without a mask torch has faster kernels
        else:
            with using_attention(module, GROUPED if device.type == "cpu" else None):
                output = module.model(**inputs, attention_mask=(at <= columns[..., None])[:, None])
        for row, feed in zip(rows, feeds, strict=True):
            row.length += feed
        self.stats.passes += 1
        self.stats.fed_tokens += sum(feeds)
        self.stats.encoded_images += len({frame.key for frame in frames})
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _trunks(self, rows: Sequence[TokenSequence], width: int) -> list[Trunk]:
        """The prompts that the rows share while they decode; nothing unless that at least halves what is read.

        In float32 only: the scores are products in the model's precision, which torch's own kernels do better.
        """
        if self.model.module.dtype != torch.float32 or any(row.length < row.prompt_length - 1 for row in rows):
            return []
        groups: dict[bytes, list[int]] = {}
        for r, row in enumerate(rows):
            groups.setdefault(row.trunk, []).append(r)
        shared = [rows[members[0]].prompt_length - 1 for members in groups.values()]
        if 2 * (sum(shared) + len(rows) * (width - min(shared))) > len(rows) * width:
            return []
        trunks: list[Trunk] = []
        for members, length in zip(groups.values(), shared, strict=True):
            first, end = members[0], members[-1] + 1
            together = end - first == len(members)  # a slice saves copies
            chosen = slice(first, end) if together else torch.tensor(members, device=self.model.device)
            trunks.append((chosen, first, length))
        return trunks

    @torch.inference_mode()
    def _decode(self) -> None:
        """One more token for every running sequence."""
        if self._active and self._guard(self._active, self._step):
            for slot in reversed(range(len(self._active))):
                sequence = self._active[slot]
                if not sequence.future.done() and sequence.stop_reason(self.chat.stop_ids) is not None:
                    self._guard([sequence], partial(self._keep, slot))
                    sequence.finish(self.chat, self.policy_version)
                    self._release(slot)

    def _step(self) -> None:
        hidden = self._forward(self._active, 0, [1] * len(self._active))
        logits = self.model.module.lm_head(hidden[:, 0]).float()
        logits[:, self._banned] = -math.inf
        temperatures = [row.sampling.temperature for row in self._active]
        divisors = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
        logprobs = torch.log_softmax(logits / divisors[:, None], -1)
        # argmax(p / q) with q ~ Exp(1) is a draw from p. Each row draws its q from its own generator, so that what
        # it samples does not depend on the rest of the batch. Greedy rows have q = 1.
        race = torch.ones_like(logprobs)
        for r, row in enumerate(self._active):
            if temperatures[r] > 0:
                race[r].exponential_(generator=row.generator)
        ids = (logprobs - race.log()).argmax(-1)
        chosen = logprobs.gather(-1, ids[:, None])[:, 0]
        for row, token, logprob in zip(self._active, ids.tolist(), chosen.tolist(), strict=True):
            if math.isnan(logprob):
                fail(row.future, "the model's logits are not numbers")
            row.append(token, logprob)

    def _keep(self, slot: int) -> None:
        sequence = self._active[slot]
        self._store.add(sequence.key[: sequence.length], self._pool.read(slot, sequence.length))
