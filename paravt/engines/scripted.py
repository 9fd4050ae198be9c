"""An engine that replays given texts: for tests, docs, and the teachers that write training traces."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.errors import EngineError
from paravt.types import Usage


@dataclass(frozen=True)
class Cut:
    """A text that ran into the token limit: no end-of-turn token, stop reason "length"."""

    text: str


@dataclass(frozen=True)
class Delayed:
    """A step that takes a while. `seconds=math.inf` hangs until it is cancelled."""

    seconds: float
    step: str | Cut | EngineError = ""


Step = str | Cut | Delayed | EngineError
Script = Mapping[str, Sequence[Step]] | Callable[[Prompt], Step]


class ScriptedEngine:
    """`script` gives the steps of each trace by its name ("main", "crop/0/1"), or is a function of the prompt.

    Every prompt is kept in `prompts`. A trace that asks for more steps than it has raises EngineError.
    """

    def __init__(self, chat: TokenChat, script: Script, policy_version: int = 0) -> None:
        self.chat = chat
        self.prompts: list[Prompt] = []
        self._script = script
        self._taken: Counter[str] = Counter()
        self._version = policy_version

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        self.prompts.append(prompt)
        return [await self._complete(prompt, sampling) for _ in range(n)]

    async def _complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        step = self._next(prompt)
        if isinstance(step, Delayed):
            if step.seconds == float("inf"):
                await asyncio.Event().wait()
            await asyncio.sleep(step.seconds)
            step = step.step
        if isinstance(step, EngineError):
            raise step
        ends = not isinstance(step, Cut)
        text = step.text if isinstance(step, Cut) else step
        ids: list[int] = self.chat.tokenizer.encode(text, add_special_tokens=False)
        if ends:
            ids.append(self.chat.end_id)
        if len(ids) > sampling.max_tokens:
            ids, ends = ids[: sampling.max_tokens], False
        return Completion(
            ids=tuple(ids),
            text=self.chat.tokenizer.decode(ids, skip_special_tokens=False),
            logprobs=(0.0,) * len(ids),
            stop_reason="stop" if ends else "length",
            policy_version=self._version,
            usage=Usage(len(prompt.ids), len(ids)),
        )

    def _next(self, prompt: Prompt) -> Step:
        if callable(self._script):
            return self._script(prompt)
        steps, taken = self._script.get(prompt.trace, ()), self._taken[prompt.trace]
        if taken >= len(steps):
            raise EngineError(f"the script has no step {taken} for trace {prompt.trace}")
        self._taken[prompt.trace] += 1
        return steps[taken]

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        self._version = version

    async def close(self) -> None:
        return None
