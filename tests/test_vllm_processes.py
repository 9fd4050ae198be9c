"""Servers as processes of our own: they end with all that they started, and never outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paravt.engines.vllm import SpawnConfig
from paravt.engines.vllm.spawn import ServerProcess
from paravt.errors import EngineError

MAIN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", child.pid, flush=True)
open({pids!r}, "a").write(f"{{__import__('os').getpid()}} {{child.pid}}\\n")
if "--fail" in sys.argv:
    raise ValueError("told to fail")
time.sleep(600)
"""


def fake_vllm(directory: Path) -> SpawnConfig:
    package = directory / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(MAIN.format(pids=str(directory / "pids")))
    environment = {"PYTHONPATH": str(directory)}
    return SpawnConfig(sys.executable, ("MODEL",), environment, (), directory / "logs")


def running(directory: Path) -> list[int]:
    """Processes that the fake server consists of, zombies not counted."""
    file = directory / "pids"
    pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [
        pid
        for pid, state in zip(pids, states, strict=True)
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_server_ends_with_all_that_it_started(tmp_path: Path) -> None:
    server = ServerProcess(fake_vllm(tmp_path), 0)
    server.start()
    wait_for(lambda: len(running(tmp_path)) == 2)
    assert server.alive
    server.stop()
    assert not server.alive
    assert running(tmp_path) == []


def test_a_server_does_not_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    fake_vllm(tmp_path)
    code = (
        "import sys, time, pathlib; from paravt.engines.vllm.spawn import ServerProcess, SpawnConfig;"
        f"d = pathlib.Path({str(tmp_path)!r});"
        "ServerProcess(SpawnConfig(sys.executable, ('MODEL',), {'PYTHONPATH': str(d)}, (), d / 'logs'), 0).start();"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    wait_for(lambda: len(running(tmp_path)) == 2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: running(tmp_path) == [])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    config = fake_vllm(tmp_path)
    server = ServerProcess(SpawnConfig(config.python, ("--fail",), config.environment, (), config.logs), 0)
    server.start()
    wait_for(lambda: not server.alive)
    assert "ValueError: told to fail" in server.last_words()
    assert running(tmp_path) == []  # and takes what it started with it
    with pytest.raises(EngineError, match=r"engine\.python: no-such-python: no such program"):
        ServerProcess(SpawnConfig("no-such-python", (), {}, (), tmp_path), 0)
