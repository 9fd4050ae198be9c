"""Any OpenAI-compatible chat endpoint (vLLM, SGLang, llama.cpp, a vendor): for asking and evaluating.

No token ids go in or come out, so nothing can be trained on what it says.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, OpenAIError
from PIL import Image

from paravt.chat import MessageChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.errors import EngineError
from paravt.prompts import Prompts, fill
from paravt.types import Frame, ImagePart, Message, Usage


class OpenAIEngine:
    """`url` is the server's address, with or without `/v1`. The API key is taken from OPENAI_API_KEY, if it is set.

    Requests that fail on the way, time out, or are answered with 408, 409, 429 or 5xx are sent again, up to
    `max_retries` times with growing pauses.
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
        self._slots = asyncio.Semaphore(max_concurrency)
        self._client = AsyncOpenAI(
            base_url=self.url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            max_retries=max_retries,
            timeout=timeout,
        )

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(prompt, sampling, i) for i in range(n))))

    async def _complete(self, prompt: Prompt, sampling: Sampling, index: int) -> Completion:
        async with self._slots:
            messages = await asyncio.to_thread(self._request_messages, prompt)
            try:
                response = await self._client.chat.completions.create(
                    model=await self.served_model(),
                    messages=messages,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    seed=(sampling.seed + index) & 0x7FFFFFFF,
                )
            except OpenAIError as error:
                raise self._failure(error) from error
        choice = response.choices[0] if response.choices else None
        if choice is None or choice.finish_reason not in ("stop", "length", "tool_calls"):
            raise EngineError(f"{self.url}: no answer ({choice.finish_reason if choice else 'no choices'})")
        used = response.usage
        return Completion(
            ids=(),
            text=_as_text(choice.message),
            logprobs=None,
            stop_reason="length" if choice.finish_reason == "length" else "stop",
            policy_version=0,
            usage=Usage(used.prompt_tokens, used.completion_tokens) if used else Usage(0, 0),
        )

    async def served_model(self) -> str:
        """The model's name: the given one, or the only one that the server has."""
        if self.model is None:
            try:
                names = [model.id async for model in self._client.models.list()]
            except OpenAIError as error:
                raise self._failure(error) from error
            if len(names) != 1:
                raise EngineError(f"{self.url} serves {len(names)} models; name one: {', '.join(names) or 'none'}")
            self.model = names[0]
        return self.model

    def _request_messages(self, prompt: Prompt) -> list[Any]:
        messages = list(prompt.messages)
        out: list[dict[str, Any]] = []
        if prompt.tools:
            schemas = "\n".join(json.dumps(tool) for tool in prompt.tools)
            block = fill(self._tools_text, schemas=schemas)
            system = messages.pop(0).text + "\n\n" if messages and messages[0].role == "system" else ""
            out.append({"role": "system", "content": system + block})
        for message in messages:
            if message.role != "tool":
                out.append({"role": message.role, "content": _content(message)})
                continue
            # replies of a turn are one user turn, as chat templates of the Qwen family render them: servers disagree
            # on `tool` messages whose calls they did not parse themselves
            opening, closing = _text("<tool_response>\n"), _text("\n</tool_response>\n")
            parts = [opening, *_parts(message), closing]
            if out and out[-1].get("replies"):
                out[-1]["content"] += parts
            else:
                out.append({"role": "user", "content": parts, "replies": True})
        for item in out:
            item.pop("replies", None)
        return out

    def _failure(self, error: OpenAIError) -> EngineError:
        if isinstance(error, APITimeoutError):
            return EngineError(f"{self.url}: no answer in time")
        if isinstance(error, APIConnectionError):
            return EngineError(f"{self.url}: cannot be reached; is the server running?")
        if isinstance(error, APIStatusError):
            return EngineError(f"{self.url}: status {error.status_code}: {' '.join(error.message.split())[:300]}")
        return EngineError(f"{self.url}: {' '.join(str(error).split())[:300]}")

    async def load_policy(self, version: int, weights: Mapping[str, Any]) -> None:
        raise EngineError("a chat endpoint cannot be given weights; train with the local engine")

    async def close(self) -> None:
        await self._client.close()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(message: Message) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": _data_url(part.frame)}}
        if isinstance(part, ImagePart)
        else _text(getattr(part, "text", ""))
        for part in message.content
    ]


def _content(message: Message) -> str | list[dict[str, Any]]:
    return _parts(message) if message.frames else message.text


def _data_url(frame: Frame) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame.pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _as_text(message: Any) -> str:
    """The turn as the model wrote it: servers that parse reasoning and calls out of it are undone."""
    text = message.content or ""
    reasoning = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None)
    if reasoning:
        text = f"<think>\n{reasoning}\n</think>\n{text}"
    calls: Sequence[Any] = message.tool_calls or ()
    for call in calls:
        # the arguments are JSON text already, and may be broken: the turn's parser is the one to judge that
        name, arguments = json.dumps(call.function.name), call.function.arguments
        text += f'\n<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return text
