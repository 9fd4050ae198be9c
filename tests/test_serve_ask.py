"""Asking over HTTP: a real server, real videos, a scripted engine."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ask_server import ANSWER, WINDOWS, Asking, Choosing
from conftest import CASES

from paravt.agent import EpisodeConfig
from paravt.ask import LAB_MAX_TOKENS, open_engine
from paravt.lab.demo import question_of_two_scenes
from paravt.lab.world import write_video
from paravt.models import QwenVL
from paravt.serve.asks import Ask
from paravt.serve.messages import AskState, AskSummary, ask_summary
from paravt.serve.videos import Library

VIDEOS = CASES / "video"


class Heard(logging.Handler):
    """What a server would write on its terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def engine(tiny: QwenVL) -> Choosing:
    return Choosing(tiny)


@pytest.fixture
def asking(engine: Choosing, tmp_path: Path) -> Iterator[Asking]:
    with Asking(engine, Library([VIDEOS], tmp_path), max_queue=3, max_upload_bytes=1 << 20) as running:
        yield running


@pytest.fixture
def long(asking: Asking) -> str:
    """The id of a video of two minutes."""
    (id,) = [video["id"] for video in asking.client.get("/v1/videos").json() if video["name"] == "longgop.mp4"]
    return str(id)


def test_an_answer_event_by_event(asking: Asking, long: str) -> None:
    id = asking.ask(long, "What <script>alert(1)</script> happens?")
    events = list(asking.events(id))
    names = [name for _, name, _ in events]
    assert names[:3] == ["started", "overview", "turn"]
    assert sorted(names[3:7]) == ["crop_done", "crop_done", "crop_started", "crop_started"]
    assert names[7:] == ["turn", "done"]
    assert [number for number, _, _ in events] == list(range(1, 10))
    by_name: dict[str, Any] = {name: data for _, name, data in reversed(events)}  # the first of each
    assert by_name["overview"]["duration"] == pytest.approx(120)
    assert [frame["time"] for frame in by_name["overview"]["frames"]] == [15.0, 45.0, 75.0, 105.0]
    assert all(frame["picture"].startswith("data:image/webp;base64,") for frame in by_name["overview"]["frames"])
    assert (by_name["turn"]["index"], by_name["turn"]["calls"], by_name["turn"]["answer"]) == (0, 2, None)
    started = [(data["start"], data["end"]) for _, name, data in events if name == "crop_started"]
    assert sorted(started) == list(WINDOWS)
    crop = by_name["crop_done"]["crop"]
    assert (crop["status"], crop["report"], len(crop["frames"])) == ("ran", "a <b>cat</b>", 2)
    assert all(frame["picture"] for frame in crop["frames"])
    episode = by_name["done"]["episode"]
    assert (episode["id"], episode["answer"], episode["end"]) == (id, "a cat at 15 seconds", "answered")
    assert episode["question"] == "What <script>alert(1)</script> happens?"
    assert (episode["video"], episode["video_url"]) == ("longgop.mp4", f"/v1/videos/{long}/file")
    assert episode["turns"][-1]["text"] == ANSWER
    assert str(VIDEOS) not in asking.client.get(f"/v1/ask/{id}").text  # of this machine

    state = asking.state(id)
    AskState.model_validate(state)  # what the API's description promises
    assert [event["event"] for event in state["events"]] == names
    assert state["events"][-1] == {"event": "done", **by_name["done"]}
    assert (state["state"], state["answer"], state["message"]) == ("done", "a cat at 15 seconds", None)
    assert state["position"] is None
    assert state["seconds"] > 0


