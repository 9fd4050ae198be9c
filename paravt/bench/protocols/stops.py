"""An engine whose turns end with a text, as those of models that were trained with a stop string do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paravt.chat import TokenChat
from paravt.engines.base import ChatFormat, Completion, Engine, Prompt, Sampling
from paravt.errors import EngineError


class StopAt:
    """`engine`, with every turn cut after the first `stop`, a closing tag.

    Chat servers stop there and leave the text out of their answer: it is put back. Other engines go on until the turn
    ends by itself, and the tokens after the one that completes `stop` are dropped: the turn then counts as one of
    stop reason "length", since no end-of-turn token was sampled. `usage` stays what was computed.
    """

    def __init__(self, engine: Engine, stop: str) -> None:
        self._engine, self._stop = engine, stop
        self._opening = stop.replace("</", "<")

    @property
    def chat(self) -> ChatFormat:
        return self._engine.chat

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        found = await self._engine.generate(prompt, replace(sampling, stop=(*sampling.stop, self._stop)), n)
        return [self._cut_ids(one) if one.ids else self._cut_text(one) for one in found]

    def _cut_text(self, completion: Completion) -> Completion:
        before, stop, _ = completion.text.partition(self._stop)
        if not stop and (completion.stop_reason != "stop" or self._opening not in before):
            return completion
        return replace(completion, text=before + self._stop)

    def _cut_ids(self, completion: Completion) -> Completion:
        if self._stop not in completion.text:
            return completion
        ids = completion.ids
        kept = bisect_left(range(len(ids)), True, key=lambda n: self._stop in self._spell(ids[:n]))
        if ids[kept:] in ((), (self.chat.end_id,)):
            return completion
        logprobs = completion.logprobs and completion.logprobs[:kept]
        text = self._spell(ids[:kept])
        return replace(completion, ids=ids[:kept], text=text, logprobs=logprobs, stop_reason="length")

    def _spell(self, ids: tuple[int, ...]) -> str:
        if not isinstance(self.chat, TokenChat):
            raise EngineError("an engine that gives ids has to say how they are spelled: its chat is no TokenChat")
        return str(self.chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        await self._engine.load_policy(version, weights)

    async def close(self) -> None:
        await self._engine.close()
