"""The Model Context Protocol: the SDK's own client, with the command as its server and with one in this process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from ask_server import Choosing
from conftest import CASES, LONG
from mcp import Client, StdioServerParameters

from paravt.agent import EpisodeConfig
from paravt.lab.demo import question_of_two_scenes
from paravt.lab.world import write_video
from paravt.models import QwenVL
from paravt.serve.mcp_server import build_server
from paravt.serve.videos import open_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with a video of two minutes, and ways out of it."""
    directory = tmp_path / "root"
    (directory / "talks").mkdir(parents=True)
    shutil.copy(LONG, directory / "talks" / "long.mp4")
    shutil.copy(CASES / "video" / "base.mp4", tmp_path / "secret.mp4")
    (directory / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    (directory / "no.mp4").write_text("no video")
    for name in (b".long.mp4", b"long.html", b"\xff.mp4"):  # that list_videos does not name
        shutil.copy(LONG, os.fsencode(directory / "talks") + b"/" + name)
    return directory


@asynccontextmanager
async def client_of(engine: Choosing, root: Path) -> AsyncIterator[Client]:
    server = build_server(engine, open_root(root), config=EpisodeConfig(crop_max_frames=2))
    async with Client(server) as client:
        yield client


async def call(client: Client, **arguments: Any) -> tuple[bool, str]:
    """(did it fail, what it said)."""
    result = await client.call_tool("ask_video", {"frames": 4, **arguments})
    said = "".join(getattr(part, "text", "") for part in result.content)
    return bool(result.is_error), said.removeprefix("Error executing tool ask_video: ")  # of the SDK


async def test_tools_answers_and_progress(tiny: QwenVL, root: Path) -> None:
    steps: list[tuple[float, str | None]] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        steps.append((progress, message))

    async with client_of(Choosing(tiny), root) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert sorted(tools) == ["ask_video", "list_videos"]
        assert sorted(tools["ask_video"].input_schema["properties"]) == ["frames", "options", "question", "video"]
        assert tools["ask_video"].input_schema["required"] == ["video", "question"]
        listed = (await client.call_tool("list_videos")).structured_content
        assert listed == {"result": [{"video": "talks/long.mp4", "seconds": 120.0, "width": 128, "height": 72}]}

        asked = {"video": "talks/long.mp4", "question": "What?", "frames": 4}
        result = await client.call_tool("ask_video", asked, progress_callback=heard)
    assert not result.is_error
    content = result.structured_content
    assert content is not None
    assert content["answer"] == "a cat at 15 seconds"
    assert [(e["start"], e["end"], e["status"], e["report"]) for e in content["evidence"]] == [
        (10.0, 20.0, "ran", "a <b>cat</b>"), (30.0, 40.0, "ran", "a <b>cat</b>")
    ]  # fmt: skip
    assert content["problems"] == []
    assert [step for step, _ in steps] == list(range(1, 8))
    said = [message for _, message in steps]
    assert said[:2] == ["4 overview frames of 2:00", "turn 1: 2 calls"]
    assert sorted(str(message) for message in said[2:6]) == [
        "0:10 - 0:20: a <b>cat</b>", "0:30 - 0:40: a <b>cat</b>", "watching 0:10 - 0:20", "watching 0:30 - 0:40"
    ]  # fmt: skip
    assert said[6] == "turn 2: answered"


async def test_errors_are_one_line_and_nothing_outside_is_opened(tiny: QwenVL, root: Path) -> None:
    secret = root.parent / "secret.mp4"
    async with client_of(Choosing(tiny), root) as client:
        for name in (
            str(secret),
            "../secret.mp4",
            "talks/../../secret.mp4",
            "out.mp4",
            "talks",
            "talks/.long.mp4",
            "talks/long.html",
            "talks/\udcff.mp4",
            "",
            "a\0b",
            "x\n" * 999,
        ):
            failed, said = await call(client, video=name, question="What?")
            assert failed, name
            assert said.startswith("there is no video"), said
            assert said.endswith("here; list_videos names those there are")
            assert len(said.splitlines()) == 1
            assert len(said) < 1500
        for arguments, message in (
            ({"video": "no.mp4", "question": "?"}, "no.mp4: not a readable video"),
            ({"video": "talks/long.mp4", "question": " "}, "the question is empty"),
            ({"video": "talks/long.mp4", "question": "?", "options": ["x"] * 27}, "27 options; at most 26"),
            ({"video": "talks/long.mp4", "question": "\ud800"}, "characters that are no text, or more than 8000"),
            ({"video": "talks/long.mp4", "question": "x" * 8001}, "characters that are no text, or more than 8000"),
            ({"video": "talks/long.mp4", "question": "?", "frames": 0}, "frames: 0 is not between 1 and 1024"),
            ({"video": "talks/long.mp4", "question": "a broken engine"}, "told to fail"),
        ):
            failed, said = await call(client, **arguments)
            assert failed
            assert message in said
            assert len(said.splitlines()) == 1


async def test_a_cancelled_call_ends_what_it_runs(tiny: QwenVL, root: Path) -> None:
    engine = Choosing(tiny)
    watching = anyio.Event()

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        if message and message.startswith("watching"):
            watching.set()

    async with client_of(engine, root) as client, anyio.create_task_group() as group:

        async def ask() -> None:
            asked = {"video": "talks/long.mp4", "question": "hang on", "frames": 4}
            await client.call_tool("ask_video", asked, progress_callback=heard)

        group.start_soon(ask)
        await watching.wait()
        group.cancel_scope.cancel()
    assert set(engine.cancelled) == {"crop/0/0", "crop/0/1"}
    assert engine.running == 0


async def test_the_command_with_the_shipped_checkpoint(root: Path) -> None:
    write_video("cli-1", root / "lab.mp4")
    asked = question_of_two_scenes("cli-1", "lab.mp4").sample
    command = ["-c", "from paravt.cli import main; main()", "mcp", "--root", str(root)]
    steps: list[str | None] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message)

    directory = str(Path(__file__).parent.parent)
    server = StdioServerParameters(command=sys.executable, args=command, env={"PYTHONPATH": directory})
    async with Client(server) as client:
        listed = (await client.call_tool("list_videos")).structured_content
        assert listed is not None
        assert [row["video"] for row in listed["result"]] == ["lab.mp4", "talks/long.mp4"]
        arguments = {"video": "lab.mp4", "question": asked.question}
        result = await client.call_tool("ask_video", arguments, progress_callback=heard)
        assert result.structured_content is not None, result
        assert result.structured_content["answer"] == asked.answer
        assert len(result.structured_content["evidence"]) == 3
        assert len(steps) == 1 + 1 + 2 * 3 + 1
        failed = await client.call_tool("ask_video", {"video": "/etc/passwd", "question": "?"})
        assert failed.is_error
