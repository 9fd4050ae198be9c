"""Many questions at once: none is lost, each hears where it is, and what is kept has a bound."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ask_server import Asking, Choosing
from conftest import CASES

from paravt.models import QwenVL
from paravt.serve.asks import Ask, Asks, Ending, QueueFull
from paravt.serve.videos import Library
from paravt.types import Episode

ASKS = 50


async def follow(client: httpx2.AsyncClient, video: str, number: int) -> list[dict[str, Any]]:
    """Ask and hear all of it, as a page does."""
    body = {"video": video, "question": f"slow {number}", "frame_budget": 2}
    answer = await client.post("/v1/ask", json=body)
    assert answer.status_code == 202
    events: list[dict[str, Any]] = []
    async with client.stream("GET", f"/v1/ask/{answer.json()['id']}/events") as stream:
        name = ""
        async for line in stream.aiter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                events.append({"event": name, **json.loads(value)})
    return events


async def test_fifty_at_once(tiny: QwenVL, tmp_path: Path) -> None:
    engine = Choosing(tiny)
    with Asking(engine, Library([CASES / "video"], tmp_path), concurrency=2, keep=ASKS) as asking:
        limits = httpx2.Limits(max_connections=ASKS)
        async with httpx2.AsyncClient(base_url=asking.url, timeout=300, limits=limits) as client:
            videos = {video["name"]: video["id"] for video in (await client.get("/v1/videos")).json()}
            heard = await asyncio.gather(*(follow(client, videos["longgop.mp4"], n) for n in range(ASKS)))

        assert [events[-1]["event"] for events in heard] == ["done"] * ASKS
        questions = {events[-1]["episode"]["question"] for events in heard}
        assert questions == {f"slow {n}" for n in range(ASKS)}  # each got its own answer
        waited = []
        for events in heard:
            places = [event["position"] for event in events if event["event"] == "queued"]
            assert places == sorted(places, reverse=True)
            assert len(places) == len(set(places))
            waited.append(places[0] if places else 0)
        assert max(waited) > ASKS // 2  # they did wait
        assert sum(len(events) for events in heard) > ASKS * 5  # and heard of it
        assert engine.most_running == 2

        listed = asking.client.get("/v1/asks").json()
        assert len(listed) == ASKS
        assert {ask["answer"] for ask in listed} == {"a cat at 15 seconds"}


async def test_what_is_kept_has_a_bound(tiny: QwenVL, tmp_path: Path) -> None:
    with Asking(Choosing(tiny), Library([CASES / "video"], tmp_path), keep=5) as asking:
        async with httpx2.AsyncClient(base_url=asking.url, timeout=300) as client:
            videos = {video["name"]: video["id"] for video in (await client.get("/v1/videos")).json()}
            body = {"video": videos["longgop.mp4"], "question": "slow, kept?", "frame_budget": 2}
            asked = [client.post("/v1/ask", params={"wait": "true"}, json=body) for _ in range(20)]
            assert [answer.json()["state"] for answer in await asyncio.gather(*asked)] == ["done"] * 20
        assert len(asking.client.get("/v1/asks").json()) == 5
        asking.stop()
        gc.collect()
        alive = gc.get_objects()
        asks = [thing for thing in alive if type(thing) is Ask and thing.request.request.question == "slow, kept?"]
        assert len(asks) == 5
        assert not any(type(thing) is Episode for thing in alive)  # their frames would add up


def queue(**options: Any) -> tuple[Asks[str], dict[str, asyncio.Future[str]]]:
    """A queue whose asks end when they are told to."""
    ends: dict[str, asyncio.Future[str]] = {}

    async def play(ask: Ask[str]) -> Ending:
        ends[ask.request] = asyncio.get_running_loop().create_future()
        text = await ends[ask.request]
        return Ending("done", {"episode": text}, answer=text)

    return Asks(play, **{"concurrency": 1, "max_queue": 2, "keep": 3, "keep_size": 1000, **options}), ends


async def test_old_ones_go_by_number_and_by_size() -> None:
    asks, ends = queue()

    async def run(name: str, text: str) -> None:
        ask = asks.submit(name)
        while name not in ends:
            await asyncio.sleep(0)
        ends[name].set_result(text)
        await ask.wait()

    def known() -> list[str]:
        return [ask.request for ask in asks.newest()]

    for name in "abcd":
        await run(name, "x")
    assert known() == ["d", "c", "b"]
    await run("e", "x" * 900)
    assert known() == ["e", "d", "c"]
    await run("f", "x" * 900)
    assert known() == ["f"]
    await run("g", "x" * 5000)
    assert known() == ["g"]  # the last one is kept, however large


async def test_a_full_queue_and_the_end_of_one() -> None:
    asks, ends = queue()
    first, second, third = (asks.submit(name) for name in "abc")
    assert (first.state, second.position, third.position) == ("running", 1, 2)
    with pytest.raises(QueueFull, match=r"the queue is full \(2 questions wait\); try again in 15 seconds") as full:
        asks.submit("d")
    assert full.value.retry_after == 15
    await asyncio.sleep(0)
    ends["a"].set_result("one")
    await first.wait()
    assert (first.state, first.answer, second.state, third.position) == ("done", "one", "running", 1)
    await asks.close()
    assert [ask.state for ask in (first, second, third)] == ["done", "cancelled", "cancelled"]
    with pytest.raises(QueueFull):
        asks.submit("e")


async def test_a_bug_costs_its_ask_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    asks, ends = queue()
    first, second = asks.submit("a"), asks.submit("b")
    await asyncio.sleep(0)
    ends["a"].set_exception(KeyError("a bug"))
    await first.wait()
    assert (first.state, first.message) == ("failed", "internal error; the server's log has the rest")
    assert "KeyError: 'a bug'" in caplog.text
    await asyncio.sleep(0)
    ends["b"].set_result("two")
    await second.wait()
    assert second.answer == "two"
