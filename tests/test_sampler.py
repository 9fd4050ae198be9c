"""Sampling ahead: how old what a step learns from can be, and which prompts a run has used.

Locked here: groups stay whole and come in the order in which they are done; what is older than k versions is dropped,
counted and replaced; k = 0 plays nothing ahead; several processes use the prompts of one, each its share; a saved
cursor has every prompt of a group that was not handed over, once; weights of frame budgets follow from the groups of
earlier steps, alike in every process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paravt.config import RLRecipe
from paravt.data import Cursor, Draw, SampleStream
from paravt.ranks import Ranks
from paravt.rollout import Group
from paravt.sampler import Batch, Sampler
from paravt.types import Episode, Sample, Score, Segment, Trace

SAMPLES = [Sample(str(i), "v", "q") for i in range(10)]


def episode(sample: Sample, version: int, reward: float) -> Episode:
    segment = Segment((1,), True, "a", (0.0,), policy_version=version)
    return Episode(
        sample, 4, "parallel", Trace("main", "main", (segment,)), (), (), "a",
        rewards={"total": Score(reward), "accuracy": Score(reward)},
    )  # fmt: skip


class Played:
    """In the place of `Rollout`: groups end when they are told to."""

    def __init__(self, equal: frozenset[str] = frozenset()) -> None:
        self.version, self.equal = 0, equal
        self.started: list[Draw] = []
        self.weights: list[Sequence[float] | None] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.slow: set[str] = set()

    async def group(self, draw: Draw, step: int, number: int, budget_weights: Sequence[float] | None = None) -> Group:
        self.started.append(draw)
        self.weights.append(budget_weights)
        version = self.version
        name = draw.sample.id
        if name in self.slow:
            await self.ends.setdefault(name, asyncio.Event()).wait()
        rewards = (0.0, 0.0) if name in self.equal else (0.0, 1.0)
        return Group(f"{step}/{name}", number, tuple(episode(draw.sample, version, reward) for reward in rewards))


def recipe(prompts: int, k: int, refills: int = 0, steps: int = 100) -> RLRecipe:
    return RLRecipe.model_validate(
        {
            "gating": True,
            "frame_budgets": [4, 8],
            "budget_weights": "pass_rate",
            "model": {"kind": "pretrained", "path": "unused"},
            "steps": steps,
            "rollout": {"prompts": prompts, "group_size": 2, "max_staleness": k, "max_refills": refills},
        }
    )


def make(played: Played, *args: int, ranks: Ranks | None = None, cursor: Cursor | None = None) -> Sampler:
    stream = SampleStream(SAMPLES, 0, cursor)
    return Sampler(played, stream, recipe(*args), ranks or Ranks())  # type: ignore[arg-type]


def ids(groups: list[Group]) -> list[str]:
    return [group.id.split("/")[1] for group in groups]


ORDER = [draw.sample.id for draw in SampleStream(SAMPLES, 0).take(10)]


async def test_on_policy_plays_nothing_ahead_and_keeps_the_order() -> None:
    played = Played()
    played.slow = {ORDER[0]}  # the first to start is the last to end
    sampler = make(played, 3, 0)
    asyncio.get_running_loop().call_later(0.05, lambda: played.ends[ORDER[0]].set())
    batch = await sampler.batch(0)
    assert ids(batch.mine) == ids(batch.everyone) == ORDER[:3]
    assert len(played.started) == 3
    assert await sampler.cursor() == Cursor(0, 3)


async def test_steps_ahead_are_played_but_none_beyond_the_last() -> None:
    played = Played()
    sampler = make(played, 2, 2, 0, 4)
    started = []
    for version in range(4):
        played.version = version
        batch = await sampler.batch(version)
        assert max(group.staleness(version) for group in batch.everyone) <= 2
        await asyncio.sleep(0)
        started.append(len(played.started))
    assert started == [6, 8, 8, 8]
    await sampler.close()


async def test_the_first_to_be_done_are_learned_from_and_the_oldest_dropped() -> None:
    played = Played()
    played.slow = {ORDER[0], ORDER[1]}
    sampler = make(played, 2, 1)
    assert ids((await sampler.batch(0)).everyone) == ORDER[2:4]  # the slow ones do not hold them up
    played.version = 1
    assert ids((await sampler.batch(1)).everyone) == ORDER[4:6]
    played.ends[ORDER[1]].set()  # played by version 0, learned from by version 2: too old
    played.version = 2
    await asyncio.sleep(0.01)
    batch = await sampler.batch(2)
    assert batch.stale == 1
    assert ids(batch.everyone) == ORDER[6:8], "another prompt takes its place"
    assert all(len(group.episodes) == 2 for group in batch.everyone), "groups are whole"
    # what was drawn and not handed over is put back: the one that still runs, and what runs ahead; not the dropped one
    cursor = await sampler.cursor()
    again = [draw.sample.id for draw in SampleStream(SAMPLES, 0, cursor).take(3)]
    assert again[0] == ORDER[0]
    used = {*ORDER[1:8]}
    assert not used & set(again)
    await sampler.close()


async def test_a_group_of_several_versions_is_as_old_as_its_oldest_token() -> None:
    young, old = (episode(SAMPLES[0], version, 0.0) for version in (5, 3))
    assert Group("g", 0, (young, old)).staleness(6) == 3
    crops = replace(young.main, segments=(*young.main.segments, *old.main.segments))
    assert Group("g", 0, (replace(young, main=crops), young)).staleness(6) == 3


async def test_refills_replace_groups_without_a_signal_which_stay() -> None:
    played = Played(frozenset(ORDER[:1]))
    batch = await make(played, 2, 0, 3).batch(0)
    assert ids(batch.everyone) == ORDER[:3]
    every = Played(frozenset(ORDER))
    assert len((await make(every, 2, 0, 3).batch(0)).everyone) == 2 * 4, "no end without a limit"


class Together(Ranks):
    """Several processes in one event loop."""

    def __init__(self, rank: int, board: dict[int, list[Any]], size: int) -> None:
        super().__init__()
        self.rank, self.size, self._board, self._calls = rank, size, board, 0

    async def gather(self, value: Any) -> list[Any]:
        self._calls += 1
        told = self._board.setdefault(self._calls, [None] * self.size)
        told[self.rank] = (value,)
        while None in told:
            await asyncio.sleep(0)
        return [value for (value,) in told]


@pytest.mark.parametrize("k", [0, 1])
async def test_two_processes_use_the_prompts_of_one(k: int) -> None:
    board: dict[int, list[Any]] = {}
    played = [Played(frozenset(ORDER[1:3])) for _ in range(3)]
    samplers = [make(played[r], 3, k, 1, 3, ranks=Together(r, board, 2)) for r in range(2)]
    alone = make(played[2], 3, k, 1, 3)
    seen: list[str] = []
    for version in range(2):
        for each in played:
            each.version = version
        both: list[Batch] = await asyncio.gather(*(sampler.batch(version) for sampler in samplers))
        expected = await alone.batch(version)
        assert ids(both[0].everyone) == ids(both[1].everyone) == ids(expected.everyone)
        assert sorted(ids(both[0].mine) + ids(both[1].mine)) == sorted(ids(both[0].everyone))
        assert both[0].mine
        assert both[1].mine
        seen += ids(both[0].everyone)
        assert samplers[0].accuracies == samplers[1].accuracies == alone.accuracies
    assert len(set(seen)) == len(seen)
    cursors = await asyncio.gather(*(sampler.cursor() for sampler in samplers))
    assert cursors[0] == cursors[1] == await alone.cursor()
    assert len(cursors[0].put_back) == (3 * k)
    for sampler in (*samplers, alone):
        await sampler.close()


async def test_a_group_that_fails_ends_the_step() -> None:
    class Broken(Played):
        async def group(self, draw: Draw, step: int, number: int, budget_weights: object = None) -> Group:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await make(Broken(), 2, 1).batch(0)


async def test_weights_by_pass_rate_are_those_of_the_steps_before() -> None:
    played = Played(frozenset(ORDER[:2]))  # wrong in the first step, right half of the time then
    sampler = make(played, 2, 0)
    unseen, never, half = [0.25, 0.25], [0.05, 0.25], [0.25, 0.25]
    await sampler.batch(0)
    assert sampler.accuracies == {4: 0.0}
    played.version = 1
    await sampler.batch(1)
    assert sampler.accuracies == {4: 0.5}
    played.version = 2
    await sampler.batch(2)
    assert played.weights == [unseen] * 2 + [never] * 2 + [half] * 2


async def test_what_is_played_ahead_has_the_weights_known_when_it_was_drawn() -> None:
    played = Played(frozenset(ORDER[:2]))
    sampler = make(played, 2, 1)
    await sampler.batch(0)
    await asyncio.sleep(0)
    assert played.weights == [[0.25, 0.25]] * 4, "nothing is known of what is played meanwhile"
    played.version = 1
    await sampler.batch(1)
    await asyncio.sleep(0)
    assert played.weights[4:] == [[0.05, 0.25]] * 2
    await sampler.close()


async def test_refills_have_the_weights_of_their_step() -> None:
    played = Played(frozenset(ORDER[:2]))
    sampler = make(played, 2, 0, 1)
    await sampler.batch(0)
    assert played.weights == [[0.25, 0.25]] * 4
    assert sampler.accuracies == {4: 0.25}
