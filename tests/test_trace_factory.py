"""The trace factory.

Locked here: a row renders to the very tokens that the agent was shown and said; calls that did not depend on each other
become one turn and those that did stay where they are; frames are replaced by a sub-agent's report; only right and
strict traces are kept, each once; a run that was stopped goes on without playing anything again; what was made trains.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rows import write_lines, write_video

from paravt.agent import EpisodeConfig, run_episode
from paravt.ask import shipped_model
from paravt.chat import TokenChat
from paravt.config import SFTRecipe
from paravt.data import read_samples
from paravt.data.cold_start import balance
from paravt.data.difficulty import pass_rates, read_difficulty, sift
from paravt.data.journal import Journal
from paravt.data.merging import Look, Step, merge_steps, render_step
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.difficulty import DifficultyConfig, measure
from paravt.engines.base import Engine, Prompt
from paravt.engines.scripted import ScriptedEngine
from paravt.engines.scripted import Step as Said
from paravt.errors import DataError, EngineError, RecipeError
from paravt.lab.corpus import LabTeacher, write_corpus
from paravt.lab.factory import train_sft
from paravt.models.rendering import load_chat
from paravt.trace_factory import FactoryConfig, run_factory
from paravt.turns import parse_turn, render_call
from paravt.types import Sample, Window
from paravt.video import FrameReader


@pytest.fixture(scope="module")
def chat() -> TokenChat:
    return load_chat(shipped_model())


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_video(tmp_path_factory.mktemp("clip") / "clip.mp4", seconds=12))


def config(**change: Any) -> EpisodeConfig:
    return EpisodeConfig(**{"frame_budget": 4, "force_answer": False, "max_turns": 4} | change)


def made(directory: Path, samples: list[Sample], teacher: Any, **change: Any) -> tuple[dict[str, Any], list[Any]]:
    episode = change.pop("episode", config())
    settings = FactoryConfig(episode, **change)
    summary = asyncio.run(run_factory(samples, teacher, FrameReader(workers=1), settings, directory))
    return summary, [json.loads(line) for line in (directory / "traces.jsonl").read_text().splitlines()]


class Told:
    """A teacher with a script for each episode."""

    def __init__(self, chat: TokenChat, script: Callable[[Prompt], Said]) -> None:
        self.identity = {"kind": "told"}
        self.played = 0
        self._chat, self._script = chat, script

    def engine(self, sample: Sample, config: EpisodeConfig) -> Engine:
        self.played += 1
        return ScriptedEngine(self._chat, self._script)

    async def close(self) -> None:
        return None


def call(*windows: tuple[int, int]) -> str:
    return "\n".join(render_call("crop_video", {"start_time": a, "end_time": b}) for a, b in windows)


def turns(*said: str) -> Callable[[Prompt], Said]:
    """Main turns one after the other; sub-agents tell their window."""

    def step(prompt: Prompt) -> Said:
        if prompt.trace.startswith("crop/"):
            return f"frames from {prompt.images[0].time:g} to {prompt.images[-1].time:g}"
        return said[sum(message.role == "assistant" for message in prompt.messages)]

    return step


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("options", [(), ("red", "grey")])
def test_a_row_is_the_very_tokens_of_the_agent(chat: TokenChat, clip: str, tmp_path: Path, options: Any) -> None:
    sample = Sample("s", clip, "What <|im_end|> colour?", options, "B" if options else "grey",
                    "choice" if options else "open")  # fmt: skip
    script = turns(
        f"<think>\nTwo looks.\n</think>\n{call((1, 4), (6, 9))}",
        f"<think>\nfrom 1 I look closer.\n</think>\n{call((2, 3))}",
        f"<think>\nSeen.\n</think>\n<answer>{sample.answer}</answer>",
    )
    episode = asyncio.run(run_episode(sample, ScriptedEngine(chat, script), config(), reader=FrameReader(workers=1)))
    assert not episode.errors
    _, (row,) = made(tmp_path / "run", [sample], Told(chat, script))
    builder = TraceBuilder(chat, FrameReader(workers=1), RowConfig())
    assert builder.build(row).ids == episode.main.ids
    assert builder.build(row).loss_mask == episode.main.loss_mask
    assert [f.key for f in builder.build(row).images] == [f.key for f in episode.main.images]
    reports = [json.loads(line) for line in (tmp_path / "run/reports.jsonl").read_text().splitlines()]
    assert [builder.build(report).ids for report in reports] == [c.trace.ids for c in episode.crops if c.trace]
    assert row["source"]["teacher"] == {"kind": "told"}
    assert {"sample", "frames", "temperature", "seed", "made_by", "accuracy"} <= set(row["source"])


# ---------------------------------------------------------------------- merging


def step(think: str, *looks: tuple[float, float, str]) -> Step:
    return Step(think, tuple(Look(Window(a, b), report) for a, b, report in looks))


def test_what_did_not_depend_on_each_other_becomes_one_turn() -> None:
    first = step("The kitchen and the garden may show it.", (0, 10, "an empty kitchen"))
    second = step("Then the garden.", (20, 30, "a gardener waters tomatoes"))
    zoom = step("I look at it again.", (22, 25, "ripe tomatoes"))
    cited = step("The gardener must come back later.", (50, 60, "nothing"))
    back = step("The reports showed nothing so far.", (70, 80, "a dog"))
    merged = merge_steps([first, second, zoom, back], "What is in the kitchen?")
    assert [[look.window.start_time for look in turn.looks] for turn in merged] == [[0, 20], [22, 70]]
    assert merged[0].think == "The kitchen and the garden may show it.\nThen the garden."
    assert merged[1].think == "I look at it again.", "nothing has been reported yet in that turn"
    assert [len(turn.looks) for turn in merge_steps([first, second, cited], "?")] == [2, 1]
    assert len(merge_steps([first, second, cited], "What does the gardener do?")) == 1, "known from the question"
    assert merge_steps([], "?") == []
    turn = parse_turn(render_step(merged[0]))
    assert turn.strict
    assert [c.arguments["start_time"] for c in turn.runnable] == [0, 20]


def test_a_sequential_teacher_with_frames_gives_parallel_rows_with_reports(chat: TokenChat, tmp_path: Path) -> None:
    samples = read_samples(write_corpus(tmp_path, 3, 2))
    episode = config(dispatch="sequential", evidence="frames", max_turns=8, frame_budget=8)
    summary, rows = made(tmp_path / "run", samples, LabTeacher(chat), episode=episode, attempts=3, skew=100)
    assert summary["traces"] == len(rows) > 2
    assert summary["merged"] > 0
    builder = TraceBuilder(chat, FrameReader(workers=1), RowConfig())
    for row in rows:
        said = [turn for turn in row["messages"] if turn["role"] == "assistant"]
        assert all(parse_turn(turn["content"]).strict for turn in said)
        replies = [turn["content"] for turn in row["messages"] if turn["role"] == "tool"]
        assert len(replies) == row["calls"]
        if row["calls"] > 1:
            assert len(said) == 2
            assert row["source"]["merged"] == row["calls"] - 1
            assert row["source"]["reports"] == "made afterwards"
        assert all("seconds] " in reply for reply in replies)
        trace = builder.build(row)
        assert len(trace.images) == 8, "the overview's frames and no others"


# ---------------------------------------------------------------------- what is kept


def test_only_right_and_strict_traces_are_kept_once(chat: TokenChat, clip: str, tmp_path: Path) -> None:
    good = "<think>\nGrey.\n</think>\n<answer>grey</answer>"
    said = {
        "good": good, "same": good, "wrong": good.replace(">grey", ">red"), "loose": "<answer>grey</answer>",
        "bad": f"<think>\n.\n</think>\n{call((100, 110))}",
    }  # fmt: skip

    def script(prompt: Prompt) -> Said:
        asked = prompt.messages[1].text
        if len(prompt.messages) > 2:
            return good
        if "down?" in asked:
            return EngineError("the engine is down")
        return next(text for name, text in said.items() if name in asked)

    names = {"good": "What good?", "same": "what GOOD", "wrong": "What wrong?", "loose": "What loose?",
             "bad": "What bad?", "down": "What down?"}  # fmt: skip
    samples = [Sample(name, clip, question, answer="grey") for name, question in names.items()]
    said["GOOD"] = good
    teacher = Told(chat, script)
    summary, rows = made(tmp_path, samples, teacher)
    assert summary["outcomes"] == {"good": 2, "wrong": 1, "not_strict": 1, "unusable": 1, "failed": 1}
    assert (summary["traces"], summary["duplicates"]) == (1, 1)
    assert [row["id"] for row in rows] == ["good#0"]
    assert summary["cost"]["requests"] == 6
    assert summary["cost"]["prompt_tokens"] > 0
    # again: only what failed is played, and it costs
    assert made(tmp_path, samples, teacher)[0]["outcomes"] == summary["outcomes"]
    assert teacher.played == len(samples) + 1
    with pytest.raises(DataError, match="no answer"):
        made(tmp_path / "x", [Sample("s", clip, "q")], teacher)
    with pytest.raises(DataError, match=r"none of 1 attempts is good: .'wrong': 1.; the first: wrong"):
        made(tmp_path / "y", [samples[2]], teacher)
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        made(tmp_path, samples, teacher, attempts=2)


def test_a_stopped_run_goes_on(chat: TokenChat, tmp_path: Path) -> None:
    samples = read_samples(write_corpus(tmp_path, 2, 2))
    whole, rows = made(tmp_path / "whole", samples, LabTeacher(chat), attempts=2)
    made(tmp_path / "stopped", samples[:2], LabTeacher(chat), attempts=2)
    journal = tmp_path / "stopped/attempts.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"id": "cut o')
    again, more = made(tmp_path / "stopped", samples, LabTeacher(chat), attempts=2)
    assert more == rows
    assert again["outcomes"] == whole["outcomes"]
    assert len(journal.read_text().splitlines()) == whole["attempts"]
    for line in ('{"id": "of another version"}', '{"reports": [], "cost": 1}'):
        journal.write_text(line + "\n")
        with pytest.raises(DataError, match=r"attempts\.jsonl:1: no attempt of this version of `paravt data traces`"):
            made(tmp_path / "stopped", samples, LabTeacher(chat), attempts=2)


def test_a_sloppy_teacher_is_filtered(chat: TokenChat, tmp_path: Path) -> None:
    samples = read_samples(write_corpus(tmp_path, 2, 2))
    summary, rows = made(tmp_path / "run", samples, LabTeacher(chat, "sloppy"), attempts=8)
    assert summary["outcomes"]["not_strict"] > 0
    assert rows
    assert all(parse_turn(t["content"]).strict for row in rows for t in row["messages"] if t["role"] == "assistant")
    with pytest.raises(DataError, match="no question of `paravt lab questions`"):
        made(tmp_path / "other", [Sample("a", samples[0].video, "q", answer="x")], LabTeacher(chat))


def test_cells_are_balanced() -> None:
    sizes = {("open", 2): 50, ("open", 0): 10, ("choice", 2): 12, ("temporal", 7): 1}
    rows = [{"id": f"{kind}{calls}/{n}", "type": kind, "calls": calls}
            for (kind, calls), size in sizes.items() for n in range(size)]  # fmt: skip

    def counts(taken: list[int]) -> dict[Any, int]:
        return {cell: sum((rows[n]["type"], rows[n]["calls"]) == cell for n in taken) for cell in sizes}

    taken = balance(rows, 2.0, None, 0)
    assert counts(taken) == {("open", 2): 22, ("open", 0): 10, ("choice", 2): 12, ("temporal", 7): 1}
    assert taken == sorted(taken) == balance(rows, 2.0, None, 0) != balance(rows, 2.0, None, 1)
    assert counts(balance(rows, 100.0, 13, 0)) == {
        ("open", 2): 4, ("open", 0): 4, ("choice", 2): 4, ("temporal", 7): 1,
    }  # fmt: skip
    assert balance([], 2.0, None, 0) == []


def test_a_journal_has_one_writer_and_refuses_what_it_did_not_write(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl") as journal:
        journal.add({"a": 1})
        with pytest.raises(DataError, match="another process"), Journal(tmp_path / "j.jsonl"):
            pass
    write_lines(tmp_path / "k.jsonl", ["{", {"a": 1}])
    with pytest.raises(DataError, match=r"k\.jsonl:1: not JSON"), Journal(tmp_path / "k.jsonl"):
        pass


# ---------------------------------------------------------------------- what is made of it


def test_the_rows_train(chat: TokenChat, tmp_path: Path) -> None:
    made(tmp_path / "run", read_samples(write_corpus(tmp_path, 2, 1)), LabTeacher(chat), attempts=3)
    files = [{"files": [str(tmp_path / "run" / name)]} for name in ("traces.jsonl", "reports.jsonl")]
    recipe = {
        "model": {"kind": "pretrained", "path": str(shipped_model()), "dtype": "float32"},
        "threads": 1,
        "stages": [{"name": "rows", "steps": 2, "batch_size": 2, "learning_rate": 1e-4,
                    "data": {"kind": "messages", "mixture": files}}],
    }  # fmt: skip
    train_sft(SFTRecipe.model_validate(recipe), tmp_path / "sft", Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "sft/rows.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert not any(name.startswith("skipped/") for name in lines[-1])


def test_pass_rates_are_measured_once(chat: TokenChat, clip: str, tmp_path: Path) -> None:
    """At K = 8 the policy is right, at K = 2 it is wrong, and of a video that is not there nothing is known."""
    played = []

    def script(prompt: Prompt) -> Said:
        played.append(prompt)
        return f"<answer>{'grey' if len(prompt.images) == 8 else 'red'}</answer>"

    samples = [Sample("a", clip, "What?", answer="grey"), Sample("b", str(tmp_path / "no.mp4"), "What?", answer="x")]
    settings = DifficultyConfig((2, 8), 3, config())
    out = tmp_path / "q.difficulty.jsonl"

    def run(policy: str = "told", wanted: list[Sample] = samples) -> Any:
        engine = ScriptedEngine(chat, script)
        return asyncio.run(measure(wanted, [engine], FrameReader(workers=1), {"name": policy}, settings, out))

    first = run(wanted=samples[:1])
    assert [(row.frames, row.passed, row.samples, row.failed) for row in first] == [(2, 0, 3, 0), (8, 3, 3, 0)]
    assert len(played) == 6
    both = run()
    assert len(played) == 6
    assert [(row.id, row.frames, row.passed, row.samples, row.failed) for row in both[2:]] == [
        ("b", 2, 0, 0, 3), ("b", 8, 0, 0, 3),
    ]  # fmt: skip
    assert sift(samples, pass_rates(read_difficulty(out)))[1] == {"unmeasured": 1, "kept": 2}
    write_video(tmp_path / "no.mp4")  # it has come: what failed is played again, and the later line counts
    assert [(row.samples, row.failed) for row in run()[2:]] == [(3, 0), (3, 0)]
    assert len(played) == 12
    assert sift(samples, pass_rates(read_difficulty(out)))[1] == {"unsolved": 1, "kept": 1}
    with pytest.raises(RecipeError, match="another policy"):
        run("another")
    whole = out.read_text()
    policy = json.loads(whole.splitlines()[0])["policy"]
    out.write_text(whole + json.dumps({"policy": policy, "samples": 3}) + "\n")
    with pytest.raises(DataError, match=r"difficulty\.jsonl:7: not a measurement of `paravt data difficulty`"):
        run()
    out.write_text(whole)
    lost = [Sample("c", str(tmp_path / "gone.mp4"), "What?", answer="x")]
    out = tmp_path / "lost.jsonl"
    with pytest.raises(DataError, match=r"no episode could be scored: .*gone\.mp4: no such file"):
        run(wanted=lost)


def test_a_run_whose_every_episode_fails_ends_early(chat: TokenChat, tmp_path: Path) -> None:
    lost = [Sample(str(n), str(tmp_path / "gone.mp4"), "What?", answer="x") for n in range(40)]
    teacher = Told(chat, turns("."))
    with pytest.raises(DataError, match=r"all of the first 16 attempts failed.*gone\.mp4: no such file"):
        made(tmp_path, lost, teacher)
    assert teacher.played < 40
