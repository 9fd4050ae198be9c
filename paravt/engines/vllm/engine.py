"""The vLLM engine: rollouts on any number of vLLM servers, whose weights follow the learner's.

A server gets requests only while it has the current policy. It gets there by one path, at the start, at every update
and whenever it comes back: healthy, known, connected; weights transferred; then a canary (`canary`), which the learner
scores. One that fails anywhere on that path is out, with the reason, and tried again later; the run goes on without it.

In a run of several processes the first one moves the weights. All of them call `load_policy` together, and send their
requests themselves.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import anyio
import numpy as np
import torch

from paravt.chat import TokenChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.vllm.canary import SAMPLING, Canary, canary_prompt, canary_row, difference, distinct
from paravt.engines.vllm.config import VLLMConfig
from paravt.engines.vllm.pool import Member, Pool
from paravt.engines.vllm.server import VLLMServer
from paravt.engines.vllm.spawn import Spawned
from paravt.engines.vllm.transfer import Policy, Transfer
from paravt.engines.vllm.wire import Asked, DataUrls, WrongVersion, ask
from paravt.errors import EngineError
from paravt.types import Row

log = logging.getLogger(__name__)

_ATTEMPTS = 2
"""To bring a server up to date before it is left out."""
_POLL = 1.0
_LONGEST_PAUSE = 60.0
"""Seconds between two attempts to bring a server back."""
_NEWS = 60.0
"""Seconds between two lines about a server that is waited for."""
_MISSED = 2
"""Health checks in a row that a server fails before it is out."""


class Learner(Protocol):
    """What the engine needs of the run, which all of its processes call together."""

    async def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""

    async def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probabilities (T,) of rows at temperature 1."""


@dataclass(eq=False)
class _Standing(Member):
    """A member of the pool with how far it has come."""

    server: VLLMServer = field(kw_only=True)
    process: Spawned | None = None
    known: bool = False
    """Its model and limits, since it was last out."""
    connection: Any = None
    policy: Policy | None = None
    """What was installed last."""
    canary: Canary | None = None
    """Of that policy."""
    task: asyncio.Task[None] | None = None
    busy: bool = False
    """Being brought back at the moment."""


