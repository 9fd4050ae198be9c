"""Runs an application until it is told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 is any free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class AskServer(uvicorn.Server):
    """Calls `ready` when it listens. Stopping it cancels all questions first: streams of events end with them, which
    would keep the server waiting otherwise."""

    def __init__(self, app: FastAPI, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
        self._asks, self._ready = app.state.asks, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._asks.close()
        await super().shutdown(sockets)
