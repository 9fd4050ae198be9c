"""Who may talk to a local server: real requests to a real one, with the headers that browsers and attackers send.

Locked here: another name than the server's own is refused (DNS rebinding), and so is what another page sends; where
others can reach the server, nobody comes in without the token, which is in no address after the first; every answer,
refusals too, has the headers that keep a page from running what it was not made with.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from paravt.errors import DataError
from paravt.serve.security import CONTENT_POLICY, Access, Guard, Listening, listen


async def echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()}".encode()
    headers = [(b"content-type", b"text/plain"), (b"cache-control", b"max-age=60")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(at: Listening, application: Any = echo) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(Guard(application, at.access), log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[at.socket])), daemon=True)
    thread.start()
    yield at.socket.getsockname()[1]
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def local() -> Iterator[int]:
    with serving(listen()) as port:
        yield port


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[int, str]]:
    at = listen("0.0.0.0")
    assert at.access.token is not None
    assert at.url.endswith(f"/?token={at.access.token}")
    with serving(at) as port:
        yield port, at.access.token


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"host": f"127.0.0.1:{port}", **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    return connection.getresponse()


def test_a_local_server_answers_by_its_own_names_alone(local: int) -> None:
    for host in (f"127.0.0.1:{local}", f"localhost:{local}", "LOCALHOST", f"[::1]:{local}"):
        assert ask(local, host=host).status == 200, host
    for host in ("evil.example", f"evil.example:{local}", "127.0.0.1.evil.example", "127.0.0.1@evil.example",
                 "10.0.0.1", "", "[::1", "localhost:x", "localhost/..", "localhost#"):  # fmt: skip
        answer = ask(local, host=host)
        assert answer.status in (400, 403), host
    assert ask(local, x="1", **{"host ": "x"}).status == 400


def test_another_page_can_neither_send_nor_embed_anything(local: int) -> None:
    own = f"http://127.0.0.1:{local}"
    assert ask(local, method="POST", origin=own, sec_fetch_site="same-origin").status == 200
    assert ask(local, method="POST").status == 200  # curl
    for origin in (
        "http://evil.example",
        "null",
        "",
        "http://[",
        "[",
        own.removeprefix("http://"),
        f"http://127.0.0.1:{local + 1}",
        "http://localhost",
    ):
        assert ask(local, method="POST", origin=origin).status == 403, origin
        assert ask(local, origin=origin).status == 403, origin
    for site in ("cross-site", "same-site"):
        assert ask(local, sec_fetch_site=site, sec_fetch_mode="no-cors").status == 403
        assert ask(local, method="POST", sec_fetch_site=site, sec_fetch_mode="navigate").status == 403
        assert ask(local, sec_fetch_site=site, sec_fetch_mode="navigate").status == 200  # a link


def test_every_answer_has_the_headers(local: int) -> None:
    for host, cache in ((f"localhost:{local}", "max-age=60"), ("evil.example", "no-store")):
        headers = ask(local, host=host).headers
        assert headers["content-security-policy"] == CONTENT_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers.get_all("cache-control") == [cache]
    assert "unsafe" not in CONTENT_POLICY
    assert CONTENT_POLICY.startswith("default-src 'none'")


def test_where_others_can_reach_it_nobody_comes_in_without_the_token(shared: tuple[int, str]) -> None:
    port, token = shared
    assert len(token) >= 40
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": f"Basic {token}"}, {"cookie": "paravt=x"},
                    {"cookie": f"other={token}"}, {"cookie": "\xff=\xff"}):  # fmt: skip
        assert ask(port, **headers).status == 401, headers
    assert ask(port, f"/?token={token}x").status == 401
    assert ask(port, authorization=f"Bearer {token}", host="evil.example").status == 403
    assert ask(port, authorization=f"bearer {token}", host="192.0.2.7:80").status == 200
    assert ask(port, f"/?token={token}", origin="http://evil.example").status == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(shared: tuple[int, str]) -> None:
    port, token = shared
    answer = ask(port, f"/data/x?a=1&token={token}&b=%20")
    assert (answer.status, answer.headers["location"]) == (303, "/data/x?a=1&b=+")
    kept = answer.headers["set-cookie"]
    assert "HttpOnly" in kept
    assert "SameSite=Lax" in kept
    again = ask(port, "/data/x?a=1", cookie="z=1; " + kept.partition(";")[0])
    assert (again.status, again.read()) == (200, b"GET /data/x?a=1")
    assert ask(port, f"//evil.example/?token={token}").headers["location"] == "/evil.example/"


def test_addresses_that_cannot_be_bound_are_one_line() -> None:
    taken = listen()
    port = taken.socket.getsockname()[1]
    with pytest.raises(DataError, match=f"127.0.0.1:{port}: cannot be listened at"):
        listen("127.0.0.1", port)
    taken.socket.close()
    for host, number in (("no such host", 0), ("127.0.0.1", 99999999), ("203.0.113.1", 0)):
        with pytest.raises(DataError, match=r"address|listened|a port"):
            listen(host, number)
    assert listen("localhost").access.token is None


async def test_web_sockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await Guard(echo, Access(frozenset({"x"})))({"type": "websocket", "headers": []}, None, send)  # type: ignore[arg-type]
    assert sent == ["websocket.close"]
