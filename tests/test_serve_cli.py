"""`paravt serve` and `paravt mcp` as commands: they start, serve, end cleanly, and say in one line what is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import Server
from conftest import LONG
from test_cli import paravt

EXAMPLE = Path(__file__).parent.parent / "examples" / "ask_server.py"


def test_a_server_for_the_example_until_it_is_stopped(server: Server, tmp_path: Path) -> None:
    """The chat server answers; the example asks; what was uploaded is removed at the end."""
    command = ["serve", "--server", server.url, "--port", "0"]
    serving = subprocess.Popen(
        [sys.executable, "-c", "from paravt.cli import main; main()", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert serving.stdout is not None
    try:
        address = serving.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        asked = [sys.executable, str(EXAMPLE), LONG, "Which?", address]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stdout) == (0, "answer: B\n"), done.stderr
        assert list(tmp_path.glob("paravt-uploads-*/*/longgop.mp4"))
        wrong = [sys.executable, str(EXAMPLE), __file__, "Which?", address]
        done = subprocess.run(wrong, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1
        assert done.stderr == "test_serve_cli.py: not a readable video (Invalid data found when processing input)\n"
    finally:
        serving.send_signal(signal.SIGTERM)
        _, said = serving.communicate(timeout=120)
    assert serving.returncode == 0, said
    assert said == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "--model", "m", "--server", "http://x"], 2, "give --model or --server, not both"),
        (["serve", "--served-model", "m"], 2, "--served-model needs --server"),
        (["serve", "--max-seconds", "long"], 2, "'long' is no duration; write 90, 30m or 4h"),
        (["serve", "--videos", "no/such"], 6, "no/such: not a directory"),
        (["serve", "--model", "./no/such", "--port", "0"], 4, "./no/such: no such model directory"),
        (["mcp", "--root", "no/such"], 6, "no/such: not a directory"),
        (["mcp"], 2, "--root"),
    ],
)
def test_what_cannot_be_served(arguments: list[str], code: int, message: str) -> None:
    done = paravt(*arguments)
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", [["serve"], ["mcp", "--root", "."]])
def test_a_model_that_cannot_be_is_told_before_anything_is_loaded(command: list[str]) -> None:
    """Loading takes minutes where the machine is busy."""
    code = "import sys\nfrom paravt.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    arguments = [sys.executable, "-c", code, *command, "--model", "./no/such"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (4, "False\n")
    assert len(done.stderr.splitlines()) == 1


def test_an_mcp_server_ends_at_ctrl_c_though_its_client_is_there(tmp_path: Path) -> None:
    code = "from paravt.cli import main; main()"
    command = [sys.executable, "-c", code, "mcp", "--root", str(tmp_path), "--server", "http://127.0.0.1:9"]
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": client}
    serving = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert serving.stdin is not None
    assert serving.stdout is not None
    try:
        serving.stdin.write(json.dumps(hello) + "\n")
        serving.stdin.flush()
        assert json.loads(serving.stdout.readline())["id"] == 0
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=60) == -signal.SIGINT
        assert serving.stderr is not None
        assert serving.stderr.read() == ""
    finally:
        serving.kill()
        serving.wait(timeout=60)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = paravt("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 6
    assert "Address already in use" in done.stderr
