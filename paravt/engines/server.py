"""Requests to a server that speaks JSON over HTTP: bounded in time and in size, each failure one line."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx2

from paravt.errors import EngineError

log = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**20
"""Of one response. An answer of 32,768 tokens is about 200 kB of JSON."""
_LONG_PAUSE = 2.0
"""Seconds; longer waits are said."""


@dataclass(frozen=True)
class _Connection:
    """What belongs to one event loop: neither works in another one."""

    client: httpx2.AsyncClient
    slots: asyncio.Semaphore


class _Transient(Exception):
    """A failure after which the request is sent again. `pause`: the seconds that the server asks to wait."""

    def __init__(self, final: EngineError, pause: float | None = None) -> None:
        super().__init__(str(final))
        self.final = final
        self.pause = pause


class StatusError(EngineError):
    """The server answered with a status that is no success."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class JsonServer:
    """`url` is the address of an OpenAI-compatible server, with or without `/v1` (an address without a path gets `api`
    for one). The API key is taken from OPENAI_API_KEY, if it is set.

    Requests that fail on the way, or are answered with 408, 409, 429 or 5xx, are sent again, up to `max_retries` times
    with growing pauses, or the pause that the server asks for. All of it ends after `timeout` seconds; waiting for one
    of the `max_concurrency` slots does not count. A server can be used in any number of event loops, with the slots in
    each.

    Raises EngineError if the address is none.
    """

    def __init__(
        self,
        url: str,
        *,
        max_concurrency: int,
        max_retries: int,
        timeout: float,
        on_request: Callable[[], None] = lambda: None,
        api: str = "/v1",
        max_bytes: int = MAX_BYTES,
    ) -> None:
        try:
            address = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise EngineError(f"{url}: no server address ({error})") from error
        if address.scheme not in ("http", "https") or not address.host:
            raise EngineError(f"{url}: a server address starts with http:// or https://")
        if not 0 < (address.port or 80) < 1 << 16:
            raise EngineError(f"{url}: a port is a number from 1 to 65535")
        self.url = url.rstrip("/") if address.path.strip("/") else url.rstrip("/") + api
        self._max_concurrency, self._max_retries, self._timeout = max_concurrency, max_retries, timeout
        self._on_request, self._max_bytes = on_request, max_bytes
        self._connections: dict[asyncio.AbstractEventLoop, tuple[_Connection, AsyncGenerator[_Connection, None]]] = {}

    async def request(self, method: str, path: str, body: Callable[[], bytes] | None = None) -> bytes:
        """The body of the response. `body` makes what is sent, in a thread of its own. Raises EngineError."""
        connection = await self._connect()
        async with connection.slots:
            content = await asyncio.to_thread(body) if body is not None else None
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._timeout
            for attempt in range(self._max_retries + 1):
                try:
                    # not asyncio.wait_for: up to Python 3.11 it loses a cancellation that comes with the answer
                    with anyio.fail_after(deadline - loop.time()):
                        return await self._send(connection.client, method, path, content)
                except TimeoutError:
                    raise EngineError(f"{self.url}: no answer in time ({self._timeout:g} seconds)") from None
                except _Transient as failure:
                    if attempt == self._max_retries:
                        raise failure.final from failure
                    await self._pause(failure, attempt, deadline)
        raise ValueError(f"max_retries is negative: {self._max_retries}")

    async def _pause(self, failure: _Transient, attempt: int, deadline: float) -> None:
        """Wait before the next try. Raises EngineError if it would come too late."""
        pause = failure.pause
        if pause is None:
            pause = min(0.5 * 2**attempt, 8.0) * random.uniform(0.75, 1.0)
        if asyncio.get_running_loop().time() + pause >= deadline:
            asked = "" if failure.pause is None else f"; it asks to wait {pause:.0f} seconds"
            raise EngineError(f"{failure}{asked}; the time-out is {self._timeout:g} seconds") from failure
        if pause > _LONG_PAUSE:
            log.warning("%s; trying again in %.0f seconds", failure, pause)
        await asyncio.sleep(pause)

    async def _send(self, client: httpx2.AsyncClient, method: str, path: str, content: bytes | None) -> bytes:
        self._on_request()
        try:
            async with client.stream(method, self.url + path, content=content) as response:
                received = await self._read(response)
        except httpx2.ConnectError as error:
            raise self._broken("cannot be reached; is the server running?", error) from error
        except httpx2.TransportError as error:
            raise self._broken("the connection broke off before the answer was whole", error) from error
        status = response.status_code
        if 200 <= status < 300:
            return received
        if response.has_redirect_location:
            raise EngineError(f"{self.url}: status {status}: moved to {_line(response.headers['location'])}")
        said = _complaint(received) or response.reason_phrase
        refused = StatusError(f"{self.url}: status {status}: {said}", status)
        if status in (408, 409, 429) or status >= 500:
            raise _Transient(refused, _retry_after(response.headers.get("retry-after")))
        raise refused

    def _broken(self, what: str, error: httpx2.TransportError) -> _Transient:
        return _Transient(EngineError(f"{self.url}: {what} ({_line(str(error)) or type(error).__name__})"))

    async def _read(self, response: httpx2.Response) -> bytes:
        received = bytearray()
        async for chunk in response.aiter_raw():  # as it comes: what is unpacked could be of any size
            received += chunk
            if len(received) > self._max_bytes:
                raise EngineError(f"{self.url}: an answer of more than {self._max_bytes} bytes; is this a chat server?")
        return bytes(received)

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
        headers = {
            "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        client = httpx2.AsyncClient(timeout=None, headers=headers, limits=httpx2.Limits(max_connections=None))
        try:
            yield _Connection(client, asyncio.Semaphore(self._max_concurrency))
        finally:
            del self._connections[loop]
            await client.aclose()

    async def close(self) -> None:
        """Close the connections of the running event loop; those of others end with their loops."""
        found = self._connections.get(asyncio.get_running_loop())
        if found is not None:
            await found[1].aclose()


def _complaint(body: bytes) -> str:
    """What the body of a failure says, on one line."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        value = body.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return _line(value if isinstance(value, str) else json.dumps(value))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _retry_after(header: str | None) -> float | None:
    """Seconds from now: the header gives them, or a date. None without a header that makes sense."""
    if header is None:
        return None
    try:
        pause = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return None
        pause = (when.replace(tzinfo=when.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    return pause if math.isfinite(pause) and pause >= 0 else None
