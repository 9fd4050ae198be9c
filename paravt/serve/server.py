"""Runs an application until it is told to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI


class AskServer(uvicorn.Server):
    """Calls `ready` when it listens. Stopping it cancels all questions first: streams of events end with them, which
    would keep the server waiting otherwise."""

    def __init__(self, app: FastAPI, ready: Callable[[], None] = lambda: None) -> None:
        # Connections stay open for longer than most clients keep them: a request is not lost to one that just closed.
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_keep_alive=120, timeout_graceful_shutdown=2
        )
        super().__init__(config)
        self._asks, self._ready = app.state.asks, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._asks.close()
        await super().shutdown(sockets)
