"""What the processes of a run on Ray say, shown by the command that started them, as if they were on its machine.

(Ray's own way to show it has Ray's messages in between.)
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LAST_WORDS = 10.0
"""Seconds for what was said to arrive."""


class _Lines:
    """An actor that keeps what processes of the run say until it is shown."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()

    async def put(self, text: str | None) -> None:
        await self._lines.put(text)

    async def get(self) -> str | None:
        return await self._lines.get()


class Screen(io.TextIOBase):
    """Where they say it: standard error of the command."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.put.remote(text)
        return len(text)

    def __reduce__(self) -> tuple[type[Screen], tuple[Any]]:
        return type(self), (self._lines,)


@contextmanager
def shown() -> Iterator[Screen]:
    """What is written to the screen is shown here."""
    # what is said outlives other machines
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    lines = ray.remote(num_cpus=0, scheduling_strategy=here)(_Lines).remote()

    def show() -> None:
        try:
            while (text := ray.get(lines.get.remote())) is not None:
                sys.stderr.write(text)
                sys.stderr.flush()
        except RayError:  # the connection has ended
            return

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield Screen(lines)
    finally:
        lines.put.remote(None)
        thread.join(_LAST_WORDS)
