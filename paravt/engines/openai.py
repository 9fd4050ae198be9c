"""Any OpenAI-compatible chat endpoint (vLLM, SGLang, llama.cpp, a vendor): for asking and evaluating.

No token ids go in or come out, so nothing can be trained on what it says.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, OpenAIError
from PIL import Image

from paravt.chat import MessageChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.replies import read_completion, read_models
from paravt.errors import EngineError
from paravt.prompts import Prompts, fill
from paravt.types import Frame, ImagePart, Message, TextPart


@dataclass(frozen=True)
class _Connection:
    """What belongs to one event loop: neither works in another one."""

    client: AsyncOpenAI
    slots: asyncio.Semaphore


class OpenAIEngine:
    """`url` is the server's address, with or without `/v1`. The API key is taken from OPENAI_API_KEY, if it is set.

    Requests that fail on the way, time out, or are answered with 408, 409, 429 or 5xx are sent again, up to
    `max_retries` times with growing pauses. An engine can be used in any number of event loops; at most
    `max_concurrency` requests run in each.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        max_concurrency: int = 16,
        max_retries: int = 3,
        timeout: float = 300.0,
        prompts: Prompts | None = None,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise EngineError(f"{url}: a server address starts with http:// or https://")
        self.chat = MessageChat()
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"
        self.model = model
        self._tools_text = (prompts or Prompts()).tools
        self._max_concurrency, self._max_retries, self._timeout = max_concurrency, max_retries, timeout
        self._connections: dict[asyncio.AbstractEventLoop, tuple[_Connection, AsyncGenerator[_Connection, None]]] = {}

    async def _connect(self) -> _Connection:
        """The connection of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            owner = self._connection()
            self._connections[loop] = (await anext(owner), owner)  # does not suspend: there is only one
        return self._connections[loop][0]

    async def _connection(self) -> AsyncGenerator[_Connection, None]:
        # a generator, because `asyncio.run` ends those that its loop began: so the client is closed in time even
        # where nobody closes the engine
        loop = asyncio.get_running_loop()
        client = AsyncOpenAI(
            base_url=self.url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            max_retries=self._max_retries,
            timeout=self._timeout,
        )
        try:
            yield _Connection(client, asyncio.Semaphore(self._max_concurrency))
        finally:
            del self._connections[loop]
            await client.close()

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(prompt, sampling, i) for i in range(n))))

    async def _complete(self, prompt: Prompt, sampling: Sampling, index: int) -> Completion:
        connection = await self._connect()
        async with connection.slots:
            messages = await asyncio.to_thread(self._request_messages, prompt)
            model = await self.served_model()
            try:
                # the raw response: what a server sends is checked here, the client would take it for what it expects
                response = await connection.client.chat.completions.with_raw_response.create(
                    model=model,
                    messages=messages,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    seed=(sampling.seed + index) & 0x7FFFFFFF,
                )
            except OpenAIError as error:
                raise self._failure(error) from error
        return read_completion(self.url, response.http_response.content)

    async def served_model(self) -> str:
        """The model's name: the given one, or the only one that the server has."""
        if self.model is None:
            client = (await self._connect()).client
            try:
                response = await client.models.with_raw_response.list()
            except OpenAIError as error:
                raise self._failure(error) from error
            names = read_models(self.url, response.http_response.content)
            if len(names) != 1:
                raise EngineError(f"{self.url} serves {len(names)} models; name one: {', '.join(names) or 'none'}")
            self.model = names[0]
        return self.model

    def _request_messages(self, prompt: Prompt) -> list[Any]:
        """Roles alternate as strict chat templates want it: messages that follow each other in the user's role, tool
        replies among them, are one."""
        messages = list(prompt.messages)
        turns: list[tuple[str, list[dict[str, Any]]]] = []
        if prompt.tools:
            schemas = "\n".join(json.dumps(tool) for tool in prompt.tools)
            block = fill(self._tools_text, schemas=schemas)
            system = messages.pop(0).text + "\n\n" if messages and messages[0].role == "system" else ""
            turns.append(("system", [_text(system + block)]))
        for message in messages:
            # replies are in the user's role, as chat templates of the Qwen family render them: servers disagree on
            # `tool` messages whose calls they did not parse themselves
            role = "user" if message.role == "tool" else message.role
            parts = self._parts(message)
            if message.role == "tool":
                parts = [_text("<tool_response>\n"), *parts, _text("\n</tool_response>")]
            if role == "user" and turns and turns[-1][0] == "user":
                turns[-1][1].extend([_text("\n"), *parts])
            else:
                turns.append((role, parts))
        return [{"role": role, "content": _content(parts)} for role, parts in turns]

    def _parts(self, message: Message) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if isinstance(part, ImagePart):
                parts.append({"type": "image_url", "image_url": {"url": _data_url(part.frame)}})
            elif isinstance(part, TextPart):
                parts.append(_text(part.text))
            else:
                raise EngineError(f"{self.url}: a chat endpoint cannot be sent {part}; send frames of it")
        return parts

    def _failure(self, error: OpenAIError) -> EngineError:
        if isinstance(error, APITimeoutError):
            return EngineError(f"{self.url}: no answer in time")
        if isinstance(error, APIConnectionError):
            return EngineError(f"{self.url}: cannot be reached; is the server running?")
        if isinstance(error, APIStatusError):
            return EngineError(f"{self.url}: status {error.status_code}: {' '.join(error.message.split())[:300]}")
        return EngineError(f"{self.url}: {' '.join(str(error).split())[:300]}")

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        raise EngineError("a chat endpoint cannot be given weights; train with the local engine")

    async def close(self) -> None:
        """Close the connections of the running event loop; those of others end with their loops."""
        found = self._connections.get(asyncio.get_running_loop())
        if found is not None:
            await found[1].aclose()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Plain text where there is nothing else: not every server takes a list of texts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _data_url(frame: Frame) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame.pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
