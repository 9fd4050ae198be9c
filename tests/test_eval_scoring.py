"""From rows to numbers: what is right, wrong, unparsable and failed, and how certain a score is.

Locked here: failed is not wrong, and not unparsable either; one extractor for all; questions about one video are not
independent; a breakdown compares names, not parts of names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CASES

from paravt.bench.compare import compare
from paravt.bench.intervals import bootstrap, mcnemar, share_interval
from paravt.bench.loaded import Loaded
from paravt.bench.results import Result, Run
from paravt.bench.scoring import verdict
from paravt.bench.summary import summarise
from paravt.bench.tables import flip_lines, model_names, with_interval
from paravt.types import Episode, EpisodeError, Sample, Score, Trace

OPTIONS = ("a dog", "a cat", "a bird")
FAILED = EpisodeError("engine", "episode", "the server broke", scored=False)
RECIPE: Mapping[str, Any] = {"mode": {"name": "agentic"}, "model": {"name": "m"}, "episode": {"frame_budget": 8}}


def choice(id: str = "1", gold: str | None = "B", video: str = "v", **metadata: Any) -> Sample:
    return Sample(id, video, f"q{id}?", OPTIONS, gold, "choice", metadata)


def episode(sample: Sample, answer: str | None, *errors: EpisodeError) -> Episode:
    return Episode(sample, 8, "parallel", Trace("main", "main"), (), (), answer, errors=errors)


def run(*episodes: Episode, bench: Loaded | None = None, grades: Mapping[str, Score] | None = None) -> Run:
    loaded = replace(bench or Loaded("b", "", ()), samples=tuple(one.sample for one in episodes))
    results = {("b", one.sample.id): Result("b", 1, "here", one) for one in episodes}
    known = {("b", id): grade for id, grade in (grades or {}).items()}
    return Run(Path("run"), RECIPE, {"b": loaded}, results, known, "j" if grades is not None else None)


@pytest.mark.parametrize(
    ("answer", "outcome", "value"),
    [
        ("B", "right", 1.0),
        ("(C) a bird", "wrong", 0.0),
        ("D", "unparsable", 0.0),
        ("A or B", "unparsable", 0.0),
        ("I cannot tell", "unparsable", 0.0),
        ("", "unparsable", 0.0),
        (None, "unparsable", 0.0),
    ],
)
def test_wrong_and_unparsable_are_two_things(answer: str | None, outcome: str, value: float) -> None:
    found = verdict(episode(choice(), answer))
    assert (found.outcome, found.value) == (outcome, value)


def test_failed_is_neither() -> None:
    found = verdict(episode(choice(), "B", FAILED))
    assert (found.outcome, found.value, found.answer) == ("failed", None, None)
    assert "the server broke" in found.explanation
    harmless = replace(FAILED, scored=True)
    assert verdict(episode(choice(), "B", harmless)).outcome == "right"


def test_a_sample_without_a_usable_reference_is_not_scored() -> None:
    assert verdict(episode(choice(gold=None), "B")).outcome == "no_gold"
    assert verdict(episode(choice(gold="a horse"), "B")).outcome == "no_gold"


def test_the_extractor_is_the_one_of_the_cases() -> None:
    cases = json.loads((CASES / "answers.json").read_text(encoding="utf-8"))
    options = tuple(cases["options"])
    for text, letter in ((case["text"], case["letter"]) for case in cases["letters"]):
        found = verdict(episode(replace(choice(gold="A"), options=options), text))
        assert found.answer == letter, text
        assert (found.outcome == "unparsable") == (letter is None), text
    for text, window in ((case["text"], case["window"]) for case in cases["times"]):
        gold = "1 - 2" if window is None else f"{window[0]} - {window[1]}"
        sample = Sample("t", "v", "when?", (), gold, "temporal")
        found = verdict(episode(sample, text))
        assert (found.outcome, found.value) == (("unparsable", 0.0) if window is None else ("right", 1.0)), text


def test_open_answers_are_f1_or_the_judges_grade_never_both() -> None:
    sample = Sample("o", "v", "what?", (), "a red car", "open")
    assert verdict(episode(sample, "red car")).value == pytest.approx(0.8)
    assert verdict(episode(sample, "red car"), Score(0.5, "red car")).value == 0.5
    down = verdict(episode(sample, "red car"), Score.unscored("judge down"))
    assert (down.outcome, down.value) == ("failed", None)
    assert verdict(episode(sample, None), Score.unscored("nothing to grade")).outcome == "unparsable"


def test_counts_and_scores_of_a_benchmark() -> None:
    """The headline is over all rows with a reference; failed ones are counted, and the score without them is beside."""
    rows = [
        episode(choice("1"), "B"),
        episode(choice("2"), "A"),
        episode(choice("3"), "hm"),
        episode(choice("4"), None, FAILED),
        episode(choice("5", gold="nothing of it"), "B"),
    ]
    summary = summarise(run(*rows))
    (block,) = summary.benches[0].blocks
    assert (block.asked, block.counts.rows, block.counts.no_gold) == (5, 5, 1)
    counts = block.counts
    found = (counts.right, counts.wrong, counts.unparsable, counts.failed, counts.no_gold)
    assert found == (1, 1, 1, 1, 1)
    assert (block.accuracy, block.accuracy_played) == (0.25, pytest.approx(1 / 3))
    assert (summary.played, summary.failed, summary.unplayed) == (5, 1, 0)
    assert summary.benches[0].failures == {"engine": 1}
    assert "1 failed" in with_interval(block)


def test_if_all_fails_there_is_no_score() -> None:
    (block,) = summarise(run(episode(choice("1"), None, FAILED))).benches[0].blocks
    assert (block.accuracy, block.interval, block.accuracy_played) == (None, None, None)


def test_types_are_not_mixed() -> None:
    """A benchmark with options and free answers has a block for each, as MMVU needs it."""
    open_row = episode(Sample("o", "v", "what?", (), "a cat", "open"), "a cat")
    windows = [
        episode(Sample(f"t{n}", "v", "when?", (), "0 - 10", "temporal"), answer)
        for n, answer in enumerate(["0 - 10", "0 - 6", "0 - 4", "20 - 30", "none"])
    ]
    blocks = {
        block.type: block for block in summarise(run(episode(choice(), "C"), open_row, *windows)).benches[0].blocks
    }
    assert list(blocks) == ["choice", "temporal", "open"]
    assert (blocks["choice"].accuracy, blocks["open"].accuracy) == (0.0, 1.0)
    assert blocks["temporal"].accuracy == pytest.approx((1 + 0.6 + 0.4) / 5)
    assert blocks["temporal"].recalls == {"R@0.3": 0.6, "R@0.5": 0.4, "R@0.7": 0.2}
    assert blocks["temporal"].counts.unparsable == 1
    assert (blocks["temporal"].measure, blocks["open"].measure) == ("mIoU", "token F1")


def test_breakdowns_compare_names_and_lists_count_for_each_entry() -> None:
    rows = [
        episode(choice("1", task="order", skills=["a", "b"]), "B"),
        episode(choice("2", task="reorder", skills=["b"]), "C"),
        episode(choice("3", task="order", skills=None), "B"),
    ]
    bench = Loaded("b", "", (), breakdown=("task", "skills"), macro="task")
    (block,) = summarise(run(*rows, bench=bench)).benches[0].blocks
    tasks = block.breakdowns["task"]
    assert {name: (part.rows, part.accuracy) for name, part in tasks.items()} == {
        "order": (2, 1),
        "reorder": (1, 0),
    }
    assert (block.macro, block.accuracy) == (0.5, pytest.approx(2 / 3))
    skills = block.breakdowns["skills"]
    assert {name: (part.rows, part.accuracy) for name, part in skills.items()} == {"a": (1, 1), "b": (2, 0.5)}


def test_questions_about_one_video_are_not_independent() -> None:
    """Three equal answers about each video are worth one: the interval is that of the videos."""
    random = np.random.default_rng(1)
    videos = (random.random(100) < 0.7).astype(float)
    alone = bootstrap(videos, range(100))
    tripled = bootstrap(np.repeat(videos, 3), np.repeat(range(100), 3).tolist())
    naive = bootstrap(np.repeat(videos, 3), range(300))
    assert alone is not None
    assert tripled is not None
    assert naive is not None
    assert tripled.high - tripled.low == pytest.approx(alone.high - alone.low, abs=0.01)
    assert tripled.high - tripled.low > 1.5 * (naive.high - naive.low)
    deviation = 1.96 * np.sqrt(videos.mean() * (1 - videos.mean()) / 100)
    assert alone.low == pytest.approx(videos.mean() - deviation, abs=0.02)
    assert bootstrap(videos, range(100)) == alone  # the same every time
    assert bootstrap([1.0, 0.0], ["v", "v"]) is None
    assert bootstrap([0.0] * 50, range(50)) is None  # two runs that never differ: no interval without width


def test_all_right_is_no_certainty() -> None:
    found = share_interval([1.0] * 20, range(20))
    assert found is not None
    assert found.high == 1.0
    assert found.low == pytest.approx(0.8316, abs=1e-4)  # Clopper and Pearson's bound for 20 of 20
    none = share_interval([0.0] * 20, range(20))
    assert none is not None
    assert (none.low, none.high) == (0.0, pytest.approx(0.1684, abs=1e-4))


def test_mcnemar_is_exact_for_few_and_does_not_overflow_for_many() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == pytest.approx(0.0625)
    assert mcnemar(5, 0) == pytest.approx(0.0625)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert 0 < mcnemar(1500, 2000) < 1e-15


def test_two_runs_are_compared_on_what_both_have_answered() -> None:
    samples = [choice(str(n), video=f"v{n % 3}") for n in range(8)]
    one = run(*(episode(sample, answer) for sample, answer in zip(samples, "BBBCCCBB", strict=True)))
    said = ["B", "C", "B", "B", "B", "C", None, "B"]
    rows = [episode(sample, answer) for sample, answer in zip(samples, said, strict=True)]
    rows[6] = replace(rows[6], errors=(FAILED,))
    rows[7] = replace(rows[7], sample=replace(samples[7], question="another question?"))
    (found,) = compare(one, run(*rows))
    assert (found.pairs, found.failed, found.alone) == (6, 1, 2)
    assert (found.one, found.other, found.difference) == (0.5, pytest.approx(4 / 6), pytest.approx(1 / 6))
    assert (found.gained, found.lost, found.p) == (2, 1, mcnemar(1, 2))
    assert [(flip.id, flip.direction, flip.one, flip.other) for flip in found.flips] == [
        ("1", "lost", "B", "C"),
        ("3", "gained", "C", "B"),
        ("4", "gained", "C", "B"),
    ]
    assert found.interval is not None
    assert found.interval.low <= found.difference <= found.interval.high


def test_another_reference_is_another_question() -> None:
    one = run(*(episode(choice(id), "B") for id in "123"))
    other = run(*(episode(choice(id, gold="A" if id == "1" else "B"), "B") for id in "123"))
    (found,) = compare(one, other)
    assert (found.pairs, found.alone, found.difference) == (2, 2, 0.0)


def test_grades_of_one_run_are_not_compared_with_another_measure() -> None:
    rows = [episode(Sample(id, id, f"q{id}?", (), "red car", "open"), "a red car") for id in "12"]
    f1, judged = run(*rows), run(*rows, grades={id: Score(0.0) for id in "12"})
    (found,) = compare(f1, judged)
    assert (found.measure, found.difference) == ("token F1", 0.0)
    (found,) = compare(judged, replace(judged, judge="another"))
    assert (found.measure, found.one) == ("token F1", pytest.approx(0.8))
    (found,) = compare(judged, judged)
    assert (found.measure, found.one) == ("judge", 0.0)


def test_an_id_cannot_break_out_of_its_line() -> None:
    sample = choice("1\ngained b 2: all is well")
    (line,) = flip_lines(compare(run(episode(sample, "B")), run(episode(sample, "C"))), 9)
    assert "\n" not in line


def test_models_that_end_alike_have_whole_names() -> None:
    summary = summarise(run(episode(choice(), "B")))
    named = [replace(summary, model=model) for model in ("a/x", "b/x", "b/x", "c/y")]
    assert model_names(named) == ["a/x", "b/x", "b/x", "y"]
