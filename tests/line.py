"""A line between a browser and a server, that can be cut and mended: as when a machine sleeps, or a server restarts."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any


class Line:
    """A context manager; `url` leads to the port of this machine that it was made with."""

    def __init__(self, port: int) -> None:
        self.to = port
        self._open: list[socket.socket] = []
        self._listening = self._listen(0)
        self._port = int(self._listening.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Every connection breaks, and no new one is taken."""
        for end in [self._listening, *self._open]:
            with suppress(OSError):  # it is closed already
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def mend(self) -> None:
        self._listening = self._listen(self._port)

    def _listen(self, port: int) -> socket.socket:
        listening = socket.create_server(("127.0.0.1", port))
        self._start(self._accept, listening)
        return listening

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                near, _ = listening.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
                self._open += [near, far]
                self._start(self._pass_on, near, far)
                self._start(self._pass_on, far, near)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _start(work: Any, *of: socket.socket) -> None:
        threading.Thread(target=work, args=of, daemon=True).start()
