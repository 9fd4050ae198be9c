"""Servers that misbehave: whatever they do is one clear error, within the time-out and within bounds of size."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from chat_server import prompt

from paravt.engines import server as bounds
from paravt.engines.base import Sampling
from paravt.engines.openai import OpenAIEngine
from paravt.engines.server import MAX_BYTES
from paravt.errors import EngineError

Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]
GOOD = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": "fine"}}]}).encode()


class RawServer:
    """Reads each request whole and behaves as its list says, the last one for ever."""

    def __init__(self, behaviours: list[Behaviour]) -> None:
        self.behaviours = behaviours
        self.requests = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            behave = self.behaviours[min(self.requests, len(self.behaviours) - 1)]
            self.requests += 1
            await behave(writer)
        except ConnectionError:
            pass  # the client had enough
        finally:
            writer.close()


@asynccontextmanager
async def serving(*behaviours: Behaviour) -> AsyncIterator[RawServer]:
    raw = RawServer(list(behaviours))
    listening = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        listening.close()


def response(body: bytes = GOOD, status: str = "200 OK", length: int | None = None, headers: str = "") -> Behaviour:
    async def behave(writer: asyncio.StreamWriter) -> None:
        size = len(body) if length is None else length
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n{headers}\r\n".encode() + body)
        await writer.drain()

    return behave


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def drops(writer: asyncio.StreamWriter) -> None:
    """A byte now and then: each in time, the whole never."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        await writer.drain()


async def cut_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nb\r\n{"choices":\r\n')
    await writer.drain()


async def no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await writer.drain()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    return None


def later(value: str) -> Behaviour:
    body = b'{"error": {"message": "slow\\ndown"}}'
    return response(body, status="429 Too Many Requests", headers=f"retry-after: {value}\r\n")


async def failure(raw: RawServer, *, timeout: float = 5.0, max_retries: int = 0) -> str:
    """The one error of a request, which came in time."""
    engine = OpenAIEngine(raw.url, "m", timeout=timeout, max_retries=max_retries)
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        await engine.generate(prompt(), Sampling())
    assert time.monotonic() - started < timeout + 1
    await engine.close()
    message = str(caught.value)
    assert message.startswith(engine.url)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("zone", ["GMT", "+" + "9" * 30])
async def test_a_pause_until_no_date_is_none(zone: str) -> None:
    async with serving(later(f"Mon, 01 Jan {'2030' if zone != 'GMT' else '9' * 30} 00:00:00 {zone}")) as raw:
        assert "status 429: slow down" in await failure(raw)


@pytest.mark.parametrize("behaviour", [silence, drops])
async def test_an_answer_that_never_is_whole(behaviour: Behaviour) -> None:
    async with serving(behaviour) as raw:
        assert "no answer in time (0.5 seconds)" in await failure(raw, timeout=0.5, max_retries=3)
        assert raw.requests == 1


@pytest.mark.parametrize("behaviour", [response(GOOD[:20], length=len(GOOD)), cut_stream, no_http, hang_up])
async def test_a_connection_that_breaks_off(behaviour: Behaviour) -> None:
    async with serving(behaviour) as raw:
        assert "the connection broke off before the answer was whole" in await failure(raw)
    async with serving(behaviour, response()) as raw:
        engine = OpenAIEngine(raw.url, "m", max_retries=1)
        (completion,) = await engine.generate(prompt(), Sampling())
        assert (completion.text, raw.requests) == ("fine", 2)
        await engine.close()


@pytest.mark.parametrize("behaviour", [flood, response(b" " * (MAX_BYTES + 1))])
async def test_an_answer_without_end(behaviour: Behaviour) -> None:
    async with serving(behaviour) as raw:
        assert f"an answer of more than {MAX_BYTES} bytes" in await failure(raw, max_retries=3)
        assert raw.requests == 1
    async with serving(response(GOOD + b" " * (MAX_BYTES - len(GOOD)))) as raw:  # the bound itself is fine
        engine = OpenAIEngine(raw.url, "m")
        assert [c.text for c in await engine.generate(prompt(), Sampling())] == ["fine"]
        await engine.close()


async def test_packed_answers_are_not_unpacked() -> None:
    async with serving(response(b"\x1f\x8b\x08...", headers="content-encoding: gzip\r\n")) as raw:
        assert "not a chat completion: no JSON" in await failure(raw)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect"])
async def test_a_server_that_moved_says_where(status: str) -> None:
    async with serving(response(b"", status=status, headers="location: https://elsewhere/v1\r\n")) as raw:
        assert f"status {status[:3]}: moved to https://elsewhere/v1" in await failure(raw, max_retries=3)
        assert raw.requests == 1


@pytest.mark.parametrize("in_seconds", [True, False])
async def test_a_pause_longer_than_the_time_out_is_an_error_at_once(in_seconds: bool) -> None:
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=3600), usegmt=True)
    async with serving(later("3600" if in_seconds else date)) as raw:
        started = time.monotonic()
        message = await failure(raw, max_retries=3)
        assert time.monotonic() - started < 1
        assert raw.requests == 1
    assert "status 429: slow down; it asks to wait 36" in message or "it asks to wait 3599" in message
    assert message.endswith("the time-out is 5 seconds")


async def test_a_pause_is_kept_and_a_long_one_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "_LONG_PAUSE", 0.2)
    async with serving(later("0.1"), later("0.3"), later("nonsense"), response()) as raw:
        engine = OpenAIEngine(raw.url, "m", max_retries=3)
        started = time.monotonic()
        with caplog.at_level(logging.WARNING):
            await engine.generate(prompt(), Sampling())
        assert time.monotonic() - started > 0.4
        assert raw.requests == 4
        await engine.close()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{raw.url}/v1: status 429: slow down; trying again in 0 seconds"
    assert len(said) == 2  # the header without sense gets a pause of our own


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(EngineError, match="server address"):
        OpenAIEngine(url)


@pytest.mark.parametrize("passes", range(8))
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Else a task that asks again and again would go on when it is ended. The answer is there, and the cancellation
    comes so many passes of the event loop later."""
    answered = asyncio.Event()

    async def send(*arguments: object) -> bytes:
        await answered.wait()
        return b"{}"

    server = bounds.JsonServer("http://a", max_concurrency=1, max_retries=0, timeout=60)
    monkeypatch.setattr(server, "_send", send)

    async def ask_twice() -> None:
        await server.request("GET", "/health")
        await asyncio.sleep(60)

    asking = asyncio.create_task(ask_twice())
    await asyncio.sleep(0.05)
    answered.set()
    for _ in range(passes):
        await asyncio.sleep(0)
    asking.cancel()
    done, _ = await asyncio.wait([asking], timeout=5)
    assert done
    assert asking.cancelled()
    await server.close()


def test_a_port_that_cannot_be_is_said_at_once() -> None:
    with pytest.raises(EngineError, match="http://a:99999: a port is a number from 1 to 65535"):
        bounds.JsonServer("http://a:99999", max_concurrency=1, max_retries=0, timeout=60)
