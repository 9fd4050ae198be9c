"""The trace factory: a teacher plays questions, and what it did well becomes rows to learn from.

    attempts.jsonl   every attempt: what became of it and why, what it cost, and its row if it is a good one
    traces.jsonl     the rows: of main agents
    reports.jsonl    the rows of the sub-agents of these
    summary.json     how many attempts got how far, and what they cost

An attempt is kept if the answer is right, all turns are strict, and what is made of it still is: calls of a sequential
teacher that did not depend on each other are one turn (`paravt.data.merging`), and windows that came back as frames
have been watched by a sub-agent, whose report stands in their place. All files but the first follow from it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paravt.agent import EpisodeConfig, run_episode
from paravt.crops import CropRunner
from paravt.data.attempts import Attempt, Cost, write_rows
from paravt.data.cold_start import report_row, trace_key, trace_row
from paravt.data.difficulty import fingerprint
from paravt.data.journal import Journal
from paravt.data.merging import Look, Step, merge_steps, render_step
from paravt.engines.base import Engine, stable_seed
from paravt.errors import DataError
from paravt.judge import Judge
from paravt.protocol import PARAVT, Scene
from paravt.provenance import claim_run, provenance
from paravt.rewards import accuracy, format_strict
from paravt.turns import parse_turn
from paravt.types import Crop, Episode, Sample, Score, Trace, Turn
from paravt.video import FrameSource, frame_size

FILES = ("attempts.jsonl", "traces.jsonl", "reports.jsonl", "summary.json")
_END = "<|im_end|>"
_PATIENCE = 16
"""Attempts that all fail, after which a run ends."""


class Teacher(Protocol):
    """Who plays. `EngineTeacher` is any engine; the lab has one that knows the answers."""

    identity: dict[str, Any]
    """Goes into every row."""

    def engine(self, sample: Sample, config: EpisodeConfig) -> Engine:
        """What plays one episode."""

    async def close(self) -> None: ...


class EngineTeacher:
    """Engines with one model, which share the episodes."""

    def __init__(self, identity: dict[str, Any], engines: Sequence[Engine]) -> None:
        self.identity, self._engines = identity, engines

    def engine(self, sample: Sample, config: EpisodeConfig) -> Engine:
        return self._engines[stable_seed(sample.id, config.seed) % len(self._engines)]

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


@dataclass(frozen=True)
class FactoryConfig:
    episode: EpisodeConfig
    """Its seed is the run's. `dispatch` and `evidence` are the teacher's; rows are always parallel, with reports."""
    attempts: int = 1
    """At most, of a question."""
    keep: int = 1
    """Different good traces of a question, after which it is left."""
    min_accuracy: float = 0.5
    """Of a right answer: open answers and windows are graded between 0 and 1."""
    skew: float = 3.0
    """See `paravt.data.cold_start.balance`."""
    count: int | None = None
    """Rows at most; None: all."""
    concurrency: int = 8


async def run_factory(
    samples: Sequence[Sample],
    teacher: Teacher,
    reader: FrameSource,
    config: FactoryConfig,
    out: Path,
    judge: Judge | None = None,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
) -> dict[str, Any]:
    """Play all questions, write the files; returns the summary. The same call goes on where it was stopped.

    Raises RecipeError if `out` holds a run of another teacher or configuration, DataError if nothing was good.
    """
    for sample in samples:
        if not (sample.answer or "").strip():
            raise DataError(f"sample {sample.id}: no answer; the factory keeps what ends in the right one")
    made = {"teacher": teacher.identity, "episode": asdict(config.episode), "attempts": config.attempts,
            "keep": config.keep, "min_accuracy": config.min_accuracy,
            "judge": None if judge is None else judge.model}  # fmt: skip
    if not (out / "recipe.json").exists() and (others := [out / name for name in FILES if (out / name).exists()]):
        raise DataError(f"{others[0]}: is there already, and no run of this made it; choose another --out")
    with claim_run(out, json.dumps(made, indent=1)), Journal(out / "attempts.jsonl") as journal:
        factory = _Factory(teacher, reader, config, judge, journal, on_attempt)
        await factory.play(samples)
        attempts = [attempt for sample in samples for attempt in factory.of(sample)]
        return write_rows(out, attempts, dict(factory.spent), config.skew, config.count, config.episode.seed)


class _Factory:
    def __init__(
        self,
        teacher: Teacher,
        reader: FrameSource,
        config: FactoryConfig,
        judge: Judge | None,
        journal: Journal,
        on_attempt: Callable[[Attempt], None],
    ) -> None:
        self.teacher, self.reader, self.config, self.judge = teacher, reader, config, judge
        self.journal, self.on_attempt = journal, on_attempt
        self.made_by = {name: value for name, value in provenance().items() if name in ("paravt", "git")}
        self.spent: Counter[str] = Counter()
        """Of all attempts, also of those that failed and were played again."""
        self.done: dict[tuple[str, str, int], Attempt] = {}
        for number, row in enumerate(journal.rows, 1):
            try:
                attempt = Attempt(**{**row, "reports": tuple(row["reports"])})
                self.spent.update(attempt.cost)
            except (KeyError, TypeError, ValueError) as error:
                said = f"no attempt of this version of `paravt data traces` ({type(error).__name__}: {error})"
                raise DataError(f"{journal.path}:{number}: {said}; choose another --out") from error
            self.done[attempt.id, attempt.sample, attempt.attempt] = attempt
        self.alive, self.failures = False, 0
        self.slots = asyncio.Semaphore(config.concurrency)

    def of(self, sample: Sample) -> list[Attempt]:
        keys = ((sample.id, fingerprint(sample), number) for number in range(self.config.attempts))
        return [self.done[key] for key in keys if key in self.done]

    async def play(self, samples: Sequence[Sample]) -> None:
        tasks = [asyncio.ensure_future(self.question(sample)) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def question(self, sample: Sample) -> None:
        good: set[str] = set()
        for number in range(self.config.attempts):
            key = (sample.id, fingerprint(sample), number)
            known = self.done.get(key)
            if known is None or not known.final:
                async with self.slots:
                    known = await self.attempt(sample, number)
                self.done[key] = known
                self.spent.update(known.cost)
                self.journal.add(asdict(known))
                self.check_alive(known)
                self.on_attempt(known)
            if known.outcome == "good":
                good.add(known.key)
            if len(good) >= self.config.keep:
                return

    def check_alive(self, played: Attempt) -> None:
        """Raises DataError if nothing but failures has come of this run so far: the engine or the videos are gone."""
        self.alive = self.alive or played.outcome != "failed"
        self.failures += 1
        if not self.alive and self.failures == _PATIENCE:
            raise DataError(f"all of the first {_PATIENCE} attempts failed, the last one with: {played.why}")

    async def attempt(self, sample: Sample, number: int) -> Attempt:
        seed = stable_seed(self.config.episode.seed, "attempt", number)
        config = replace(self.config.episode, seed=seed)
        cost = Cost()
        engine = self.teacher.engine(sample, config)
        episode = await run_episode(sample, engine, config, reader=self.reader)
        cost.add(episode.traces, episode.timings["total"])

        def ended(outcome: str, why: str, **more: Any) -> Attempt:
            return Attempt(sample.id, number, fingerprint(sample), outcome, why, asdict(cost), **more)

        if not episode.scored:
            return ended("failed", next(error.message for error in episode.errors if not error.scored))
        grade = await self.grade(sample, episode)
        if grade.value is None:
            return ended("unscored" if self.judge is None else "failed", grade.explanation)
        if grade.value < self.config.min_accuracy:
            return ended("wrong", f"{grade.explanation}; the answer: {episode.answer!r:.200}")
        if not format_strict(episode):
            loose = (turn.text[:200] for turn in episode.turns if not turn.strict)
            return ended("not_strict", next(loose, "no answer of its own"))
        if bad := [crop for crop in episode.crops if crop.status == "bad"]:
            return ended("unusable", str(bad[0].error))
        told = await self.with_reports(episode, engine, config, cost)
        if late := [crop for crop in told if crop.status in ("failed", "timed_out")]:
            return ended("failed", str(late[0].error))
        made = self.rows(sample, episode, told, grade, engine.chat.clean)
        if made is None:
            return ended("not_strict", "not strict any more once its calls were merged")
        key, row, reports = made
        return ended("good", "", key=key, row=row, reports=reports)

    async def grade(self, sample: Sample, episode: Episode) -> Score:
        if self.judge is not None and sample.type == "open":
            return await self.judge.score(sample, episode.answer)
        return accuracy(sample, episode.answer)

    async def with_reports(
        self, episode: Episode, engine: Engine, config: EpisodeConfig, cost: Cost
    ) -> tuple[Crop, ...]:
        """The crops of an episode, each with a report: where frames came back, a sub-agent watches the window now."""
        if config.evidence != "frames" or not episode.crops:
            return episode.crops
        asking = replace(config, evidence="report", dispatch="parallel")
        info = await self.reader.ainfo(episode.sample.video)
        limit = min(config.max_pixels, engine.chat.max_pixels)
        size = frame_size(info.width, info.height, factor=engine.chat.frame_factor, max_pixels=limit)
        scene = Scene(episode.sample, asking, engine.chat.clean, info.duration)
        runner = CropRunner(
            scene, engine, self.reader, lambda event: None, look=PARAVT.look, size=size, seed=config.seed
        )
        told: list[Crop] = []
        started = time.monotonic()
        for number, turn in enumerate(episode.turns):
            kept = [crop for crop in episode.crops if crop.turn == number and crop.status != "skipped"]
            if kept:
                calls = tuple(crop.call for crop in kept)
                crops, _ = await runner.run(number, Turn(turn.text, turn.think, calls, None, True))
                told += crops
        cost.add([crop.trace for crop in told if crop.trace is not None], time.monotonic() - started)
        return tuple(told)

    def rows(
        self, sample: Sample, episode: Episode, crops: Sequence[Crop], grade: Score, clean: Callable[[str], str]
    ) -> tuple[str, dict[str, Any], tuple[dict[str, Any], ...]] | None:
        """What a good attempt becomes: its key, the row of the main agent, those of its sub-agents. None if a turn of
        merged calls is not strict."""
        played = self.config.episode
        steps = _steps(episode, crops)
        merged = merge_steps(steps, " ".join((sample.question, *sample.options)))
        as_played = merged == steps and not any(crop.status == "skipped" for crop in crops)
        turns = [turn.text for turn in episode.turns]
        said = turns if as_played else [*map(render_step, merged), turns[-1]]
        if len(said) != len(merged) + 1 or not all(parse_turn(text).strict for text in said):
            return None
        source = {
            "sample": sample.id,
            "teacher": self.teacher.identity,
            "dispatch": played.dispatch,
            "evidence": played.evidence,
            "frames": played.frame_budget,
            "temperature": played.temperature,
            "seed": played.seed,
            "answer": episode.answer,
            "right": sample.answer,
            "accuracy": grade.value,
            "turns": len(turns),
            "merged": len(steps) - len(merged),
            "reports": "made afterwards" if played.evidence == "frames" else "as played",
            "made_by": self.made_by,
        }
        shown = replace(played, dispatch="parallel", evidence="report")
        row = {"type": sample.type, "calls": sum(len(step.looks) for step in merged), "source": source}
        row |= trace_row(sample, shown, episode.overview_times, merged, said, clean)
        reports = [
            {"source": source} | report_row(sample, shown, crop.window, _said(crop.trace), clean)
            for crop in crops
            if crop.window is not None and crop.trace is not None and crop.trace.stop_reason == "stop"
        ]
        return trace_key(sample, merged, episode.answer or ""), row, tuple(reports)


def _steps(episode: Episode, crops: Sequence[Crop]) -> list[Step]:
    """The turns that call, with the windows that were watched. Of sequential episodes, calls that were not run are
    left out."""
    out = []
    for number, turn in enumerate(episode.turns):
        looks = tuple(Look(crop.window, crop.report or "") for crop in crops
                      if crop.turn == number and crop.ran and crop.window is not None)  # fmt: skip
        if looks:
            out.append(Step(turn.think or "", looks))
    return out


def _said(trace: Trace) -> str:
    """What a sub-agent sampled, without the end of its turn."""
    return "".join(segment.text for segment in trace.segments if segment.sampled).removesuffix(_END)
