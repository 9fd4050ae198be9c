"""Any OpenAI-compatible chat endpoint (vLLM, SGLang, llama.cpp, a vendor): for asking and evaluating.

No token ids go in or come out, so nothing can be trained on what it says.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from PIL import Image

from paravt.chat import MessageChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.replies import read_completion, read_models
from paravt.engines.server import JsonServer, StatusError
from paravt.errors import EngineError
from paravt.prompts import QWEN_TOOLS, fill
from paravt.types import Frame, ImagePart, Message, TextPart


class OpenAIEngine:
    """`url` is the server's address, with or without `/v1`. The API key is taken from OPENAI_API_KEY, if it is set.

    A model of the Qwen family is shown, token for token, what the local engine shows it: the tools are described in
    the system turn as its chat template describes them, and replies are rendered as it renders them. For another
    family, `tools_text=Prompts().tools` may be clearer (any text with `$schemas` in it); frames have sides that are
    multiples of `frame_factor` (32 for Qwen3-VL, 28 for Qwen2.5-VL).

    Requests that fail on the way, or are answered with 408, 409, 429 or 5xx, are sent again, up to `max_retries` times
    with growing pauses, or the pause that the server asks for; all of it ends after `timeout` seconds. An engine can be
    used in any number of event loops; at most `max_concurrency` requests run in each.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        max_concurrency: int = 16,
        max_retries: int = 3,
        timeout: float = 300.0,
        tools_text: str = QWEN_TOOLS,
        frame_factor: int = 32,
    ) -> None:
        self.server = JsonServer(url, max_concurrency=max_concurrency, max_retries=max_retries, timeout=timeout)
        self.url = self.server.url
        self.chat = MessageChat(frame_factor)
        self.model = model
        self._tools_text = tools_text
        self._alternate = False
        """Has the server refused two messages of the user in a row?"""

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(prompt, sampling, i) for i in range(n))))

    async def _complete(self, prompt: Prompt, sampling: Sampling, index: int) -> Completion:
        settings = {
            "model": await self.served_model(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": (sampling.seed + index) & 0x7FFFFFFF,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        try:
            body = await self._post(settings, prompt, self._alternate)
        except StatusError as error:
            # some templates (Gemma's, Mistral's) refuse what Qwen's has: the question for a final answer is a message
            # of its own after the replies
            if self._alternate or error.status not in (400, 422, 500) or not _in_a_row(prompt):
                raise
            body = await self._post(settings, prompt, alternate=True)
            self._alternate = True
        return read_completion(self.url, body)

    async def _post(self, settings: Mapping[str, Any], prompt: Prompt, alternate: bool) -> bytes:
        def body() -> bytes:
            return json.dumps({**settings, "messages": self._messages(prompt, alternate)}).encode()

        return await self.server.request("POST", "/chat/completions", body)

    async def served_model(self) -> str:
        """The model's name: the given one, or the only one that the server has."""
        if self.model is None:
            names = read_models(self.url, await self.server.request("GET", "/models"))
            if len(names) != 1:
                raise EngineError(f"{self.url} serves {len(names)} models; name one: {', '.join(names) or 'none'}")
            self.model = names[0]
        return self.model

    def _messages(self, prompt: Prompt, alternate: bool) -> list[dict[str, Any]]:
        """The messages as they are sent: the tools in the system turn, the replies of a turn one message in the user's
        role, as chat templates of the Qwen family render both. Servers disagree on `tools=` and on `tool` messages
        whose calls they did not parse themselves. With `alternate`, no two messages of the user follow each other."""
        messages = list(prompt.messages)
        turns: list[tuple[str, list[dict[str, Any]]]] = []
        if prompt.tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in prompt.tools)
            block = fill(self._tools_text, schemas=schemas)
            system = messages.pop(0).text + "\n\n" if messages and messages[0].role == "system" else ""
            turns.append(("system", [_text(system + block)]))
        previous = None
        for message in messages:
            role = "user" if message.role == "tool" else message.role
            parts = self._parts(message)
            if message.role == "tool":
                parts = [_text("<tool_response>\n"), *parts, _text("\n</tool_response>")]
            joined = previous == "tool" == message.role or (alternate and turns and turns[-1][0] == "user" == role)
            if joined:
                turns[-1][1].extend([_text("\n"), *parts])
            else:
                turns.append((role, parts))
            previous = message.role
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

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        raise EngineError("a chat endpoint cannot be given weights; train with the local engine")

    async def close(self) -> None:
        """Close the connections of the running event loop; those of others end with their loops."""
        await self.server.close()


def _in_a_row(prompt: Prompt) -> bool:
    """Are there two messages in the user's role one after the other, replies of a turn taken as one?"""
    pairs = pairwise(message.role for message in prompt.messages)
    return any({a, b} <= {"user", "tool"} and (a, b) != ("tool", "tool") for a, b in pairs)


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
