"""An HTTP application for tests, really served: on a free port of this machine, by a thread of its own."""

from __future__ import annotations

import threading
import time
from typing import Any

import uvicorn


class Serving:
    """A context manager, or `start` and `stop`."""

    def __init__(self, app: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def __enter__(self) -> str:
        """Its address."""
        self.start()
        return self.url

    def __exit__(self, *error: object) -> None:
        self.stop()