class VLLMEngine:
    """An `Engine` over the servers at `urls` and over processes of our own; close it. The latter may come back at
    another address.

    `chat` and `banned` are the model's. `transfer` is None in processes that do not move weights. Completions name the
    version of the weights that the server says it sampled with.
    """

    def __init__(
        self,
        chat: TokenChat,
        banned: Sequence[int],
        learner: Learner,
        transfer: Transfer | None,
        config: VLLMConfig,
        urls: Sequence[str] = (),
        processes: Sequence[Spawned] = (),
    ) -> None:
        self.chat, self._banned = chat, tuple(banned)
        self._learner, self._transfer, self._config = learner, transfer, config
        self._pool: Pool[_Standing] = Pool(config.max_concurrency, config.tries, config.patience)
        self._members = self._pool.members
        self._urls = DataUrls()
        self._run = uuid.uuid4().hex[:8]
        self._canary_prompt = canary_prompt(chat)
        self._policy: Policy | None = None
        self._reference: Canary | None = None
        """The learner's canary of the current policy; None until a server has passed with it."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when any of this changes."""
        for url in urls:
            self._join(url)
        for process in processes:
            self._join(process.url, process)

    def _join(self, url: str, process: Spawned | None = None) -> _Standing:
        member = _Standing(url, server=self._server(url), process=process)
        member.gone.set()
        self._members.append(member)
        return member

    def _server(self, url: str) -> VLLMServer:
        return VLLMServer(url, self.chat, self._banned, self._urls, self._config.timeout)

    async def _find(self, member: _Standing, url: str) -> VLLMServer:
        """The server of a member that is to be at `url`."""
        if member.url != url:
            self._pool.fail(member, f"it is at {url} now")
            moved, member.url, member.server, member.known = member.server, url, self._server(url), False
            await moved.close()
        return member.server

    # ------------------------------------------------------------------ requests

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if self._policy is None:
            raise EngineError("the servers have no weights yet")
        limit = self.chat.context_limit or 0
        room = limit - len(prompt.ids)
        if room < 1:
            raise EngineError(f"a prompt of {len(prompt.ids)} tokens: the servers take {limit}")
        asked = ask(prompt, replace(sampling, max_tokens=min(sampling.max_tokens, room)), n, self.chat)
        # what begins with the same frame mostly goes on alike: the episodes of a group, questions about one video
        begins = prompt.images[0].key if prompt.images else str(prompt.ids[:64])
        conversation = f"{prompt.episode}/{prompt.trace}"
        return await self._pool.use(conversation, begins, lambda member: self._ask(member, asked))

    async def _ask(self, member: _Standing, asked: Asked) -> list[Completion]:
        installed = member.policy
        found = await member.server.generate(asked)
        completions = []
        for completion, label in found:
            version = self._version(label)
            # newer than what was installed: another process of the run has updated the server meanwhile
            if version is None or installed is None or version < installed.version:
                raise WrongVersion(f"{member.url}: it samples with the weights {label}; was it started anew?")
            completions.append(replace(completion, policy_version=version))
        return completions

    # ------------------------------------------------------------------ weights

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None:
        """Give the weights to all servers. Requests that run end with the old ones; later ones wait for a server.

        Raises EngineError if no server takes them.
        """
        if weights is None:
            raise ValueError("servers need the weights themselves")
        if self._transfer is not None:
            await self._move(self._transfer, version, weights)
        else:
            await self._follow(version)
        for member in self._members:
            if member.task is not None and member.task.done():
                ended, member.task = member.task, None
                ended.result()  # raises: it ends by a bug alone, and nobody would look after the server any more
            if member.task is None:
                member.task = asyncio.create_task(self._attend(member))

    async def _move(self, transfer: Transfer, version: int, weights: Mapping[str, Any]) -> None:
        tensors = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
        policy = Policy(version, f"{self._run}-{version}", tensors)
        await transfer.publish(policy)
        began = self._policy is None
        self._set(policy, None)
        chosen = [m for m in self._members if (began or m.ready) and not m.busy]
        for member in chosen:
            self._pool.hold(member)
        await asyncio.gather(*(self._install_or_fail(member, policy, wait=began) for member in chosen))
        canaries = await self._first_canaries(policy)
        asked = distinct(list(canaries.values()))
        rows = [canary_row(self._canary_prompt, canary) for canary in asked]
        everyone = (await self._learner.gather(rows))[0]
        scored = await self._learner.score(everyone)
        truth = {c.ids: c.scored(s) for c, s in zip(asked, scored, strict=True)}
        good = {m: truth[c.ids] for m, c in canaries.items() if self._passes(m, c, truth[c.ids])}
        if not good:
            raise EngineError(f"no server samples with the learner's weights: {self._pool.reasons()}")
        reference = next(iter(good.values()))
        told = (policy.label, [(member.url, member in good) for member in self._members], reference)
        await self._learner.gather(told)
        self._set(policy, reference)
        for member in good:
            self._pool.open(member)

    async def _follow(self, version: int) -> None:
        """As `_move`, of the processes that only send requests."""
        rows = (await self._learner.gather(None))[0]
        await self._learner.score(rows)
        label, standings, reference = (await self._learner.gather(None))[0]
        policy = Policy(version, label, {})
        self._run = label.rpartition("-")[0]
        self._set(policy, reference)
        for place, (url, good) in enumerate(standings):
            member = self._members[place] if place < len(self._members) else self._join(url)
            await self._find(member, url)
            if not good:
                self._pool.fail(member, "it does not have the current weights")
                continue
            try:
                await self._know(member)
            except EngineError as error:
                self._pool.fail(member, str(error))
                continue
            member.policy = policy
            self._pool.open(member)

    async def _first_canaries(self, policy: Policy) -> dict[_Standing, Canary]:
        """Of all servers that have the policy; of the first one that comes back with it if there is none yet."""
        deadline = asyncio.get_running_loop().time() + self._config.patience
        while not (found := {m: m.canary for m in self._members if m.policy is policy and m.canary is not None}):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not any(member.task is not None for member in self._members):
                raise EngineError(f"no server took the weights: {self._pool.reasons()}")
            with anyio.move_on_after(left):
                await self._changed.wait()
        return found

    def _passes(self, member: _Standing, canary: Canary, reference: Canary) -> bool:
        """If not, it is out."""
        off, most = difference(canary, reference), self._config.canary_tolerance
        if off <= most:
            return True
        self._pool.fail(
            member,
            f"after the update to version {self._policy.version if self._policy else '?'} its log-probabilities are"
            f" {off:.2g} from the learner's (more than {most:g}): something of it has other weights",
        )
        return False

    def _version(self, label: str | None) -> int | None:
        """Of the weights that a server calls so; None if they are not of this run."""
        run, _, number = (label or "").rpartition("-")
        return int(number) if run == self._run and number.isdecimal() else None

    def _set(self, policy: Policy, reference: Canary | None) -> None:
        self._policy, self._reference = policy, reference
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ------------------------------------------------------------------ one server

    async def _know(self, member: _Standing) -> None:
        """Up to a server that is healthy and as it must be. Raises EngineError."""
        if member.known:
            return
        process = member.process
        if process is not None and not await asyncio.to_thread(lambda: process.alive):
            await asyncio.to_thread(process.start)
        clock = asyncio.get_running_loop().time
        started = said = clock()
        while not await (server := await self._server_of(member)).healthy():
            if process is not None and not await asyncio.to_thread(lambda: process.alive):
                words = await asyncio.to_thread(process.last_words)
                raise EngineError(f"the server did not start: {words}")
            if clock() - started > self._config.start_timeout:
                if process is not None:  # it hangs; the next attempt starts another one
                    await asyncio.to_thread(process.stop)
                raise EngineError(f"not healthy after {self._config.start_timeout:g} seconds")
            if clock() - said > _NEWS:
                said = clock()
                log.warning("waiting for %s to be healthy, for %.0f seconds now", member.url, said - started)
            await asyncio.sleep(_POLL)
        await server.describe()
        self.chat.context_limit = min(self.chat.context_limit or server.context_limit, server.context_limit)
        if self._transfer is not None:
            member.connection = await server.connect(self._transfer)
        member.known = True

    async def _server_of(self, member: _Standing) -> VLLMServer:
        """Where it is now: a process that was asked at a bad moment may not have known."""
        process = member.process
        return (
            member.server if process is None else await self._find(member, await asyncio.to_thread(lambda: process.url))
        )

    async def _install(self, member: _Standing, policy: Policy) -> None:
        """Up to the canary of a policy. Raises EngineError."""
        await self._know(member)
        server, transfer = member.server, self._transfer
        if transfer is not None:
            await server.update(policy, transfer, member.connection)
            # not before: a server whose last update broke off is paused, and would never answer
            await server.check_logprobs(self._canary_prompt.ids)
        elif await server.weight_label() != policy.label:
            raise EngineError("it does not have the current weights")
        ((completion, label),) = await server.generate(ask(self._canary_prompt, SAMPLING, 1, self.chat))
        if label != policy.label:
            raise EngineError(f"it samples with the weights {label} after an update to {policy.label}")
        self.chat.check(completion)
        assert completion.logprobs is not None
        member.policy, member.canary = policy, Canary(completion.ids, completion.logprobs)

    async def _install_or_fail(self, member: _Standing, policy: Policy, wait: bool) -> None:
        """It has the policy and a canary of it, or is out; `wait` for one that is not healthy."""
        for attempt in range(_ATTEMPTS):
            try:
                await self._install(member, policy)
                return
            except EngineError as error:
                member.known = False
                if attempt + 1 == _ATTEMPTS or not (wait or await member.server.healthy()):
                    self._pool.fail(member, str(error))
                    return
                log.warning("%s: %s; once more", member.url, error)

    async def _attend(self, member: _Standing) -> None:
        """Look after a server for as long as the engine is there."""
        missed, pause = 0, _POLL
        while True:
            await asyncio.sleep(self._config.health_every if member.ready else pause)
            if member.ready:
                pause = _POLL
                missed = 0 if await member.server.healthy() else missed + 1
                if missed >= _MISSED and member.ready:
                    self._pool.fail(member, f"{missed} health checks failed")
                    if member.process is not None:  # it may hang
                        await asyncio.to_thread(member.process.stop)
            elif member.gone.is_set():
                missed, pause = 0, min(2 * pause, _LONGEST_PAUSE)
                # what it had may be gone, with the process that had it
                member.busy, member.known, member.policy, member.canary = True, False, None, None
                try:
                    await self._bring_back(member)
                except EngineError as error:
                    member.reason = str(error)
                finally:
                    member.busy = False

    async def _bring_back(self, member: _Standing) -> None:
        """Get a server that was out to the current policy, and back to work. Raises EngineError."""
        while not member.ready:
            policy = self._policy
            assert policy is not None
            if member.policy is not policy or member.canary is None:
                await self._know(member)
                try:
                    await self._install(member, policy)
                except EngineError as error:
                    if self._policy is policy:
                        raise
                    # the weights were replaced by newer ones while they were under way
                    member.known = False
                    log.warning("%s: %s; once more, with newer weights", member.url, error)
                    continue
                self._tell()
            elif self._reference is None:  # the update under way judges it, or makes a reference
                await self._changed.wait()
            elif self._passes(member, member.canary, self._reference):
                log.warning("%s is back", member.url)
                self._pool.open(member)
            else:
                return

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Requests that still run fail with EngineError; servers of our own are ended.

        Raises what else than an EngineError ended the care for a server.
        """
        tasks = [member.task for member in self._members if member.task is not None]
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.close()
        stops = [asyncio.to_thread(m.process.stop) for m in self._members if m.process is not None]
        closes = [member.server.close() for member in self._members]
        await asyncio.gather(*stops, *closes)
        if self._transfer is not None:
            self._transfer.close()
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome
