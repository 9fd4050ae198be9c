"""Asking over HTTP: a real server, real videos, a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ask_server import ANSWER, WINDOWS, Asking, Choosing
from conftest import CASES

from paravt.models import QwenVL
from paravt.serve.messages import AskState
from paravt.serve.videos import Library

VIDEOS = CASES / "video"


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
    assert (
        str(VIDEOS) not in asking.client.get(f"/v1/ask/{id}").text
    )  # of this machine

    state = asking.state(id)
    AskState.model_validate(state)  # what the API's description promises
    assert [event["event"] for event in state["events"]] == names
    assert state["events"][-1] == {"event": "done", **by_name["done"]}
    assert (state["state"], state["answer"], state["message"]) == ("done", "a cat at 15 seconds", None)
    assert state["position"] is None
    assert state["seconds"] > 0
