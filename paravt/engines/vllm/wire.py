"""What goes to a vLLM server and comes back: token ids in and out, images beside them (`/inference/v1/generate`).

A request has one placeholder for each image, and the server expands it; already expanded ones, or one too many, would
be taken without a complaint and shown to the model as another prompt. So the server's own expansion, which it sends
back, is compared with ours for every request.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from PIL import Image

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.replies import NotThat, as_list, as_object, read_json, short
from paravt.errors import EngineError
from paravt.types import Frame, StopReason, Usage

BANNED = -100.0
"""The bias of ids that are never sampled; the server's smallest. e^-100 is nothing beside any probability."""


class PromptMismatch(EngineError):
    """The server expanded a prompt into other token ids than ours: it sees other images than we think."""


class WrongVersion(EngineError):
    """A completion was not sampled with the weights that the server was given."""


@dataclass(frozen=True)
class Asked:
    """A request, in the form that its answer is held against."""

    ids: tuple[int, ...]
    sent: tuple[int, ...]
    """The ids with one placeholder for each image."""
    images: tuple[Frame, ...]
    sampling: Sampling
    n: int


class DataUrls:
    """Frames as PNG data URLs, made once for those that are sent again (a group's, a trace's next turn). Thread-safe;
    keeps at most `most` bytes."""

    def __init__(self, most: int = 1 << 28) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], str] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, frame: Frame) -> str:
        key = (frame.key, frame.pixels.shape)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        url = _data_url(frame)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = url
                self._bytes += len(url)
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return url


def _data_url(frame: Frame) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame.pixels).save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def collapsed(ids: Sequence[int], images: Sequence[Frame], chat: TokenChat) -> list[int]:
    """The ids with one placeholder for each image. Raises EngineError if ids and images disagree."""
    out: list[int] = []
    waiting = [chat.image_tokens(frame) for frame in reversed(images)]
    skip = 0
    for token in ids:
        if token != chat.image_id:
            if skip:
                raise EngineError(f"{skip} image placeholders too few for the size of a frame")
            out.append(token)
        elif skip:
            skip -= 1
        elif waiting:
            out.append(token)
            skip = waiting.pop() - 1
        else:
            raise EngineError(f"more image placeholders than {len(images)} frames have")
    if skip or waiting:
        raise EngineError(f"fewer image placeholders than {len(images)} frames have")
    return out


def ask(prompt: Prompt, sampling: Sampling, n: int, chat: TokenChat) -> Asked:
    """Raises EngineError if ids and images disagree."""
    sent = tuple(collapsed(prompt.ids, prompt.images, chat))
    return Asked(prompt.ids, sent, prompt.images, sampling, n)


def request_body(model: str, asked: Asked, chat: TokenChat, banned: Sequence[int], urls: DataUrls) -> bytes:
    """The body of a request."""
    sampling = asked.sampling
    body = {
        "model": model,
        "token_ids": asked.sent,
        "content_parts": [{"type": "image_url", "url": urls(frame)} for frame in asked.images],
        "sampling_params": {
            "n": asked.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            # spelled out, or defaults that came with the checkpoint would apply
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": sampling.seed,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": sorted(chat.stop_ids),
            "logit_bias": {str(token): BANNED for token in banned},
        },
        "return_token_ids": True,
    }
    return json.dumps(body).encode()


def read_answer(
    url: str, body: bytes, asked: Asked, chat: TokenChat, vocabulary: int
) -> list[tuple[Completion, str | None]]:
    """The n completions in the body of a response, each with the name of the weights that sampled it. `vocabulary`:
    token ids are below it.

    Their `policy_version` is not set (-1): who knows the names of versions sets it. Raises EngineError if the body is
    none, and PromptMismatch if the prompt in it is not the one that was asked.
    """
    try:
        answer = as_object(read_json(body), "the body")
        echoed = as_list(answer.get("prompt_token_ids"), "prompt_token_ids")
        if tuple(echoed) != asked.ids:
            raise PromptMismatch(_difference(url, echoed, asked, chat))
        cached = as_object(as_object(answer.get("usage") or {}, "usage").get("prompt_tokens_details") or {}, "usage")
        choices = as_list(answer.get("choices"), "choices")
        if len(choices) != asked.n:
            raise NotThat(f"{len(choices)} choices instead of {asked.n}")
        count = cached.get("cached_tokens")
        found = [_choice(as_object(choice, "a choice"), asked, chat, vocabulary, count) for choice in choices]
    except NotThat as error:
        raise EngineError(f"{url}: not an answer of /inference/v1/generate: {error}") from error
    return found


def _choice(
    choice: Mapping[str, Any], asked: Asked, chat: TokenChat, vocabulary: int, cached: object
) -> tuple[Completion, str | None]:
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length"):
        raise NotThat(f"finish_reason is {short(finish)}")
    ids = as_list(choice.get("token_ids"), "token_ids")
    rows = as_list(as_object(choice.get("logprobs"), "logprobs").get("content"), "logprobs.content")
    pairs = [(as_object(row, "logprobs.content").get("token_id"), row.get("logprob")) for row in rows]
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise NotThat(f"a token id is none of {vocabulary}; it serves another model")
    if [token for token, _ in pairs] != ids:
        raise NotThat("token_ids and those of logprobs differ; start the server with the flags of docs/scale.md")
    for _, logprob in pairs:
        if not is_logprob(logprob):
            raise NotThat(f"a log-probability is {short(logprob)}")
    spans = as_list(choice.get("weight_versions") or [], "weight_versions")
    labels = {str(as_object(span, "weight_versions").get("version")) for span in spans}
    if len(labels) > 1:
        raise WrongVersion(f"sampled with several weights: {', '.join(sorted(labels))}")
    stop: StopReason = "stop" if finish == "stop" else "length"
    completion = Completion(
        ids=tuple(ids),
        text=chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        logprobs=tuple(float(logprob) for _, logprob in pairs),
        stop_reason=stop,
        policy_version=-1,
        usage=Usage(len(asked.ids), len(ids), cached if isinstance(cached, int) else 0),
    )
    return completion, next(iter(labels), None)


def is_logprob(value: object) -> TypeGuard[float]:
    """JSON of Python's makes NaN and infinity, too, which no comparison with a limit would find."""
    return type(value) in (int, float) and -1e9 < value <= 1e-3  # type: ignore[operator]


def _difference(url: str, echoed: Sequence[object], asked: Asked, chat: TokenChat) -> str:
    """In words, with the likeliest reason."""
    ours, theirs = list(asked.ids).count(chat.image_id), list(echoed).count(chat.image_id)
    if ours != theirs:
        return (
            f"{url}: the server made {theirs} placeholders of {len(asked.images)} images, we {ours}: it resizes frames;"
            " start it with the --mm-processor-kwargs of docs/scale.md"
        )
    shorter = min(len(echoed), len(asked.ids))
    at = next((i for i, (a, b) in enumerate(zip(asked.ids, echoed, strict=False)) if a != b), shorter)
    return f"{url}: the server's prompt differs from ours at token {at} (lengths {len(echoed)} and {len(asked.ids)})"
