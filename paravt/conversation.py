"""A trace while it grows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paravt.chat import text_message
from paravt.engines.base import Engine, Prompt, Sampling, stable_seed
from paravt.types import Message, Segment, Trace, TraceRole

_ENDS = ("<|im_end|>", "<|endoftext|>")
# Characters and images of what an engine without ids has not counted yet, in tokens: a cautious guess.
_CHARACTERS_PER_TOKEN, _TOKENS_PER_IMAGE = 3, 64


class Conversation:
    """Adds segments to a trace. What the engine is sent is always the concatenation of what was added so far."""

    def __init__(self, engine: Engine, name: str, role: TraceRole, temperature: float, seed: int) -> None:
        self.trace = Trace(name, role)
        self._engine = engine
        self._temperature = temperature
        self._seed = seed
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._prefix = ""
        self._turns = 0

    def tokens(self, *more: Segment) -> int:
        """The length of the conversation, `more` appended. Engines without ids say how long it was when they were
        last asked; what came later is estimated."""
        if self._engine.chat.end_id is not None:
            return sum(len(segment.ids) for segment in (*self.trace.segments, *more))
        count = 0
        for segment in (*self.trace.segments, *more):
            if segment.usage is not None:
                count = segment.usage.prompt_tokens + segment.usage.completion_tokens
            else:
                count += len(segment.text) // _CHARACTERS_PER_TOKEN + _TOKENS_PER_IMAGE * len(segment.images)
        return count

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), prefix: str = "") -> None:
        self._tools = tuple(tools)
        self._add(self._engine.chat.open(messages, tools, prefix), messages, prefix)

    def preview_reply(self, messages: Sequence[Message], prefix: str = "") -> Segment:
        """The segment that `reply` would add; for checking its length first."""
        chat = self._engine.chat
        closed = chat.end_id is None or self.trace.segments[-1].ids[-1] == chat.end_id
        return chat.reply(messages, closed, prefix)

    def reply(self, messages: Sequence[Message], prefix: str = "") -> None:
        self._add(self.preview_reply(messages, prefix), messages, prefix)

    async def turn(self, max_tokens: int) -> str:
        """Sample an assistant turn; returns its text, the forced prefix included and the end token left out."""
        trace = self.trace
        prompt = Prompt(trace.ids, trace.images, tuple(self._messages), self._tools, trace.name, self._seed)
        seed = stable_seed(self._seed, self.trace.name, self._turns)
        started = time.monotonic()
        (completion,) = await self._engine.generate(prompt, Sampling(max_tokens, self._temperature, seed))
        self._engine.chat.check(completion)
        text = self._prefix + completion.text
        for end in _ENDS:
            text = text.removesuffix(end)
        sampled = Segment(
            ids=completion.ids,
            sampled=True,
            text=completion.text,
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
            usage=completion.usage,
        )
        self.trace = replace(
            self.trace.append(sampled),
            stop_reason=completion.stop_reason,
            seconds=self.trace.seconds + time.monotonic() - started,
        )
        self._messages.append(text_message("assistant", text))
        self._turns += 1
        return text

    def _add(self, segment: Segment, messages: Sequence[Message], prefix: str) -> None:
        self.trace = self.trace.append(segment)
        self._messages.extend(messages)
        self._prefix = prefix
