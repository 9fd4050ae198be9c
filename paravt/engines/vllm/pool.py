"""Which server a request goes to.

A conversation stays where it was, and a new one goes where others that begin with the same frame are: their prefixes
are cached there. No server gets much more than its share, though (consistent hashing with bounded loads, Mirrokni et
al. 2018), and none more than `max_concurrency` requests at a time. A request whose server fails is sent to another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio

from paravt.engines.base import stable_seed
from paravt.engines.server import StatusError
from paravt.engines.vllm.wire import PromptMismatch
from paravt.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound="Member")
_SLACK = 1.5
"""A server has at most this times the mean of running requests."""
_REMEMBERED = 1 << 14
"""Conversations."""
_BUSY = (408, 409, 429)


@dataclass(eq=False)
class Member:
    """A server of the pool, by its address."""

    url: str
    ready: bool = False
    """Does it get requests?"""
    running: int = 0
    reason: str = "not started yet"
    """Why it is not ready."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is out: nobody waits for its answers any more."""


class Pool(Generic[M]):
    """`tries` servers are asked before a request fails, and `patience` seconds waited for one while there is none."""

    def __init__(self, max_concurrency: int, tries: int, patience: float) -> None:
        self.members: list[M] = []
        self._most, self._tries, self._patience = max_concurrency, tries, patience
        self._places: OrderedDict[str, M] = OrderedDict()
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False

    # ------------------------------------------------------------------ who is in

    def open(self, member: M) -> None:
        """From now on it gets requests."""
        member.ready, member.reason = True, ""
        member.gone.clear()
        self._wake()

    def hold(self, member: M) -> None:
        """It gets no new requests; those that run go on."""
        member.ready = False

    def fail(self, member: M, reason: str) -> None:
        """It is out: what runs there is asked elsewhere."""
        if not member.gone.is_set():
            log.warning("%s is out: %s", member.url, reason)
        member.ready, member.reason = False, reason
        member.gone.set()
        self._wake()

    def close(self) -> None:
        """What runs or waits fails."""
        self._closed = True
        for member in self.members:
            member.ready, member.reason = False, "the engine was closed"
            member.gone.set()
        self._wake()

    def reasons(self) -> str:
        return "; ".join(f"{m.url}: {m.reason.removeprefix(f'{m.url}: ')}" for m in self.members if not m.ready)

    # ------------------------------------------------------------------ requests

    async def use(self, conversation: str, prefix: str, call: Callable[[M], Awaitable[T]]) -> T:
        """What `call` gives for a server. `conversation` and `prefix` name what is cached there, see above.

        Raises what the call raises if the request itself is refused, and EngineError if no server could serve it.
        """
        failed: list[M] = []
        said = ""
        for _ in range(self._tries):
            member = await self._take(conversation, prefix, failed)
            try:
                return await _unless_gone(member, call(member))
            except PromptMismatch:
                raise
            except EngineError as error:
                if isinstance(error, StatusError) and 400 <= error.status < 500 and error.status not in _BUSY:
                    raise
                said = str(error)
                failed.append(member)
                self.fail(member, said)
            finally:
                member.running -= 1
                self._wake()
        raise EngineError(f"{self._tries} tries failed, the last: {said}")

    async def _take(self, conversation: str, prefix: str, failed: Sequence[M]) -> M:
        loop = asyncio.get_running_loop()
        empty_since: float | None = None
        while (member := self._choose(conversation, prefix, failed)) is None:
            if self._closed:
                raise EngineError("the engine was closed")
            if any(member.ready for member in self.members):
                empty_since, left = None, None
            else:
                empty_since = empty_since or loop.time()
                left = empty_since + self._patience - loop.time()
            waiter = loop.create_future()
            self._waiters.append(waiter)
            try:
                with anyio.fail_after(left):
                    await waiter
            except TimeoutError:
                raise EngineError(f"no server for {self._patience:g} seconds: {self.reasons()}") from None
        member.running += 1
        self._places[conversation] = member
        self._places.move_to_end(conversation)
        if len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)
        return member

    def _choose(self, conversation: str, prefix: str, failed: Sequence[M]) -> M | None:
        """None if a server has to be waited for."""
        ready = [member for member in self.members if member.ready]
        wanted = [member for member in ready if member not in failed] or ready
        free = [member for member in wanted if member.running < self._most]
        if not free:
            return None
        share = math.ceil(_SLACK * (1 + sum(member.running for member in ready)) / len(ready))
        last = self._places.get(conversation)
        order = sorted(free, key=lambda m: (m is last, stable_seed(prefix, m.url)), reverse=True)
        return next((m for m in order if m.running < share), min(order, key=lambda m: m.running))

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


async def _unless_gone(member: Member, call: Awaitable[T]) -> T:
    """The result of a call, unless the server goes out meanwhile: one that hangs never answers."""
    answer, gone = asyncio.ensure_future(call), asyncio.ensure_future(member.gone.wait())
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise EngineError(f"{member.url}: {member.reason}")
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
