"""The groups of each step, sampled with the learner's weights or with ones that are at most k versions older.

With k = 0 (on-policy) a step's prompts are drawn, played, and waited for. With k > 0 the prompts of k further steps
are being played meanwhile and go on while the learner works; a step takes the groups that are done first, so that
a long episode does not hold up the others. One that took too long is dropped: its group is older than k versions.

Every process draws the same prompts and plays its share, one in turn, so what a run has used does not depend on their
number. All of them know all groups that were handed over, so that frame budgets are weighted alike in each.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from paravt.algo import pass_rate_weights
from paravt.config import RLRecipe
from paravt.data import Cursor, Draw, SampleStream
from paravt.metrics import budget_accuracies
from paravt.ranks import Ranks
from paravt.rollout import Group, Rollout


@dataclass
class Batch:
    """The groups of a step."""

    mine: list[Group] = field(default_factory=list)
    """Of this process: what it learns from."""
    everyone: list[Group] = field(default_factory=list)
    """Of all processes, in the order of their prompts; without pixels if there are several processes."""
    stale: int = 0
    """Groups of all processes that were dropped."""


class Sampler:
    def __init__(self, rollout: Rollout, stream: SampleStream, recipe: RLRecipe, ranks: Ranks) -> None:
        self._rollout, self._stream, self._ranks = rollout, stream, ranks
        self._recipe, self._steps = recipe.rollout, recipe.steps
        self._weighted = recipe.frame_budgets if recipe.budget_weights == "pass_rate" else None
        self.accuracies: dict[int, float] = {}
        """By frame budget, of the last step that had it: what a run that is continued has to know."""
        # Of all processes, and the same in each: prompts drawn, and groups handed over. A prompt's number says whose it
        # is, and so does that of a group among those handed over; nobody is asked for more than it was given.
        self._drawn = self._handed = 0
        self._running: dict[int, tuple[Draw, asyncio.Task[Group]]] = {}  # by number

    async def batch(self, version: int) -> Batch:
        """The groups of the step that makes `version` + 1.

        With refills, groups without a signal are replaced by those of new prompts, but stay in the batch themselves:
        their anchor marks still teach.
        """
        batch = Batch()
        for _ in range(1 + self._recipe.max_refills):
            wanted = self._recipe.prompts - sum(group.informative for group in batch.everyone)
            if wanted <= 0:
                break
            await self._add(batch, wanted, version)
        found = budget_accuracies(batch.everyone)
        self.accuracies |= {budget: value for budget, value in found.items() if math.isfinite(value)}
        return batch

    async def cursor(self) -> Cursor:
        """Where a run that is continued from here has to draw from: groups that are not handed over are played anew."""
        mine = [(number, draw) for number, (draw, _) in self._running.items()]
        pending = sorted((pair for part in await self._ranks.gather(mine) for pair in part), key=lambda pair: pair[0])
        return self._stream.cursor_without([draw for _, draw in pending])

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _add(self, batch: Batch, wanted: int, version: int) -> None:
        full = len(batch.everyone) + wanted
        while len(batch.everyone) < full:
            missing = full - len(batch.everyone)
            self._start(missing, version)
            found = await self._finished(missing)
            several = self._ranks.size > 1
            told = await self._ranks.gather([group.without_pixels() if several else group for group in found])
            everyone = sorted((group for part in told for group in part), key=lambda group: group.number)
            fresh = [group for group in everyone if group.staleness(version) <= self._recipe.max_staleness]
            numbers = {group.number for group in fresh}
            batch.mine += [group for group in found if group.number in numbers]
            batch.everyone += fresh
            batch.stale += len(everyone) - len(fresh)

    def _start(self, missing: int, version: int) -> None:
        """Keep what is missing and the prompts of the steps ahead in play."""
        weights = pass_rate_weights([self.accuracies.get(k) for k in self._weighted]) if self._weighted else None
        ahead = self._recipe.prompts * min(self._recipe.max_staleness, self._steps - version - 1)
        for draw in self._stream.take(missing + ahead - (self._drawn - self._handed)):
            if self._drawn % self._ranks.size == self._ranks.rank:
                play = self._rollout.group(draw, version + 1, self._drawn, weights)
                self._running[self._drawn] = (draw, asyncio.create_task(play))
            self._drawn += 1

    async def _finished(self, missing: int) -> list[Group]:
        """This process's share of the next groups: the first ones to be done, in the order of their numbers."""
        turns = range(self._handed, self._handed + missing)
        share = sum(turn % self._ranks.size == self._ranks.rank for turn in turns)
        self._handed += missing
        while len(done := [number for number, (_, task) in self._running.items() if task.done()]) < share:
            waiting = [task for _, task in self._running.values() if not task.done()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return [self._running.pop(number)[1].result() for number in done[:share]]
