"""What the local engine is asked to do: requests, which are made of sequences, and updates of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling, stable_seed
from paravt.errors import EngineError
from paravt.models import QwenVL
from paravt.types import Frame, StopReason, Usage


class Update:
    """A call of `load_policy`."""

    def __init__(self, version: int, weights: Mapping[str, Any] | None) -> None:
        self.version, self.weights = version, weights
        self.future: Future[None] = Future()

    def load(self, module: Any) -> None:
        """Put the weights into the model. Raises EngineError, with nothing changed, if names or shapes differ."""
        if self.weights is None:
            return
        current, weights = module.state_dict(), self.weights
        tensors = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
        for what, names in (
            ("lack", current.keys() - weights.keys() - set(module.all_tied_weights_keys)),
            ("have no place for", weights.keys() - current.keys()),
            ("are no tensors at", weights.keys() - tensors.keys()),
            ("differ in shape at", {n for n, w in tensors.items() if n in current and w.shape != current[n].shape}),
        ):
            if names:
                raise EngineError(f"weights of policy {self.version} {what} {min(names)} ({len(names)} in all)")
        module.load_state_dict(tensors, strict=False)  # checked above; only tied names may be absent


class Request:
    """A call of `generate`."""

    def __init__(self, prompt: Prompt, sampling: Sampling, n: int) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.prompt, self.sampling = prompt, sampling
        self.future: Future[list[Completion]] = Future()
        self.completions: list[Completion | None] = [None] * n

    def sequences(self, model: QwenVL) -> list[TokenSequence]:
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
        return [TokenSequence(self, i, key, starts, positions, max_tokens, model.device) for i in samples]


class TokenSequence:
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

    def frames_from(self, start: int) -> Sequence[Frame]:
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


def prefix_key(ids: Sequence[int], frames: Sequence[Frame], chat: TokenChat) -> tuple[np.ndarray, np.ndarray]:
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
    values = [_frame_value(frame.key, frame.pixels.shape) for frame in frames]
    key[places] = np.repeat(np.array(values, np.int64), counts)
    return key, places[ends - counts]


@lru_cache(maxsize=1 << 16)
def _frame_value(key: str, shape: tuple[int, ...]) -> int:
    return -1 - stable_seed(f"{key}\x1f{shape}")


def resolve(future: Future[Any], result: object) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(result)


def fail(future: Future[Any], reason: str) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(EngineError(reason))
