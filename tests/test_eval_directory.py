"""The directory of an evaluation: what is reused, what is not, who may write, and what is made of the rows later."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import Server
from conftest import CASES
from disk import full_disk
from rich.console import Console

from paravt.bench.compare import compare
from paravt.bench.evaluate import Plan, run_evaluation
from paravt.bench.identity import fingerprint, served_model
from paravt.bench.loaded import Fault, Loaded, Shard
from paravt.bench.merge import merge_runs, missing_shards
from paravt.bench.modes import MODES
from paravt.bench.report import write_report
from paravt.bench.results import Result, read_run
from paravt.bench.runner import Job, Place, run_jobs
from paravt.bench.summary import Summary, summarise
from paravt.chat import MessageChat
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.errors import DataError, EngineError, RecipeError
from paravt.judge import Judge
from paravt.provenance import lock_directory
from paravt.types import Episode, EpisodeError, Sample, Trace, Usage
from paravt.video import FrameReader

VIDEO = str(CASES / "video" / "base.mp4")
QUIET = Console(file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
DIRECT = MODES["direct"]


class Answerer:
    """An engine that answers by a function of what it is asked, and counts."""

    def __init__(self, answer: Callable[[str], str | EngineError] = lambda question: "<answer>B</answer>") -> None:
        self.chat = MessageChat()
        self.asked: Counter[str] = Counter()
        self._answer = answer

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        question = prompt.messages[1].text
        self.asked[question.partition("?")[0].rpartition(" ")[2]] += 1
        await asyncio.sleep(0)
        said = self._answer(question)
        if isinstance(said, EngineError):
            raise said
        return [Completion((), said, None, "stop", 0, Usage(10, 2))] * n

    async def load_policy(self, version: int, weights: Mapping[str, Any] | None) -> None: ...

    async def close(self) -> None: ...


def samples(count: int, videos: Sequence[str] = (VIDEO,)) -> tuple[Sample, ...]:
    return tuple(
        Sample(f"s{n}", videos[n % len(videos)], f"about q{n}?", ("a", "b"), "B", "choice", {"kind": "xy"[n % 2]})
        for n in range(count)
    )


def asked(rows: Sequence[Sample], shard: Shard | None = None) -> Loaded:
    return Loaded("mine", "here", tuple(rows), title="mine").part(shard)


def play(
    out: Path,
    rows: Sequence[Sample],
    engine: Answerer,
    shard: Shard | None = None,
    judge: Judge | None = None,
    **changes: Any,
) -> Summary:
    plan = Plan(DIRECT, served_model("m"), DIRECT.config(frame_budget=1))
    plan = replace(plan, **changes)
    places = [Place("here", engine)]
    run = run_evaluation([asked(rows, shard)], plan, places, FrameReader(), out, QUIET, judge)
    return asyncio.run(run)


def score(summary: Summary) -> float | None:
    return summary.benches[0].blocks[0].accuracy


def test_rows_are_reused_by_id_question_and_configuration(tmp_path: Path) -> None:
    rows, engine = samples(4), Answerer()
    play(tmp_path, rows, engine)
    assert set(engine.asked.values()) == {1}
    play(tmp_path, samples(6), engine)  # two more questions
    assert engine.asked == {f"q{n}": 1 for n in range(6)}

    changed = (replace(rows[0], question="about q0 now?"), replace(rows[1], answer="A"), *rows[2:])
    found = play(tmp_path, changed, engine)
    assert engine.asked == {**{f"q{n}": 1 for n in range(6)}, "now": 1}  # another question is asked,
    assert score(found) == 0.75  # and another reference answer scored
    assert found.strangers == 3  # the old q0, and the two that are asked no more

    for changes in (
        {"mode": DIRECT.with_prompt("Answer!")},
        {"mode": MODES["reasoning"]},
        {"model": served_model("another")},
        {"config": DIRECT.config(frame_budget=2)},
        {"config": DIRECT.config(frame_budget=1, temperature=0.7)},
        {"config": DIRECT.config(frame_budget=1, seed=1)},
    ):
        with pytest.raises(RecipeError, match="another recipe"):
            play(tmp_path, rows, engine, **changes)
    play(tmp_path, rows, engine, concurrency=2, tries=1)  # speed is no part of it
    assert sum(engine.asked.values()) == 7


def test_rows_of_another_configuration_never_count(tmp_path: Path) -> None:
    """Even if somebody copies them into the file."""
    one, other = tmp_path / "one", tmp_path / "other"
    play(one, samples(3), Answerer(lambda question: "<answer>A</answer>"))
    play(other, samples(3), Answerer(), config=DIRECT.config(frame_budget=2))
    with (one / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write((other / "rows.jsonl").read_text(encoding="utf-8"))
    summary = summarise(read_run(one))
    assert (score(summary), summary.strangers) == (0.0, 3)


def test_a_checkpoint_is_named_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    weights = bytearray(3_000_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    for at in (0, 2_999_999):  # further training changes all tensors, so both ends
        (tmp_path / "model.safetensors").write_bytes(weights[:at] + b"x" + weights[at + 1 :])
        assert fingerprint(tmp_path) != first


def test_one_process_at_a_time(tmp_path: Path) -> None:
    play(tmp_path, samples(1), Answerer())
    with lock_directory(tmp_path), pytest.raises(RecipeError, match="another process is running there"):
        play(tmp_path, samples(1), Answerer())


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    rows, engine = samples(30), Answerer()
    with full_disk(20_000), pytest.raises(OSError, match="large") as failure:
        play(tmp_path, rows, engine)
    assert failure.value.filename.endswith("rows.jsonl")
    text = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    kept = [json.loads(line)["sample"]["id"] for line in text.splitlines()]
    assert 0 < len(kept) < 30
    summary = play(tmp_path, rows, engine)
    assert (summary.played, score(summary)) == (30, 1.0)
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8").startswith(text)


def test_shards_are_disjoint_whole_videos_and_merge_into_the_run(tmp_path: Path) -> None:
    videos = [str(CASES / "video" / name) for name in ("base.mp4", "one.mp4", "three.mp4", "odd444.mp4")]
    rows, engine = samples(17, videos), Answerer(lambda question: f"<answer>{'AB'['q1' in question]}</answer>")
    for number in (1, 2, 3):
        play(tmp_path / str(number), rows, engine, Shard(number, 3))
    assert engine.asked == {f"q{n}": 1 for n in range(17)}
    for video in videos:  # each is decoded by one machine
        holders = [n for n in (1, 2, 3) if any(s.video == video for s in read_run(tmp_path / str(n)).samples.values())]
        assert len(holders) == 1
    merged = summarise(merge_runs([tmp_path / str(n) for n in (1, 2, 3)], tmp_path / "merged"))
    whole = play(tmp_path / "whole", rows, engine)
    assert merged.benches[0].blocks[0].counts == whole.benches[0].blocks[0].counts
    assert (merged.played, score(merged)) == (17, score(whole))
    assert missing_shards(read_run(tmp_path / "merged")) == []
    with pytest.raises(DataError, match="has rows already"):
        merge_runs([tmp_path / "1"], tmp_path / "merged")
    part = merge_runs([tmp_path / "1", tmp_path / "2"], tmp_path / "part")
    assert missing_shards(part) == [f"mine: {len(part.samples)} of 17 questions: a shard is missing"]
    assert summarise(part).benches[0].faults == {"size": 1}
    again = merge_runs([tmp_path / "part", tmp_path / "3"], tmp_path / "again")
    assert (missing_shards(again), summarise(again).benches[0].faults) == ([], {})
    assert summarise(again).benches[0].blocks[0].counts == merged.benches[0].blocks[0].counts
    play(tmp_path / "other", rows, engine, config=DIRECT.config(frame_budget=2))
    with pytest.raises(DataError, match="another configuration"):
        merge_runs([tmp_path / "1", tmp_path / "other"], tmp_path / "mixed")


def test_missing_videos_are_left_out_and_said(tmp_path: Path) -> None:
    rows = samples(3, [VIDEO, "gone.mp4"])
    loaded = Loaded("mine", "here", rows, (Fault("video", "gone.mp4", "no such file"),))
    engine = Answerer()
    plan = Plan(DIRECT, served_model("m"), DIRECT.config(frame_budget=1))
    run = run_evaluation([loaded], plan, [Place("here", engine)], FrameReader(), tmp_path, QUIET)
    summary = asyncio.run(run)
    assert engine.asked == {"q0": 1, "q2": 1}
    assert (summary.played, summary.unplayed, summary.benches[0].faults) == (2, 1, {"video": 1})


# ---------------------------------------------------------------------------------------------------- places


def played(sample: Sample, failure: str | None = None) -> Episode:
    errors = () if failure is None else (EpisodeError("engine", "episode", failure, scored=False),)
    return Episode(sample, 1, "none", Trace("main", "main"), (), (), "B", errors=errors)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_a_dead_place_costs_no_row(concurrency: int) -> None:
    """What one engine fails on another one answers, also if that one is busy; the dead one is asked less and less."""
    good, dead = Answerer(), Answerer()
    asked_of: Counter[int] = Counter()

    async def player(sample: Sample, engine: Any) -> Episode:
        asked_of[id(engine)] += 1
        for _ in range(20 if engine is good else 1):  # a failure is there sooner than an answer
            await asyncio.sleep(0)
        return played(sample, "down" if engine is dead else None)

    done: list[Result] = []
    jobs = [Job("b", sample) for sample in samples(60)]
    places = [Place("dead", dead), Place("good", good)]
    asyncio.run(run_jobs(jobs, places, player, done.append, concurrency=concurrency, tries=2))
    assert sorted(result.episode.sample.id for result in done) == sorted(f"s{n}" for n in range(60))
    assert all(result.episode.scored and result.place == "good" for result in done)
    assert asked_of[id(dead)] <= 2 * concurrency


def test_if_nothing_answers_the_run_stops_and_leaves_the_rest() -> None:
    done: list[Result] = []

    async def player(sample: Sample, engine: Any) -> Episode:
        return played(sample, "no route to host")

    jobs = [Job("b", sample) for sample in samples(500)]
    with pytest.raises(EngineError, match="have failed, the last with: no route to host; stopped"):
        asyncio.run(run_jobs(jobs, [Place("dead", Answerer())], player, done.append, concurrency=4, tries=2))
    assert len(done) < 20


# ---------------------------------------------------------------------------------------------------- afterwards


def test_a_judge_grades_open_answers_and_is_not_asked_twice(tmp_path: Path, server: Server) -> None:
    rows = [Sample(f"s{n}", VIDEO, f"about q{n}?", (), "a red car", "open") for n in range(4)]
    engine = Answerer(lambda question: f"<answer>{'red car' if 'q1' in question else 'a truck'}</answer>")
    server.default = lambda body: "A" if "red car" in body["messages"][0]["content"].split("answer:")[2] else "C"  # type: ignore[method-assign]
    server.answers = [400]  # the first request fails for good
    summary = play(tmp_path, rows, engine, judge=Judge(server.url, "j", max_retries=0, max_concurrency=1))
    (block,) = summary.benches[0].blocks
    assert (block.measure, block.counts.right, block.counts.failed, summary.benches[0].failures) == (
        "judge", 1, 1, {"judge": 1},
    )  # fmt: skip
    assert len(server.requests) == 4
    again = play(tmp_path, rows, engine, judge=Judge(server.url, "j", max_retries=0))
    assert (len(server.requests), again.failed, score(again)) == (5, 0, 0.25)
    assert summarise(read_run(tmp_path)) == again  # scoring again needs no judge
    assert sum(engine.asked.values()) == 4


def test_grades_of_two_judges_are_not_mixed(tmp_path: Path, server: Server) -> None:
    rows = [Sample(f"s{n}", VIDEO, f"about q{n}?", (), "a red car", "open") for n in range(3)]
    server.default = lambda body: "A" if body["model"] == "mild" else "C"  # type: ignore[method-assign]
    assert score(play(tmp_path, rows, Answerer(), judge=Judge(server.url, "mild"))) == 1.0
    server.answers = [400]
    found = play(tmp_path, rows, Answerer(), judge=Judge(server.url, "strict", max_retries=0, max_concurrency=1))
    assert (found.failed, score(found)) == (1, 0.0)  # nothing of the mild one's is left
    found = play(tmp_path, rows, Answerer(), judge=Judge(server.url, "strict"))
    assert (found.failed, score(found), len(server.requests)) == (0, 0.0, 7)


def test_a_report_has_every_run_though_they_are_alike(tmp_path: Path) -> None:
    for name, frames, seed in (("a", 1, 0), ("b", 1, 1), ("c", 2, 0)):
        play(tmp_path / name, samples(2), Answerer(), config=DIRECT.config(frame_budget=frames, seed=seed))
    write_report([tmp_path / name for name in "abc"], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    section = text.partition("## Accuracy against the number of overview frames\n")[2].partition("\n## ")[0]
    assert section.count("2.5 - 100.0") == 3


def test_reports_escape_what_models_and_files_say(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>|`x`"
    rows = [replace(sample, metadata={"kind": hostile if n % 2 else "plain"}) for n, sample in enumerate(samples(4))]
    for frames in (1, 2):
        out = tmp_path / f"K{frames}"
        play(
            out,
            rows,
            Answerer(lambda question: f"<answer>{hostile}</answer>"),
            config=DIRECT.config(frame_budget=frames),
        )
    write_report([tmp_path / "K1", tmp_path / "K2"], tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page
    assert "<script>alert" not in page
    assert "K = 2" in page
    assert "data:image/png" in page
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "\\<script\\>" in text
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [run["frames"] for run in data["runs"]] == [1, 2]
    assert data["runs"][0]["benches"][0]["blocks"][0]["counts"]["unparsable"] == 4
    assert data["published"][-2]["videomme"] == 62.1
    (found,) = compare(read_run(tmp_path / "K1"), read_run(tmp_path / "K2"))
    assert (found.difference, found.flips) == (0.0, ())


def test_published_rows_stand_beside_ours_and_are_marked(tmp_path: Path) -> None:
    plan = Plan(DIRECT, served_model("m"), DIRECT.config(frame_budget=1))
    bench = Loaded("mlvu", "here", samples(4), (), "MLVU", ("kind",), "kind")
    asyncio.run(run_evaluation([bench], plan, [Place("here", Answerer())], FrameReader(), tmp_path, QUIET))
    write_report([tmp_path], tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    ours, published = page.index("100.0 (2.5"), page.index("ParaVT-8B (published)")
    assert ours < published
    assert page[:published].rindex('<tr class="published">') > ours


# ---------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ["recipe.json", "benches.json", "samples.jsonl", "rows.jsonl", "grades.jsonl"])
@pytest.mark.parametrize("text", [b"\xff\xfe\0\n", b"[" * 100_000 + b"\n", b"null\n", b"{}\n", b"\0\0\0\n"])
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, text: bytes) -> None:
    play(tmp_path, samples(2), Answerer())
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=name):
        summarise(read_run(tmp_path))
    with pytest.raises((DataError, RecipeError), match=rf"{name}|another recipe"):
        play(tmp_path, samples(2), Answerer())


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rows.jsonl", '"answer": "', '"answer": {}, "x": "'),
        ("rows.jsonl", '"place": "here", ', ""),
        ("rows.jsonl", '"timings": {', '"timings": [], "x": {'),
        ("rows.jsonl", '"id": "s1"', '"id": ["s1"]'),
        ("samples.jsonl", '"video": "', '"x": "'),
        ("samples.jsonl", '"answer": "B"', '"answer": 5'),
        ("samples.jsonl", '"id": "s1"', '"id": {}'),
        ("benches.json", '"title": "mine"', '"title": null'),
        ("benches.json", '"faults": []', '"faults": [5]'),
        ("recipe.json", '"frame_budget": 1', '"frame_budget": "x"'),
    ],
)
def test_values_of_another_type_are_one_line(tmp_path: Path, name: str, old: str, new: str) -> None:
    play(tmp_path, samples(2), Answerer())
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(DataError, match=name):
        summarise(read_run(tmp_path))


def test_a_run_without_its_questions_is_no_run(tmp_path: Path) -> None:
    play(tmp_path, samples(2), Answerer())
    (tmp_path / "samples.jsonl").unlink()
    with pytest.raises(DataError, match=r"no samples\.jsonl in it"):
        read_run(tmp_path)


def test_texts_that_no_file_can_hold_are_reported_all_the_same(tmp_path: Path) -> None:
    rows = [replace(one, metadata={"kind": chr(0xD800 + n)}) for n, one in enumerate(samples(2))]
    play(tmp_path, rows, Answerer())
    write_report([tmp_path], tmp_path)
    assert "\N{REPLACEMENT CHARACTER}" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "\N{REPLACEMENT CHARACTER}" in (tmp_path / "report.md").read_text(encoding="utf-8")