def test_the_page_is_one_file_that_nothing_else_can_run_in(asking: Asking) -> None:
    answer = asking.client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    for name in ("script", "style"):
        (inside,) = re.findall(f"<{name}>(.*?)</{name}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert not re.search(r"<script [^>]*src|<link [^>]*stylesheet|<img", answer.text)


def test_events_go_on_where_a_stream_broke_off(asking: Asking, long: str) -> None:
    id = asking.ask(long, "What?")
    whole = list(asking.events(id))
    assert list(asking.events(id)) == whole  # from the first on, also when it is over
    assert list(asking.events(id, after=4)) == whole[4:]
    over = asking.client.get(f"/v1/ask/{id}/events", headers={"Last-Event-ID": str(whole[-1][0])})
    assert over.status_code == 204


def test_the_queue_moves_and_says_so(asking: Asking, engine: Choosing, long: str) -> None:
    first = asking.ask(long, "hang on")
    second, third, fourth = (asking.ask(long, f"question {n}") for n in (2, 3, 4))
    full = asking.client.post("/v1/ask", json={"video": long, "question": "one too many"})
    assert full.status_code == 429
    assert "the queue is full (3 questions wait)" in full.json()["detail"]
    assert 1 <= int(full.headers["retry-after"]) <= 600
    assert [asking.state(id)["position"] for id in (second, third, fourth)] == [1, 2, 3]
    assert asking.state(fourth)["events"] == [{"event": "queued", "position": 3}]
    assert asking.client.get("/healthz").json()["queued"] == 3

    stream = asking.events(fourth)
    assert next(stream)[1:] == ("queued", {"position": 3})
    gone = asking.client.delete(f"/v1/ask/{second}").json()  # one that waits
    assert (gone["state"], gone["position"], gone["seconds"]) == ("cancelled", None, None)
    assert next(stream)[1:] == ("queued", {"position": 2})
    assert [name for _, name, _ in asking.events(second)] == ["queued", "cancelled"]

    for _, name, _ in asking.events(first):
        if name == "crop_started":
            break
    gone = asking.client.delete(f"/v1/ask/{first}").json()  # one that runs
    assert gone["state"] == "cancelled"
    assert set(engine.cancelled) == {"crop/0/0", "crop/0/1"}  # nothing of it is left in the engine
    assert engine.running <= 1
    rest = [name for _, name, _ in stream]
    assert rest[-1] == "done"
    assert asking.state(third)["state"] == "done"
    again = asking.client.delete(f"/v1/ask/{third}").json()  # one that is over stays as it is
    assert again["state"] == "done"
    listed = asking.client.get("/v1/asks").json()
    assert [(ask["id"], ask["state"]) for ask in listed] == [
        (fourth, "done"), (third, "done"), (second, "cancelled"), (first, "cancelled")
    ]  # fmt: skip
    assert listed[0]["name"] == "longgop.mp4"


def test_failed_is_not_without_an_answer(asking: Asking, long: str) -> None:
    id = asking.ask(long, "a broken engine")
    events = list(asking.events(id))
    assert events[-1][1:] == ("failed", {"message": "told to fail"})
    assert (asking.state(id)["state"], asking.state(id)["message"]) == ("failed", "told to fail")


def test_scripts_wait_for_the_answer(asking: Asking, long: str) -> None:
    body = {"video": long, "question": "What?", "options": ["a cat", "a dog"], "frame_budget": 4, "dispatch": "none"}
    answer = asking.client.post("/v1/ask", params={"wait": "true"}, json=body)
    assert answer.status_code == 200
    state = AskState.model_validate(answer.json())
    assert (state.state, state.answer, state.dispatch, state.options) == ("done", None, "none", ["a cat", "a dog"])
    assert state.events[-1]["event"] == "done"


def test_who_hangs_up_while_waiting_cancels(asking: Asking, engine: Choosing, long: str) -> None:
    body = {"video": long, "question": "hang on", "frame_budget": 4}
    with pytest.raises(httpx2.ReadTimeout):
        asking.client.post("/v1/ask", params={"wait": "true"}, json=body, timeout=1)
    (ask,) = asking.client.get("/v1/asks").json()
    list(asking.events(ask["id"]))  # to its end
    assert asking.state(ask["id"])["state"] == "cancelled"
    assert engine.running == 0


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"question": "  "}, "question: String should have at least 1 character"),
        ({"question": 5}, "question: Input should be a valid string"),
        ({"question": "a\0b"}, "question: Value error, has characters that are no text"),
        ({"frame_budget": 0}, "frame_budget: Input should be greater than or equal to 1"),
        ({"dispatch": "both"}, "dispatch: Input should be 'parallel', 'sequential' or 'none'"),
        ({"options": ["x"] * 27}, "options: List should have at most 26 items after validation, not 27"),
        ({"qestion": "x"}, "qestion: Extra inputs are not permitted"),
        ({"x" * 9999 + "\n": 1}, "x" * 60 + ": Extra inputs are not permitted"),
        ({"a\n\0": 1}, "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}: Extra inputs are not permitted"),
        (
            {str(n): 1 for n in range(9999)},
            "; ".join(f"{n}: Extra inputs are not permitted" for n in range(5)),
        ),
    ],
)
def test_a_wrong_request_is_one_line(asking: Asking, change: dict[str, Any], detail: str) -> None:
    answer = asking.client.post("/v1/ask", json={"video": "v", "question": "What?", **change})
    assert (answer.status_code, answer.json()) == (422, {"detail": detail})


def test_a_request_that_would_fill_the_memory_is_refused(asking: Asking) -> None:
    def endless() -> Iterator[bytes]:  # nobody says beforehand how much this will be
        for _ in range(100):
            yield b"[" * (1 << 20)

    for content in (b" " * (5 << 20), endless()):
        answer = asking.client.post("/v1/ask", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()) == (
            413, {"detail": "the request is too large; at most 4 MB are taken"}
        )  # fmt: skip


