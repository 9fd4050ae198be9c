"""Who may talk to a local server, and what a browser may do with what it answers.

Bound to this machine alone, a server has no password, and its dangers are other pages in the user's browser: one whose
name is made to mean this machine (DNS rebinding; the Host header is checked), and one that sends requests from where it
is (`Origin` and `Sec-Fetch-Site` are checked). Bound elsewhere it asks for a token, too: in the address that is printed
(the browser then keeps it as a cookie), or in an `Authorization: Bearer` header.

Only the standard library: any ASGI server and application will do.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from http import cookies
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from paravt.errors import DataError

LOOPBACK = "127.0.0.1"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""For pages whose scripts and styles are files of the server. Pages are told it, and so is everything else."""
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer that does not have its own."""
_TOKEN = "token"
_BACKLOG = 128

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Access:
    """Who may come in."""

    hosts: frozenset[str]
    """Names in the Host header that are this server; lower case."""
    token: str | None = None
    """None: nobody is asked for one."""
    any_address: bool = False
    """Are addresses in numbers this server, whatever they are? Rebinding needs a name."""
    cookie: str = "paravt"
    """What the browser keeps the token as: one for each port, since cookies are shared by the ports of a machine."""


@dataclass(frozen=True)
class Listening:
    """A socket that is bound, and what comes with where it is bound to."""

    socket: socket.socket
    access: Access
    url: str
    """For the user: with the token, if there is one."""


def listen(host: str = LOOPBACK, port: int = 0) -> Listening:
    """Bind to an address; port 0 is any that is free. Where other machines can reach it, a token is made.

    Raises DataError if that cannot be.
    """
    if not 0 <= port <= 65535:
        raise DataError(f"{host}:{port}: a port is at most 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        bound = socket.socket(family, kind)
    except (OSError, UnicodeError, OverflowError) as error:
        raise DataError(f"{host}:{port}: not an address: {getattr(error, 'strerror', None) or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{host}:{port}: cannot be listened at: {reason}; choose another --port") from error
    number = int(bound.getsockname()[1])
    at = ipaddress.ip_address(str(address[0]).partition("%")[0])
    name = f"[{host}]" if ":" in host else host
    if at.is_loopback:
        hosts = frozenset({"localhost", "127.0.0.1", "::1", host.lower()})
        return Listening(bound, Access(hosts, cookie=f"paravt-{number}"), f"http://{name}:{number}/")
    token = secrets.token_urlsafe(32)
    machine = socket.gethostname()
    hosts = frozenset(known.lower() for known in (host, "localhost", machine, f"{machine}.local", socket.getfqdn()))
    access = Access(hosts, token, any_address=True, cookie=f"paravt-{number}")
    shown = machine if at.is_unspecified else name
    return Listening(bound, access, f"http://{shown}:{number}/?{_TOKEN}={quote(token)}")


class Guard:
    """An ASGI application in front of another one: it turns away who may not come in, and adds headers to all answers.

    Refusals are `{"detail": "one line"}`, as the application's own errors are.
    """

    def __init__(self, application: Application, access: Access) -> None:
        self._application, self._access = application, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket: there are none here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
                given = {name for name, _ in own}
                more = [(n.encode(), v.encode()) for n, v in _HEADERS.items() if n.encode() not in given]
                message = {**message, "headers": [*own, *more]}
            await send(message)

        refused = _refusal(scope, self._access)
        if refused is not None:
            await _answer(answer, *refused)
        elif (home := _with_token(scope, self._access)) is not None:
            await _answer(answer, 303, "the token is kept", home)
        else:
            await self._application(scope, receive, answer)


def _refusal(scope: Scope, access: Access) -> tuple[int, str] | None:
    """The status and the reason, if a request may not come in."""
    named = _header(scope, "host")
    host = _host(named[0]) if len(named) == 1 else None
    if host is None or not (host in access.hosts or (access.any_address and _is_address(host))):
        return 403, "this server is not known by that name; use the address that it printed"
    if not _same_site(scope, named[0]):
        return 403, "another page may not send requests to this server"
    if access.token is not None and not any(_equal(access.token, given) for given in _given_tokens(scope, access)):
        return 401, "a token is needed; use the address that the server printed"
    return None


def _same_site(scope: Scope, host: str) -> bool:
    """False for what another page sends. Programs that are no browsers say nothing about pages, and may."""
    for origin in _header(scope, "origin"):
        if origin.partition("://")[2].lower() != host.lower():
            return False
    sites, modes = _header(scope, "sec-fetch-site"), _header(scope, "sec-fetch-mode")
    if all(site in ("same-origin", "none") for site in sites):
        return True
    return scope["method"] in ("GET", "HEAD") and modes == ["navigate"]  # a link to here


def _given_tokens(scope: Scope, access: Access) -> Iterable[str]:
    for value in _header(scope, "authorization"):
        kind, _, token = value.partition(" ")
        if kind.lower() == "bearer":
            yield token.strip()
    for value in _header(scope, "cookie"):
        kept: cookies.SimpleCookie = cookies.SimpleCookie()
        try:
            kept.load(value)
        except cookies.CookieError:
            continue
        if access.cookie in kept:
            yield kept[access.cookie].value
    yield from (value for name, value in _query(scope) if name == _TOKEN)


def _with_token(scope: Scope, access: Access) -> dict[str, str] | None:
    """For a page that was opened with the token in its address: keep it as a cookie, and show the address without."""
    query = _query(scope)
    if access.token is None or scope["method"] != "GET" or all(name != _TOKEN for name, _ in query):
        return None
    rest = urlencode([(name, value) for name, value in query if name != _TOKEN])
    path = "/" + quote(str(scope["path"])).lstrip("/")  # "//elsewhere" would be another machine
    return {
        "location": path + (f"?{rest}" if rest else ""),
        "set-cookie": f"{access.cookie}={access.token}; Path=/; HttpOnly; SameSite=Lax",
    }


async def _answer(send: Send, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"detail": detail}).encode()
    every = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    shown = [(name.encode(), value.encode()) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: str) -> list[str]:
    return [bytes(value).decode("latin-1") for key, value in scope["headers"] if bytes(key).lower() == name.encode()]


def _query(scope: Scope) -> list[tuple[str, str]]:
    text = bytes(scope.get("query_string", b"")).decode("latin-1")
    return parse_qsl(text, keep_blank_values=True, errors="replace") if len(text) < 10_000 else []


def _host(value: str) -> str | None:
    """The name in a Host header, without port and brackets; None for what is none."""
    try:
        parts = urlsplit(f"//{value}")
        host, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return host if host and parts.netloc == value and parts.username is None else None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _equal(token: str, given: str) -> bool:
    return hmac.compare_digest(token.encode(), given.encode("utf-8", "replace"))
