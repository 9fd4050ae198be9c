"""The composition of a batch follows from the results of those before: no delay and no order of arrival changes it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from conftest import LONG

from paravt.agent import EpisodeConfig
from paravt.chat import text_message
from paravt.data import Draw
from paravt.engines import lockstep
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.engines.lockstep import LockstepEngine
from paravt.engines.scripted import ScriptedEngine
from paravt.errors import EngineError
from paravt.models import QwenVL
from paravt.rewards import RewardConfig
from paravt.rollout import Rollout, RolloutConfig
from paravt.turns import render_call
from paravt.types import Sample, Score
from paravt.video import FrameReader, Frames, VideoInfo

Calls = Sequence[tuple[Prompt, Sampling, int]]


class Recorder:
    """In the place of a local engine: keeps the batches, and answers by a script, each call at its own time."""

    def __init__(self, tiny: QwenVL, script: Callable[[Prompt], str], delay: Callable[[], float]) -> None:
        self.chat = tiny.chat
        self.batches: list[list[tuple[str, int]]] = []
        self.results: list[asyncio.Future[list[Completion]]] = []
        self.running = 0
        self.closed = False
        self._scripted, self._delay = ScriptedEngine(tiny.chat, script), delay

    def submit(self, calls: Calls) -> list[asyncio.Future[list[Completion]]]:
        if self.closed:
            raise EngineError("the local engine is closed")
        assert self.running == 0, "two batches at a time"
        self.batches.append([(prompt.trace, sampling.seed) for prompt, sampling, _ in calls])
        self.running = len(calls)
        self.results = [asyncio.ensure_future(self._answer(*call)) for call in calls]
        return self.results

    async def _answer(self, prompt: Prompt, sampling: Sampling, n: int) -> list[Completion]:
        try:
            await asyncio.sleep(self._delay())
            return await self._scripted.generate(prompt, sampling, n)
        finally:
            self.running -= 1

    async def close(self) -> None:
        self.closed = True
        for result in self.results:
            result.cancel()


class Slow(FrameReader):
    def __init__(self, delay: Callable[[], float]) -> None:
        super().__init__()
        self._delay = delay

    async def ainfo(self, path: Any) -> VideoInfo:
        await asyncio.sleep(self._delay())
        return await super().ainfo(path)

    async def aread(self, path: Any, times: Any, size: Any = None) -> Frames:
        await asyncio.sleep(self._delay())
        return await super().aread(path, times, size)

    async def aread_many(self, path: Any, windows_of_times: Any, size: Any = None) -> list[Frames]:
        await asyncio.sleep(self._delay())
        return await super().aread_many(path, windows_of_times, size)


class SlowJudge:
    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay

    async def score(self, sample: Sample, answer: str | None) -> Score:
        await asyncio.sleep(self._delay())
        return Score(1.0, answer)


def script(prompt: Prompt) -> str:
    """Question number i asks for i calls (too many to run at once), once or twice; number 0 answers at once."""
    if prompt.trace != "main":
        return "a cat"
    text = "".join(message.text for message in prompt.messages)
    number = int(text.split("case-")[1][0])
    turns = sum(message.role == "assistant" for message in prompt.messages)
    if number and turns < 1 + number % 2:
        calls = [render_call("crop_video", {"start_time": 9 * i, "end_time": 9 * i + 5}) for i in range(number)]
        return "<think>\nlook\n</think>\n" + "\n".join(calls)
    return "<think>\nseen\n</think>\n<answer>a cat</answer>"


async def run(tiny: QwenVL, delay: Callable[[], float]) -> tuple[list[Any], list[Any]]:
    inner = Recorder(tiny, script, delay)
    engine = LockstepEngine(inner, Slow(delay))  # type: ignore[arg-type]
    episode = EpisodeConfig(frame_budget=2, crop_max_frames=1, max_parallel=2, call_timeout=None)
    config = RolloutConfig(3, episode, RewardConfig(), run_seed=1, max_concurrent=5)
    draws = [Draw(Sample(f"s{i}", LONG, f"case-{i}", answer="a cat"), 0, i) for i in range(4)]
    rollout = Rollout(engine, engine.reader, config, SlowJudge(delay), engine.episode)  # type: ignore[arg-type]
    groups = await asyncio.gather(*(rollout.group(draw, 1, draw.index) for draw in draws))
    episodes = [episode for group in groups for episode in group.episodes]
    assert all(episode.scored for episode in episodes)
    assert [episode.tool_calls for episode in episodes] == [0] * 3 + [2] * 3 + [2] * 3 + [6] * 3
    return inner.batches, [episode.main.ids for episode in episodes]


async def test_no_delay_changes_a_batch(tiny: QwenVL, monkeypatch: pytest.MonkeyPatch) -> None:
    # what needs no more than the event loop takes at most a fifth of the turns that are waited for
    monkeypatch.setattr(lockstep, "_QUIET_TURNS", lockstep._QUIET_TURNS // 5)
    rng = random.Random(0)
    expected = await asyncio.wait_for(run(tiny, lambda: 0.0), 60)
    assert max(map(len, expected[0])) >= 5  # more than one episode's calls go out together
    for most in (0.001, 0.01, 0.03):
        assert await asyncio.wait_for(run(tiny, lambda most=most: rng.random() * most), 60) == expected  # type: ignore[misc]


def prompt(tiny: QwenVL, text: str = "what?") -> Prompt:
    return Prompt(tiny.chat.open([text_message("user", text)]).ids, (), (text_message("user", text),))


async def test_numbers_are_the_same_in_every_order_of_arrival(tiny: QwenVL) -> None:
    async def one(engine: LockstepEngine, i: int, delay: float) -> list[Any]:
        with engine.episode():
            done = []
            for turn in range(3):
                await asyncio.sleep(delay)
                asked = prompt(tiny, f"{'what ' * (i + turn)}?")
                (completion,) = await engine.generate(asked, Sampling(2 + 3 * i, 1.0, seed=10 * i + turn))
                done.append((completion.ids, completion.logprobs))
            return done

    async def all_of_them(delays: Sequence[float]) -> list[Any]:
        engine = LockstepEngine(LocalEngine(tiny), FrameReader())
        order = sorted(range(5), key=lambda i: delays[i])
        done = await asyncio.gather(*(one(engine, i, delays[i]) for i in order))
        await engine.close()
        return [done[order.index(i)] for i in range(5)]

    rng = random.Random(1)
    expected = await asyncio.wait_for(all_of_them([0.0] * 5), 60)
    for _ in range(3):
        assert await asyncio.wait_for(all_of_them([rng.random() / 20 for _ in range(5)]), 60) == expected


def fixed(text: str = "yes") -> Callable[[Prompt], str]:
    return lambda prompt: text


async def test_a_call_during_a_batch_is_in_the_next(tiny: QwenVL) -> None:
    inner = Recorder(tiny, fixed(), lambda: 0.1)
    engine = LockstepEngine(inner, FrameReader())  # type: ignore[arg-type]
    first = asyncio.create_task(engine.generate(prompt(tiny), Sampling(seed=1)))
    while not inner.running:
        await asyncio.sleep(0)
    second = asyncio.create_task(engine.generate(prompt(tiny), Sampling(seed=2)))
    for call in (first, second):
        assert (await asyncio.wait_for(call, 10))[0].text.startswith("yes")
    third = await asyncio.wait_for(engine.generate(prompt(tiny), Sampling(seed=3)), 10)
    assert len(third) == 1
    assert inner.batches == [[("main", 1)], [("main", 2)], [("main", 3)]]


async def test_an_episode_that_is_busy_is_waited_for(tiny: QwenVL) -> None:
    inner = Recorder(tiny, fixed(), lambda: 0.0)
    engine = LockstepEngine(inner, FrameReader())  # type: ignore[arg-type]

    async def episode(seed: int, seconds: float) -> None:
        with engine.episode():
            await asyncio.to_thread(time.sleep, seconds)  # nothing that anybody counts
            await asyncio.gather(*(engine.generate(prompt(tiny), Sampling(seed=seed + i)) for i in range(2)))

    await asyncio.wait_for(asyncio.gather(episode(1, 0.0), episode(3, 0.2)), 10)
    assert inner.batches == [[("main", seed) for seed in (1, 2, 3, 4)]]


@pytest.mark.parametrize("reads", [False, True])
async def test_sub_agents_that_read_or_need_a_few_turns_more_are_waited_for(tiny: QwenVL, reads: bool) -> None:
    inner = Recorder(tiny, fixed(), lambda: 0.0)
    engine = LockstepEngine(inner, Slow(lambda: 0.05))  # type: ignore[arg-type]

    async def sub_agent(seed: int) -> None:
        if reads and seed == 0:
            await engine.reader.aread(LONG, [1.0])
        for _ in range(seed):
            await asyncio.sleep(0)
        await engine.generate(prompt(tiny), Sampling(seed=seed))

    with engine.episode():
        await asyncio.wait_for(asyncio.gather(*(sub_agent(seed) for seed in range(10))), 10)
    assert inner.batches == [[("main", seed) for seed in range(10)]]


async def test_failures_reach_their_callers_and_no_others(tiny: QwenVL) -> None:
    engine = LockstepEngine(LocalEngine(tiny), FrameReader())
    good, bad = prompt(tiny), replace(prompt(tiny), ids=(10**9,))
    calls = [engine.generate(asked, Sampling(2, seed=i)) for i, asked in enumerate((good, bad, good))]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    assert isinstance(results[1], EngineError)
    assert [len(result) for result in (results[0], results[2]) if isinstance(result, list)] == [1, 1]
    with pytest.raises(ValueError, match="n must be at least 1"):
        await engine.generate(good, Sampling(), 0)
    assert len(await asyncio.wait_for(engine.generate(good, Sampling(2)), 20)) == 1
    await engine.close()


async def test_a_cancelled_call_is_not_sent_and_a_running_one_is_given_up(tiny: QwenVL) -> None:
    inner = Recorder(tiny, fixed(), lambda: 0.05)
    engine = LockstepEngine(inner, FrameReader())  # type: ignore[arg-type]
    calls = [asyncio.create_task(engine.generate(prompt(tiny), Sampling(seed=i))) for i in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    while not inner.running:
        await asyncio.sleep(0)
    calls[2].cancel()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert inner.batches == [[("main", 0), ("main", 2)]]
    assert [type(result) for result in results] == [list, asyncio.CancelledError, asyncio.CancelledError]
    assert inner.results[1].cancelled()
    alone = asyncio.create_task(engine.generate(prompt(tiny), Sampling(seed=3)))
    await asyncio.sleep(0)
    alone.cancel()  # nothing is left to send
    await asyncio.wait_for(engine.generate(prompt(tiny), Sampling(seed=4)), 10)
    assert inner.batches[1:] == [[("main", 4)]]


@pytest.mark.parametrize("turns", range(8))
async def test_a_call_cancelled_in_any_turn_before_it_is_sent(
    tiny: QwenVL, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(lockstep, "_QUIET_TURNS", 5)
    inner = Recorder(tiny, fixed(), lambda: 0.0)
    engine = LockstepEngine(inner, FrameReader())  # type: ignore[arg-type]
    calls = [asyncio.create_task(engine.generate(prompt(tiny), Sampling(seed=i))) for i in range(2)]
    for _ in range(turns):
        await asyncio.sleep(0)
    sent = bool(inner.batches)
    calls[1].cancel()
    await asyncio.wait_for(asyncio.wait(calls), 10)
    assert inner.batches == [[("main", 0), ("main", 1)] if sent else [("main", 0)]]


async def test_a_closed_engine_answers_with_an_error(tiny: QwenVL) -> None:
    inner = LocalEngine(tiny)
    engine = LockstepEngine(inner, FrameReader())
    await inner.close()  # or its worker died
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(engine.generate(prompt(tiny), Sampling()), 10)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(engine.generate(prompt(tiny), Sampling()), 10)


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.3])
async def test_closing_fails_what_waits_and_what_runs(
    tiny: QwenVL, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    monkeypatch.setattr(tiny.chat, "stop_ids", frozenset())  # nothing ends by itself, however fast the machine is
    engine = LockstepEngine(LocalEngine(tiny), FrameReader())
    calls = [asyncio.create_task(engine.generate(prompt(tiny), Sampling(10_000, 1.0, seed=i), 8)) for i in range(4)]
    await asyncio.sleep(pause)
    await asyncio.wait_for(engine.close(), 20)
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    assert all(isinstance(result, EngineError) for result in results)


def test_several_event_loops(tiny: QwenVL) -> None:
    inner = LocalEngine(tiny)
    engine = LockstepEngine(inner, FrameReader())

    async def leave() -> None:  # with a call that was never sent
        task = asyncio.create_task(engine.generate(prompt(tiny), Sampling()))
        await asyncio.sleep(0)
        task.cancel()

    for _ in range(2):
        asyncio.run(leave())
        assert len(asyncio.run(asyncio.wait_for(engine.generate(prompt(tiny), Sampling(2)), 10))) == 1
    asyncio.run(engine.close())