def test_who_leaves_a_stream_is_no_error(asking: Asking, long: str) -> None:
    log, heard = logging.getLogger("uvicorn.error"), Heard()
    log.addHandler(heard)
    host = asking.url.removeprefix("http://")
    request = f"GET /v1/ask/{asking.ask(long, 'hang on')}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    address, _, port = host.rpartition(":")
    for _ in range(60):
        with socket.create_connection((address, int(port)), timeout=60) as client:
            client.sendall(request)
            client.recv(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a killed client does
    assert asking.client.get("/healthz").json()["running"] == 1
    asking.stop()
    log.removeHandler(heard)
    assert heard.lines == []


def test_an_upload_under_way_when_the_server_stops(asking: Asking, tmp_path: Path) -> None:
    log, heard = logging.getLogger("uvicorn.error"), Heard()
    log.addHandler(heard)
    host = asking.url.removeprefix("http://")
    form = f"POST /v1/videos HTTP/1.1\r\nHost: {host}\r\nContent-Length: 999\r\n"
    form += "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\nContent-Disposition: form-data; "
    address, _, port = host.rpartition(":")
    with socket.create_connection((address, int(port)), timeout=60) as client:
        client.sendall(f'{form}name="file"; filename="v.mp4"\r\n\r\nabc'.encode())
        while not list(tmp_path.glob(".part-*/v.mp4")):  # it has begun
            assert asking.client.get("/healthz").status_code == 200
        asking.stop()
    log.removeHandler(heard)
    assert [line for line in heard.lines if "ASGI" in line] == []
    assert list(tmp_path.iterdir()) == []


async def test_a_quiet_stream_is_kept_alive() -> None:
    ask: Ask[str] = Ask("?")
    stream = ask.follow(quiet=0.01)
    assert await anext(stream) is None
    ask.emit("started")
    assert (entry := await anext(stream)) is not None
    assert entry.name == "started"
    assert await anext(stream) is None


def test_states_are_read_where_they_change(asking: Asking, long: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a state could be told with the events of the state before."""
    threads: set[str] = set()

    def summary(ask: Ask[Any]) -> AskSummary:
        threads.add(threading.current_thread().name)
        return ask_summary(ask)

    monkeypatch.setattr("paravt.serve.api.ask_summary", summary)
    asking.state(asking.ask(long, "hang on"))
    asking.client.get("/v1/asks")
    assert threads == {asking.thread.name}


def test_unknown_ids(asking: Asking) -> None:
    assert asking.client.post("/v1/ask", json={"video": "no", "question": "?"}).status_code == 404
    for path in ("/v1/ask/no", "/v1/ask/no/events", "/v1/videos/no/file", "/v1/videos/..%2f..%2fetc%2fpasswd/file"):
        answer = asking.client.get(path)
        assert answer.status_code == 404, path
        assert list(answer.json()) == ["detail"]
    assert asking.client.delete("/v1/ask/no").status_code == 404


def test_the_description_is_whole(asking: Asking) -> None:
    described = asking.client.get("/openapi.json").json()
    paths = {path: sorted(methods) for path, methods in described["paths"].items()}
    assert paths == {
        "/v1/videos": ["get", "post"],
        "/v1/videos/{id}": ["delete"],
        "/v1/videos/{id}/file": ["get"],
        "/v1/ask": ["post"],
        "/v1/ask/{id}": ["delete", "get"],
        "/v1/ask/{id}/events": ["get"],
        "/v1/asks": ["get"],
        "/healthz": ["get"],
    }
    assert {"202", "200", "404", "422", "429", "401", "403"} == set(described["paths"]["/v1/ask"]["post"]["responses"])
    assert {"AskRequest", "AskState", "EpisodeView", "CropView", "Problem"} <= set(described["components"]["schemas"])
    events = described["components"]["schemas"]["AskState"]["properties"]["events"]["items"]
    assert set(events["discriminator"]["mapping"]) == {
        "queued", "started", "overview", "turn", "crop_started", "crop_done", "done", "failed", "cancelled"
    }  # fmt: skip


def test_stopping_ends_what_runs_and_who_follows_it(engine: Choosing, tmp_path: Path) -> None:
    with Asking(engine, Library([VIDEOS], tmp_path)) as asking:
        (video,) = [row["id"] for row in asking.client.get("/v1/videos").json() if row["name"] == "longgop.mp4"]
        running, waiting = asking.ask(video, "hang on"), asking.ask(video, "What?")
        streams = [asking.events(id) for id in (running, waiting)]
        first = [next(stream) for stream in streams]
        asking.stop()
        assert [list(stream)[-1][1] for stream in streams] == ["cancelled", "cancelled"]
    assert first
    assert engine.running == 0


@pytest.fixture(scope="module")
def lab_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "video.mp4"
    write_video("cli-1", path)
    return path


def test_the_shipped_checkpoint_answers_about_an_upload(lab_video: Path, tmp_path: Path) -> None:
    asked = question_of_two_scenes("cli-1", str(lab_video)).sample
    config = EpisodeConfig(max_tokens=LAB_MAX_TOKENS)
    with Asking(open_engine(), Library([], tmp_path), config) as asking:
        video = asking.upload(lab_video).json()
        id = asking.ask(video["id"], asked.question, frame_budget=64)
        episode = list(asking.events(id))[-1][2]["episode"]
    assert episode["answer"] == asked.answer
    assert len(episode["crops"]) == 3
    assert all(frame["picture"] for crop in episode["crops"] for frame in crop["frames"])
