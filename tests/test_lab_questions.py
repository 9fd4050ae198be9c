"""The lab's questions can be answered from crops, mostly not from the overview, and mostly not from one window."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from paravt.agent import EpisodeConfig
from paravt.answers import extract_window
from paravt.lab.factory import new_model
from paravt.lab.questions import FAMILIES, Family, Question, question, report, true_reports
from paravt.lab.teacher import MANNERS, Kind, Mixture, Style, conclude, play, script, traces
from paravt.lab.tiny import TinyShape
from paravt.lab.world import CELL, DURATION, GLYPHS, SCENE, world
from paravt.models import QwenVL
from paravt.rewards import RewardConfig, format_strict, reward
from paravt.types import Dispatch
from paravt.video import overview_times, window_times


@pytest.fixture(scope="module")
def student() -> QwenVL:
    return new_model(TinyShape(hidden=48, layers=2, feed_forward=64))


def asked(count: int, **settings: object) -> list[Question]:
    return [question(f"w{number}", 0, **settings) for number in range(count)]  # type: ignore[arg-type]


def seen(one: Question, times: list[float]) -> list[str | None]:
    shown = world(one.sample.video)
    return [next(iter(shown.visible(times, *part)), None) for part in one.ranges]


def test_most_questions_need_several_windows_compared() -> None:
    questions = asked(400)
    families = Counter(one.family for one in questions)
    assert set(families) == set(FAMILIES)
    several = sum(one.sample.metadata["windows"] > 1 for one in questions)
    assert several == sum(count for family, count in families.items() if family != "what") >= 200
    types = Counter(one.sample.type for one in questions)
    assert set(types) == {"open", "choice", "temporal"}


def test_every_question_can_be_answered_from_crops_and_few_from_a_short_overview() -> None:
    right = Counter[int]()
    draw = random.Random(0)
    questions = asked(300)
    for one in questions:
        answer = one.sample.options["ABCD".index(str(one.sample.answer))] if one.sample.options else one.sample.answer
        times = [time for window in one.cells for time in window_times(*window)]
        assert conclude(one, seen(one, times), draw) == answer
        for budget in (4, 16, 64):
            right[budget] += conclude(one, seen(one, list(overview_times(DURATION, budget))), draw) == answer
    assert right[4] < 0.4 * len(questions)
    assert right[16] < 0.6 * len(questions)
    assert 0.75 * len(questions) < right[64] < len(questions)  # an event of 1 s is seen half the time


@pytest.mark.parametrize("choice", [0.0, 1.0])
def test_whatever_was_seen_there_is_an_answer(choice: float) -> None:
    draw = random.Random(0)
    for one in asked(200, choice=choice):
        for budget in (1, 4, 16, 32):
            said = conclude(one, seen(one, list(overview_times(DURATION, budget))), draw)
            assert said in one.sample.options or not one.sample.options


def test_the_answer_compares_what_several_scenes_show() -> None:
    """Without the last of its scenes, a question of several is often answered wrongly."""
    draw = random.Random(0)
    several = [one for one in asked(300, choice=0.0) if one.family != "what"]
    wrong = 0
    for one in several:
        times = [time for window in one.cells[:-2] for time in window_times(*window)]
        wrong += conclude(one, seen(one, times), draw) != one.sample.answer
    assert wrong > 0.3 * len(several)


def test_a_short_event_can_be_missed_by_a_window_of_a_whole_scene_and_not_by_its_halves() -> None:
    missed = 0
    for number in range(200):
        for scene, event in enumerate(world(f"w{number}").events):
            start = scene * SCENE
            halves = [report(f"w{number}", window_times(a, a + CELL)) for a in (start, start + CELL)]
            assert event.shows in halves
            missed += report(f"w{number}", window_times(start, start + SCENE)) == "nothing"
    assert 20 < missed < 120  # half of the events of 1 s, which are a sixth


def test_temporal_answers_are_ranges_and_options_hold_the_answer_once() -> None:
    for one in asked(200, families={"when": 1, "first": 1, "odd": 1}, choice=0.5):
        sample = one.sample
        if sample.type == "temporal":
            found = extract_window(str(sample.answer))
            assert found is not None
            assert found[1] - found[0] == SCENE
        if sample.options:
            assert len(set(sample.options)) == 4
            assert set(one.glyphs) <= set(sample.options)


@pytest.mark.parametrize("kind", ["parallel", "direct", "sequential", "none"])
def test_a_clean_teacher_is_right_and_strict(student: QwenVL, kind: Kind) -> None:
    dispatch: Dispatch = "parallel" if kind == "direct" else kind
    config = EpisodeConfig(frame_budget=64, dispatch=dispatch, call_timeout=None, force_answer=False)
    for one in asked(40):
        episode = play(one, student.chat, config, script(one, kind, 64, one.sample.video))
        assert format_strict(episode) == 1
        if kind in ("parallel", "sequential"):
            assert reward(episode, RewardConfig())["accuracy"].value == 1
            assert episode.tool_calls == len(one.cells)
            assert true_reports(episode) == 1
        else:
            assert episode.tool_calls == 0


@pytest.mark.parametrize(("style", "low", "high"), [("clean", 1.0, 1.0), ("plain", 0.7, 0.97), ("sloppy", 0.0, 0.2)])
def test_styles_keep_the_format_as_well_as_they_say(student: QwenVL, style: Style, low: float, high: float) -> None:
    draw = random.Random(0)
    config = EpisodeConfig(frame_budget=4, call_timeout=None, force_answer=False)
    episodes = [
        play(one, student.chat, config, script(one, "parallel", 4, one.sample.video, style, draw)) for one in asked(60)
    ]
    strict = sum(format_strict(episode) for episode in episodes) / len(episodes)
    assert low <= strict <= high
    assert all(episode.tool_calls > 0 for episode in episodes)  # also a sloppy call runs


def test_look_traces_train_what_is_seen_and_not_the_times(student: QwenVL) -> None:
    (trace,) = islice(traces(student.chat, Mixture({"look": 1}, look_frames=(5,)), 0), 1)
    sampled = "".join(segment.text for segment in trace if segment.sampled)
    assert "seconds" not in sampled
    assert len(sampled.split()) == 10  # a ground and a glyph or nothing for each frame
    assert len(trace.images) == 5


def test_several_questions_can_be_asked_about_one_video(student: QwenVL) -> None:
    one, three = (
        next(traces(student.chat, Mixture({"none": 1}, budgets=(8,), questions=count), 0)) for count in (1, 3)
    )
    assert three.ids[: len(one.ids)] == one.ids
    assert sum(segment.sampled for segment in three) == 3
    assert len(three.images) == len(one.images) == 8
    assert sum("</answer>" in segment.text for segment in three if segment.sampled) == 3


def test_families_can_be_chosen() -> None:
    wanted: dict[Family, float] = {"count": 1}
    for one in asked(40, families=wanted):
        assert one.family == "count"
        shown = [event.shows for event in world(one.sample.video).events]
        assert one.sample.answer == str([shown[scene] for scene in one.scenes].count(one.glyphs[0]))
        assert one.glyphs[0] in GLYPHS


def test_a_trained_tokenizer_speaks_all_styles_in_few_tokens(student: QwenVL) -> None:
    for style in MANNERS:
        mixture = Mixture({"parallel": 1}, budgets=(4,), style=style)
        assert all(len(trace.ids) < 420 for trace in islice(traces(student.chat, mixture, 1), 20))
