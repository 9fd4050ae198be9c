"""One vLLM server: what is asked of it over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paravt.chat import TokenChat
from paravt.engines.base import Completion
from paravt.engines.replies import NotThat, as_list, as_object, read_json, short
from paravt.engines.server import JsonServer
from paravt.engines.vllm.transfer import Policy, Transfer
from paravt.engines.vllm.wire import Asked, DataUrls, is_logprob, read_answer, request_body
from paravt.errors import EngineError

_LOOK = 30.0
"""Seconds for an answer to a simple question; a server on a busy machine can take some."""
_UNBOUNDED = 1 << 20
"""Connections: the pool bounds requests, with the server's own limit."""
_LONGEST = 64 * 2**20
"""Bytes of an answer: about 200 for each sampled token, and the prompt."""
FLAGS = "start it with the flags of docs/scale.md"


class VLLMServer:
    """Speaks to the server at `url`. All methods raise EngineError.

    A request is sent twice at most (a connection that was kept open may be closed just then): who calls has other
    servers. What changes the server's state is sent once.
    """

    def __init__(self, url: str, chat: TokenChat, banned: Sequence[int], urls: DataUrls, timeout: float) -> None:
        connect = partial(JsonServer, url, max_concurrency=_UNBOUNDED, api="", max_bytes=_LONGEST)
        self._requests, self._looks = connect(max_retries=1, timeout=timeout), connect(max_retries=1, timeout=_LOOK)
        self._orders = connect(max_retries=0, timeout=timeout)
        self.url = self._requests.url
        self._chat, self._banned, self._urls = chat, banned, urls
        self._vocabulary = len(chat.tokenizer)
        self._model = ""
        self.context_limit = 0

    async def healthy(self) -> bool:
        try:
            await self._looks.request("GET", "/health")
        except EngineError:
            return False
        return True

    async def describe(self) -> None:
        """Learn the model's name and the longest context."""
        try:
            answer = as_object(read_json(await self._looks.request("GET", "/v1/models")), "the body")
            rows = [as_object(row, "data") for row in as_list(answer.get("data"), "data")]
            if len(rows) != 1:
                raise NotThat(f"{len(rows)} models; one is wanted, without adapters of its own")
            name, limit = rows[0].get("id"), rows[0].get("max_model_len")
            if not isinstance(name, str) or not isinstance(limit, int) or limit < 2:
                raise NotThat(f"id {short(name)}, max_model_len {short(limit)}")
        except NotThat as error:
            raise EngineError(f"{self.url}: not a list of models: {error}; is this a vLLM server?") from error
        self._model, self.context_limit = name, limit

    async def generate(self, asked: Asked) -> list[tuple[Completion, str | None]]:
        """The completions, each with the name of the weights that sampled it."""

        def body() -> bytes:
            return request_body(self._model, asked, self._chat, self._banned, self._urls)

        answer = await self._requests.request("POST", "/inference/v1/generate", body)
        return read_answer(self.url, answer, asked, self._chat, self._vocabulary)

    async def check_logprobs(self, prompt_ids: Sequence[int]) -> None:
        """Are log-probabilities those of the distribution that is sampled from (bias and temperature applied)?

        A token that a bias makes certain must have a log-probability of 0.
        """
        (certain, *_) = (token for token in prompt_ids if token not in self._banned)
        settings = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "logit_bias": {str(certain): 100.0}}
        body = {"model": self._model, "token_ids": [certain], "sampling_params": settings, "return_token_ids": True}
        answer = await self._requests.request("POST", "/inference/v1/generate", json.dumps(body).encode)
        try:
            (choice,) = as_list(as_object(read_json(answer), "the body").get("choices"), "choices")
            logprobs = as_object(as_object(choice, "choices").get("logprobs"), "logprobs")
            (row,) = as_list(logprobs.get("content"), "logprobs.content")
            logprob = as_object(row, "logprobs.content").get("logprob")
        except (NotThat, ValueError) as error:
            raise EngineError(f"{self.url}: not an answer of /inference/v1/generate: {error}") from error
        if not is_logprob(logprob) or logprob < -1e-3:
            raise EngineError(f"{self.url}: not the log-probabilities that it samples from; {FLAGS} (--logprobs-mode)")

    # ------------------------------------------------------------------ weights

    async def workers(self) -> int:
        """Processes that take weights, over all kinds of parallelism."""
        answer = await self._look("GET", "/get_world_size")
        size = answer.get("world_size")
        if not isinstance(size, int) or size < 1:
            raise EngineError(f"{self.url}: world_size is {short(size)}; {FLAGS} (VLLM_SERVER_DEV_MODE)")
        return size

    async def weight_label(self) -> str | None:
        label = (await self._look("GET", "/weight_info")).get("weight_version")
        return None if label is None else str(label)

    async def connect(self, transfer: Transfer) -> Any:
        """Meet the learner; the connection that updates go over."""

        async def init(told: Mapping[str, Any]) -> None:
            await self._post("/init_weight_transfer_engine", {"init_info": told})

        return await transfer.connect(await self.workers(), init)

    async def update(self, policy: Policy, transfer: Transfer, connection: Any) -> None:
        """Replace the weights. Requests that run end before, later ones wait. Both caches are emptied: keys and values,
        and image features, were computed with the old weights."""

        async def update(told: Mapping[str, Any]) -> None:
            await self._post("/update_weights", {"update_info": told})

        await self._post("/pause?mode=wait")
        await self._post("/start_weight_update")
        await transfer.send(connection, policy, update)
        await self._post("/finish_weight_update", {"weight_version": policy.label})
        if (await self._post("/reset_prefix_cache")).get("success") is not True:
            raise EngineError(f"{self.url}: its prefix cache could not be emptied")
        await self._post("/reset_encoder_cache")
        await self._post("/resume")  # after a failure it stays paused: half of its weights may be others
        if (label := await self.weight_label()) != policy.label:
            raise EngineError(f"{self.url}: it has the weights {label} after an update to {policy.label}")

    async def close(self) -> None:
        await asyncio.gather(self._requests.close(), self._looks.close(), self._orders.close())

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        content = b"" if body is None else json.dumps(body).encode()
        answer = await self._orders.request("POST", path, lambda: content)
        return self._object(path, answer) if answer else {}

    async def _look(self, method: str, path: str) -> Mapping[str, Any]:
        return self._object(path, await self._looks.request(method, path))

    def _object(self, path: str, answer: bytes) -> Mapping[str, Any]:
        try:
            return as_object(read_json(answer), "the body")
        except NotThat as error:
            raise EngineError(f"{self.url}{path}: {error}; {FLAGS}") from error
