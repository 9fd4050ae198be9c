"""Bad reports on purpose: what the main agent makes of them shows whether reports of peers correct each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Engine, Prompt, Sampling
from paravt.errors import EngineError
from paravt.types import Episode, Usage

INJECTED = "no report: failed on purpose"

Lie = Callable[[Prompt], str]
"""What a sub-agent says instead of what its frames show."""


class FaultyEngine:
    """The engine of one episode, in which the sub-agents of the first `calls` calls lie or fail.

    Calls are counted in the order of turns and of calls in a turn: with parallel and with sequential dispatch, the
    same windows of a plan are bad. The sub-agents that are not asked cost nothing; all else is the real agent.
    """

    def __init__(self, engine: Engine, chat: TokenChat, calls: int, lie: Lie | None) -> None:
        self._engine, self._chat, self._calls, self._lie = engine, chat, calls, lie
        self._seen: set[str] = set()
        self.hits = 0
        """Calls that got a bad report."""

    @property
    def chat(self) -> TokenChat:
        return self._chat

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        kind, _, place = prompt.trace.partition("/")
        if kind != "crop" or self._number(place) >= self._calls:
            return await self._engine.generate(prompt, sampling, n)
        self.hits += 1
        if self._lie is None:
            raise EngineError(INJECTED)
        ids = (*self._chat.tokenizer.encode(self._lie(prompt), add_special_tokens=False), self._chat.end_id)
        text = self._chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        said = Completion(ids, text, (0.0,) * len(ids), "stop", 0, Usage(len(prompt.ids), len(ids)))
        return [said] * n

    def _number(self, place: str) -> int:
        """How many calls of the episode come before this one: those of earlier turns that ran, and of this turn."""
        turn, _, index = place.partition("/")
        self._seen.add(place)
        return sum(int(other.partition("/")[0]) < int(turn) for other in self._seen) + int(index)

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        await self._engine.load_policy(version, weights)

    async def close(self) -> None:
        await self._engine.close()


def forgive(episode: Episode) -> Episode:
    """An episode whose failures on purpose leave it scored: they are what is being measured."""
    errors = tuple(replace(error, scored=True) if INJECTED in error.message else error for error in episode.errors)
    return replace(episode, errors=errors)
