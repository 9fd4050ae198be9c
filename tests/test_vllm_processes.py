"""Servers as processes of our own: they end with all that they started, never outlive us, and no wait for them is
without an end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_server import spawn_config

from paravt.engines.vllm import SpawnConfig
from paravt.engines.vllm.spawn import ServerProcess
from paravt.engines.vllm.transfer import _both
from paravt.errors import EngineError

MAIN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", child.pid, flush=True)
open({pids!r}, "a").write(f"{{__import__('os').getpid()}} {{child.pid}}\\n")
open({pids!r} + ".environment", "w").write(" ".join(__import__("os").environ))
if "--fail" in sys.argv:
    raise ValueError("told to fail")
time.sleep(600)
"""


def fake_vllm(directory: Path) -> SpawnConfig:
    return spawn_config(directory, MAIN.format(pids=str(directory / "pids")), "MODEL")


def running(directory: Path) -> list[int]:
    """Processes that the fake server consists of, zombies not counted."""
    file = directory / "pids"
    pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
    return [pid for pid in pids if lives(pid)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end in between
        return False


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
    try:
        wait_for(lambda: len(running(tmp_path)) == 2)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
    wait_for(lambda: running(tmp_path) == [])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    config = fake_vllm(tmp_path)
    server = ServerProcess(SpawnConfig(config.python, ("--fail",), config.environment, (), config.logs), 0)
    server.start()
    wait_for(lambda: not server.alive)
    assert "ValueError: told to fail" in server.last_words()
    assert running(tmp_path) == []  # and takes what it started with it
    (tmp_path / "file").touch()
    without = ServerProcess(SpawnConfig(config.python, (), {"PYTHONPATH": ""}, (), tmp_path / "without"), 0)
    without.log.parent.mkdir()
    without.log.write_text("python: Error while finding ... (ModuleNotFoundError: No module named 'vllm')\n")
    assert without.last_words() == f"engine.python: {config.python} has no vLLM; name an interpreter that has it"
    nowhere = ServerProcess(SpawnConfig(config.python, (), {}, (), tmp_path / "file"), 0)
    with pytest.raises(EngineError, match="the server cannot be started: File exists"):
        nowhere.start()
    with pytest.raises(EngineError, match=r"engine\.python: no-such-python: no such program"):
        ServerProcess(SpawnConfig("no-such-python", (), {}, (), tmp_path), 0)


def test_a_server_ends_although_somebody_else_holds_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that was forked meanwhile does: the end of the pipe never comes."""
    monkeypatch.setattr("paravt.engines.vllm.spawn._STOP", 1.0)
    server = ServerProcess(fake_vllm(tmp_path), 0)
    server.start()
    wait_for(lambda: len(running(tmp_path)) == 2)
    assert server._process is not None
    assert server._process.stdin is not None
    held = os.dup(server._process.stdin.fileno())
    try:
        server.stop()
        wait_for(lambda: not server.alive)
        assert running(tmp_path) == []
    finally:
        os.close(held)


def test_nobody_else_gets_the_port_of_a_server(tmp_path: Path) -> None:
    server = ServerProcess(fake_vllm(tmp_path), 0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", server.port))
    with socket.create_server(("127.0.0.1", server.port)) as listening:  # as vLLM does: the address may be reused
        assert listening.getsockname()[1] == server.port


def test_a_server_is_no_process_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, its workers would look for one another at the launcher's store."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    server = ServerProcess(fake_vllm(tmp_path), 0)
    server.start()
    try:
        wait_for(lambda: len(running(tmp_path)) == 2 and (tmp_path / "pids.environment").exists())
        told = (tmp_path / "pids.environment").read_text().split()
    finally:
        server.stop()
    assert "KEPT" in told
    assert not [
        name for name in told if name.startswith("TORCHELASTIC") or name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    ]


def test_a_transfer_that_is_stuck_holds_up_nobody() -> None:
    """Neither the engine, when the server has failed, nor the end of the run."""
    code = (
        "import asyncio, threading\n"
        "from paravt.engines.vllm.transfer import _both; from paravt.errors import EngineError\n"
        "async def fails():\n    raise EngineError('the server is gone')\n"
        "async def main():\n"
        "    try:\n        await _both(fails(), threading.Event().wait)\n"
        "    except EngineError as error:\n        print(error)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "the server is gone\n"


async def test_a_transfer_that_breaks_off_says_so() -> None:
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def broken() -> None:
        raise RuntimeError("Connection closed by peer\nwith a stack")

    with pytest.raises(EngineError, match=r"^the transfer of weights broke off: Connection closed by peer$"):
        await _both(waits(), broken)
    await asyncio.wait_for(ended.wait(), 10)  # what the server was asked is not waited for any longer
