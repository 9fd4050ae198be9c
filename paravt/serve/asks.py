"""The questions of a server: a bounded queue, the ones that run, and a bounded history.

Everything here belongs to one event loop. What an ask is made of, and how it is played, is not known here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

State = Literal["queued", "running", "done", "failed", "cancelled"]
_ENDS = ("done", "failed", "cancelled")

RequestT = TypeVar("RequestT")
_log = logging.getLogger(__name__)


class QueueFull(Exception):
    """`retry_after` is the guess, in whole seconds, when there will be room."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"the queue is full ({waiting} questions wait); try again in {retry_after} seconds")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Logged:
    """An event as it is sent: its number, its name and the rest as one line of JSON."""

    number: int
    name: str
    data: str


@dataclass(frozen=True)
class Ending:
    """How an ask ended: the last event and what the history says of it."""

    event: Literal["done", "failed"]
    data: dict[str, Any]
    answer: str | None = None
    message: str | None = None


class Ask(Generic[RequestT]):
    """One question. Its events are kept; of those that say its place in the queue, only the last."""

    def __init__(self, request: RequestT) -> None:
        self.id = secrets.token_hex(16)
        self.request = request
        self.state: State = "queued"
        self.position: int | None = None
        self.answer: str | None = None
        self.message: str | None = None
        self.created = time.time()
        self.started: float | None = None
        self.ended: float | None = None
        self.log: list[Logged] = []
        self.size = 0
        """Characters of its events."""
        self.task: asyncio.Task[Ending] | None = None
        self._number = 0
        self._changed = asyncio.Event()

    def emit(self, name: str, **data: Any) -> None:
        """Append an event, and wake who follows."""
        self._number += 1
        entry = Logged(self._number, name, json.dumps(data, ensure_ascii=True, allow_nan=False))
        if name == "queued" and self.log and self.log[-1].name == "queued":
            self.size -= len(self.log.pop().data)
        self.log.append(entry)
        self.size += len(entry.data)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.state in _ENDS

    @property
    def seconds(self) -> float | None:
        """From its start to its end, or until now."""
        if self.started is None:
            return None
        return (time.time() if self.ended is None else self.ended) - self.started

    async def follow(self, after: int = 0, *, quiet: float = math.inf) -> AsyncIterator[Logged | None]:
        """The events with a number above `after`, those that are still to come included, to the last; None after each
        `quiet` seconds without one."""
        while True:
            changed = self._changed
            for entry in [entry for entry in self.log if entry.number > after]:
                after = entry.number
                yield entry
            if changed is not self._changed:
                continue  # something came while the last one was sent
            if self.over:
                return
            try:
                await asyncio.wait_for(changed.wait(), None if quiet == math.inf else quiet)
            except asyncio.TimeoutError:  # in Python 3.10 another one than the builtin
                yield None

    async def wait(self) -> None:
        """Until it has ended."""
        while not self.over:
            await self._changed.wait()


Play = Callable[[Ask[RequestT]], Coroutine[Any, Any, Ending]]


class Asks(Generic[RequestT]):
    """At most `concurrency` asks run and at most `max_queue` wait. Of those that ended, the newest are kept: at most
    `keep`, with at most `keep_size` characters of events together (one is kept however large it is).

    `play` plays an ask, emits its events, and returns how it ended; whatever it raises is a failure of that ask.
    """

    def __init__(
        self,
        play: Play[RequestT],
        *,
        concurrency: int = 1,
        max_queue: int = 64,
        keep: int = 100,
        keep_size: int = 1 << 28,
    ) -> None:
        self.concurrency, self.max_queue, self.keep, self.keep_size = concurrency, max_queue, keep, keep_size
        self._play = play
        self._asks: OrderedDict[str, Ask[RequestT]] = OrderedDict()  # in the order of their coming
        self._waiting: deque[Ask[RequestT]] = deque()
        self._running: dict[str, Ask[RequestT]] = {}
        self._ended: OrderedDict[str, Ask[RequestT]] = OrderedDict()  # in the order of their ends
        self._typical = 5.0
        """Seconds that an ask runs: a running mean, for `retry_after`."""
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, request: RequestT) -> Ask[RequestT]:
        """Raises QueueFull."""
        if self._closed or (self.running >= self.concurrency and self.waiting >= self.max_queue):
            seconds = self._typical * (self.waiting + 1) / self.concurrency
            raise QueueFull(self.waiting, min(max(math.ceil(seconds), 1), 600))
        ask = Ask(request)
        self._asks[ask.id] = ask
        self._waiting.append(ask)
        self._advance()
        return ask

    def get(self, id: str) -> Ask[RequestT] | None:
        return self._asks.get(id)

    def newest(self) -> list[Ask[RequestT]]:
        """All that are known, the newest first."""
        return list(reversed(self._asks.values()))

    async def cancel(self, ask: Ask[RequestT]) -> None:
        """End a waiting or a running ask; returns when nothing of it runs any more. One that ended stays as it is."""
        if ask.task is not None:
            ask.task.cancel()
            await ask.wait()
        elif not ask.over:
            self._waiting.remove(ask)
            self._end(ask, "cancelled")
            self._advance()

    async def close(self) -> None:
        """Cancel everything, and take no more."""
        self._closed = True
        for ask in list(self._asks.values()):
            await self.cancel(ask)

    # ------------------------------------------------------------------ the queue

    def _advance(self) -> None:
        """Start what there is room for; tell the others where they are."""
        while self._waiting and self.running < self.concurrency and not self._closed:
            ask = self._waiting.popleft()
            self._running[ask.id] = ask
            ask.state, ask.position, ask.started = "running", None, time.time()
            ask.emit("started")
            ask.task = asyncio.create_task(self._play(ask))
            ask.task.add_done_callback(partial(self._finished, ask))
        for position, ask in enumerate(self._waiting, 1):
            if ask.position != position:
                ask.position = position
                ask.emit("queued", position=position)

    def _finished(self, ask: Ask[RequestT], task: asyncio.Task[Ending]) -> None:
        del self._running[ask.id]
        ask.task = None
        if task.cancelled():
            self._end(ask, "cancelled")
        elif (error := task.exception()) is not None:
            _log.error("ask %s", ask.id, exc_info=error)
            ask.message = "internal error; the server's log has the rest"
            self._end(ask, "failed", message=ask.message)
        else:
            ending = task.result()
            ask.answer, ask.message = ending.answer, ending.message
            self._end(ask, ending.event, **ending.data)
            self._typical += 0.2 * ((ask.seconds or 0.0) - self._typical)
        self._advance()

    def _end(self, ask: Ask[RequestT], state: Literal["done", "failed", "cancelled"], **data: Any) -> None:
        ask.state, ask.position, ask.ended = state, None, time.time()
        ask.emit(state, **data)
        self._ended[ask.id] = ask
        while len(self._ended) > self.keep or (
            len(self._ended) > 1 and sum(old.size for old in self._ended.values()) > self.keep_size
        ):
            gone, _ = self._ended.popitem(last=False)
            del self._asks[gone]
