"""`paravt view` as a browser meets it: a real server on a run that goes on, and on directories that hold traps.

Locked here: a step that is written while the page is open is in the list that it asks for next; chunks and videos have
names that the server made, and no path from a request reaches the file system; a video can be asked for in parts.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from report_runs import write_hostile_run, write_run
from rows import write_video
from test_report_write import played
from test_serve_security import ask, serving

from paravt.episodes import save_episode
from paravt.errors import DataError
from paravt.models import QwenVL
from paravt.serve.security import listen
from paravt.serve.view import View, create_app


class Clock:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def get(port: int, path: str, **headers: str) -> Any:
    answer = ask(port, path, **headers)
    assert answer.status == 200, path
    return json.loads(answer.read())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=2, groups=2, size=2)


@pytest.fixture
def port(run: Path, clock: Clock) -> Iterator[int]:
    at = listen()
    view = View([run], [], clock)
    with serving(at, create_app(view)) as number:
        yield number
    view.close()


def test_the_page_follows_a_run_that_goes_on(run: Path, port: int, clock: Clock, tmp_path: Path) -> None:
    page = ask(port, "/")
    text = page.read().decode()
    assert "<title>run</title>" in text
    assert "application/json+deflate" not in text
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    report = get(port, "/data/report.json")
    assert (report["live"], len(report["runs"][0]["episodes"])) == (True, 8)
    row = report["runs"][0]["episodes"][0]
    view = get(port, f"/data/chunks/{row['chunk']}.json")[row["id"]]
    assert view["overview"][0]["picture"].startswith("data:image/webp;base64,")
    assert view["video_url"] is None
    more = write_run(tmp_path / "more", steps=3, groups=2, size=2)
    shutil.copy(more / "episodes" / "step-000003.jsonl", run / "episodes")
    shutil.copy(more / "metrics.jsonl", run)
    assert len(get(port, "/data/report.json")["runs"][0]["episodes"]) == 8  # a moment later it is the same
    clock.now = 60.0
    report = get(port, "/data/report.json")
    assert len(report["runs"][0]["episodes"]) == 12
    assert report["runs"][0]["metrics"]["step"] == [1, 2, 3]
    for row in report["runs"][0]["episodes"]:
        assert row["id"] in get(port, f"/data/chunks/{row['chunk']}.json")


@pytest.mark.parametrize("path", [
    "/data/chunks/nothing.json", "/data/chunks/..%2f..%2frecipe.json", "/data/chunks/%2e%2e/recipe.json",
    "/data/chunks/0-0-0%00.json", "/videos/..%2f..%2fetc%2fpasswd", "/videos//etc/passwd", "/videos/0",
    "/recipe.json", "/../recipe.json", "/openapi.json", "/docs", "/data/", "/episodes/step-000001.jsonl",
])  # fmt: skip
def test_no_path_of_a_request_reaches_the_file_system(port: int, path: str) -> None:
    get(port, "/data/report.json")
    answer = ask(port, path)
    assert answer.status in (404, 405)
    assert b"episodes_every" not in answer.read()


def test_a_hostile_run_is_served_as_data(tmp_path: Path) -> None:
    view = View([write_hostile_run(tmp_path)], [])
    with serving(listen(), create_app(view)) as port:
        text = ask(port, "/").read().decode()
        assert text.count("<script") == 1
        assert "<img" not in text
        answer = ask(port, "/data/report.json")
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        report = json.loads(answer.read())
        for row in report["runs"][0]["episodes"]:
            shown = get(port, f"/data/chunks/{row['chunk']}.json")[row["id"]]
            assert shown["video_url"] is None
        assert "root:" not in json.dumps(report)
    view.close()


async def test_a_video_is_sent_in_parts_and_only_while_it_may_be(tiny: QwenVL, tmp_path: Path) -> None:
    video = write_video(tmp_path / "videos" / "v.mp4")
    secret = write_video(tmp_path / "secret" / "s.mp4", seconds=2)
    made = await played(tiny, video)
    saved = tmp_path / "videos" / "episode.json"
    save_episode(made, saved)
    (tmp_path / "videos" / "link.mp4").symlink_to(secret)
    save_episode(
        replace(made, sample=replace(made.sample, id="t", video="link.mp4")), tmp_path / "videos" / "trap.json"
    )
    view = View([tmp_path / "videos"], [])
    with serving(listen(), create_app(view)) as port:
        rows = get(port, "/data/report.json")["runs"][0]["episodes"]
        views = {row["sample"]: get(port, f"/data/chunks/{row['chunk']}.json")[row["id"]] for row in rows}
        assert views["t"]["video_url"] is None
        address = f"/{views['s']['video_url']}"
        assert video.name not in address
        whole = ask(port, address)
        assert (whole.status, whole.headers["content-type"]) == (200, "video/mp4")
        assert whole.read() == video.read_bytes()
        part = ask(port, address, range="bytes=10-19")
        assert (part.status, part.read()) == (206, video.read_bytes()[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{video.stat().st_size}"
        assert ask(port, address, range="bytes=999999999-").status == 416
        video.unlink()
        video.symlink_to(secret)
        assert ask(port, address).status == 404
    view.close()


def test_what_cannot_be_shown_is_said_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        View([tmp_path / "nothing"], [])
    with pytest.raises(DataError, match="--videos"):
        View([write_run(tmp_path / "run", steps=1, groups=1, size=1)], [tmp_path / "nothing"])


def test_from_the_command_line(run: Path) -> None:
    command = [sys.executable, "-m", "paravt", "view", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = urlsplit(process.stdout.readline().strip())
        assert url.hostname == "127.0.0.1"
        assert len(get(int(url.port or 0), "/data/report.json")["runs"]) == 1
        assert ask(int(url.port or 0), "/", host="evil.example").status == 403
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
