"""An app behind a real socket of this machine, for tests."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import uvicorn

_PATIENCE = 60.0
"""Seconds to start, and to stop, on a machine that does something else."""


class _Server(uvicorn.Server):
    loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: Any = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class AppServer:
    """Serves an app from a thread, from `start` to `stop` or `kill`."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self._server = _Server(
            uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=10)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + _PATIENCE
        while not self._server.started:
            assert self._thread.is_alive(), "the server ended at once; is the port taken?"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)

    @property
    def port(self) -> int:
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._join()

    def kill(self) -> None:
        """As a process that is killed: connections break."""
        connections = self._server.server_state.connections
        self._server.loop.call_soon_threadsafe(lambda: [each.transport.abort() for each in [*connections]])  # type: ignore[union-attr]
        self._server.force_exit = True
        self.stop()

    def _join(self) -> None:
        self._thread.join(_PATIENCE)
        assert not self._thread.is_alive(), "the server does not stop"
