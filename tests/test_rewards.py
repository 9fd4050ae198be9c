"""Rewards, against values computed by hand.

Locked here: strictness of whole episodes; accuracy by type, where wrong is 0 and a failed episode, a missing judge or
an unusable reference answer is unscored; the tool reward reads what happened, and never grows with the number of calls.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import LONG
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.agent import EpisodeConfig, run_episode
from paravt.engines.scripted import Cut, ScriptedEngine
from paravt.errors import RecipeError
from paravt.rewards import (
    RewardConfig,
    accuracy,
    answer_tokens,
    assistant_text,
    format_strict,
    junk_after_answer,
    load_function,
    logged,
    reward,
    token_f1,
    tool_reward,
    turn_kinds,
    window_iou,
)
from paravt.turns import parse_turn, render_call
from paravt.types import BadToolCall, Crop, Episode, EpisodeError, Sample, Score, Segment, Trace, Window
from paravt.video import FrameReader

CASES = json.loads((Path(__file__).parent / "cases" / "turns.json").read_text(encoding="utf-8"))
END = "<|im_end|>"
THINK = "<think>\nlong enough reasoning\n</think>\n"
ANSWER = "<answer>B</answer>"
CALL = render_call("crop_video", {"start_time": 1, "end_time": 2})


# --- whole episodes ---------------------------------------------------------------------------------------------------


def play(*turns: str, prefix: str = "", ran: int = 0, error: EpisodeError | None = None, **fields) -> Episode:
    """An episode with these sampled turns, each after the forced prefix."""
    segments = []
    for n, text in enumerate(turns):
        segments.append(Segment((), False, ("" if n == 0 else "\nreply") + "<|im_start|>assistant\n" + prefix))
        segments.append(Segment((), True, text))
    parsed = tuple(parse_turn(prefix + text) for text in turns)
    calls = [call for turn in parsed for call in turn.calls]
    crops = tuple(
        Crop(0, n, "bad" if isinstance(call, BadToolCall) or n >= ran else "ran", call, Window(0, 1), "a cat", None)
        for n, call in enumerate(calls)
    )
    answer = parsed[-1].answer if parsed else None
    sample = Sample("s", "v", "q", ("a cat", "a dog"), "B", "choice")
    main = Trace("main", "main", tuple(segments), "stop")
    errors = (error,) if error else ()
    return replace(Episode(sample, 4, "parallel", main, parsed, crops, answer, errors=errors), **fields)


FAILURE = EpisodeError("engine", "main", "server down", scored=False)


def test_the_text_that_is_scored():
    turns = ("a, long enough</think>" + CALL + END, "b</think>" + ANSWER + END)
    episode = play(*turns, prefix="<think>\n")
    assert assistant_text(episode) == "<think>\n" + turns[0] + "<think>\n" + turns[1]
    assert assistant_text(episode, with_prefix=False) == "".join(turns)
    assert logged(episode)["f_graded"] == 1.0
    # answer 0.5; the think is not seen, neither is its anchor; nothing is balanced
    assert logged(episode)["f_release"] == pytest.approx(0.5)
    plain = play(THINK + ANSWER)
    assert assistant_text(plain) == assistant_text(plain, with_prefix=False) == THINK + ANSWER


@pytest.mark.parametrize("sampled", ["", "x", " x \n", END, "x" + END, " \n" + END, "x<|endoftext|> ", " "])
@pytest.mark.parametrize("prefix", ["", "<think>\n", "<answer>"])
def test_the_prefix_is_what_was_not_sampled(prefix, sampled):
    assert assistant_text(play(sampled, prefix=prefix)) == prefix + sampled


def test_strict_episodes():
    assert format_strict(play(THINK + CALL + END, THINK + ANSWER + END))
    assert not format_strict(play(THINK + CALL + END, ANSWER + END))
    assert not format_strict(play("look</think>" + CALL, THINK + ANSWER))
    assert not format_strict(play(THINK + CALL))  # no answer
    assert not format_strict(play())
    assert not format_strict(play(THINK + ANSWER, forced=True))


@pytest.mark.parametrize(
    ("text", "junk"),
    [
        (THINK + ANSWER + END, False),
        (THINK + ANSWER + " \n" + END, False),
        (THINK + ANSWER + " Yes.", True),
        (THINK + ANSWER + "</answer>", True),
        (ANSWER + CALL, True),
        (THINK + "<answer></answer>" + ANSWER, False),
        ("<think>so <answer>B</answer> then</think>" + ANSWER, False),
        ("<think>so " + ANSWER + " then", True),
        (THINK + "<answer>B", False),
        (THINK + CALL + " and so on", False),
    ],
)
def test_junk_after_the_answer(text, junk):
    assert junk_after_answer(play(text)) is junk


def test_logs():
    found = logged(play(THINK + CALL + CALL + "<tool_call>?</tool_call>" + END, THINK + ANSWER + "!" + END, ran=1))
    assert found == {
        "f_strict": 0.0, "f_graded": 1.0, "f_release": 1.0, "kappa": 1.0, "attempts": 3.0, "junk": 1.0,
        "answered": 1.0, "forced": 0.0, "turns": 2.0, "length_stops": 0.0, "report_length_stops": 0.0,
    }  # fmt: skip
    assert logged(play())["f_graded"] == 0.0


async def test_the_episodes_of_the_agent(tiny):
    """A real episode: the prefix, a turn that was cut off, a forced answer."""
    sample = Sample("s", LONG, "Which?", ("a cat", "a dog"), "B", "choice")
    turns = [Cut("still thinking </think>" + CALL), "really </think>" + ANSWER]
    engine = ScriptedEngine(tiny.chat, {"main": turns, "crop/0/0": [Cut("a cat")]})
    config = EpisodeConfig(frame_budget=2, crop_max_frames=2, think_prefix=True)
    episode = await run_episode(sample, engine, config, reader=FrameReader())
    assert assistant_text(episode) == f"<think>\nstill thinking </think>{CALL}<think>\nreally </think>{ANSWER}{END}"
    assert turn_kinds(episode) == ("ok", "ok")
    found = logged(episode)
    assert [found[name] for name in ("length_stops", "report_length_stops", "kappa", "f_strict")] == [1, 1, 1, 1]
    assert reward(episode, RewardConfig(format_weight=1.0, tool_weight=1.0))["total"].value == pytest.approx(2.8)
    engine = ScriptedEngine(tiny.chat, {"main": ["hm", "A</answer>"]})
    episode = await run_episode(sample, engine, config, reader=FrameReader())
    assert turn_kinds(episode) == ("think_unclosed", "forced")
    assert assistant_text(episode) == f"<think>\nhm{END}<answer>A</answer>{END}"
    assert reward(episode, RewardConfig())["total"].value == 0.0


# --- accuracy ---------------------------------------------------------------------------------------------------------


def choice(gold: str | None, *options: str) -> Sample:
    return Sample("s", "v", "q", options, gold, "choice")


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        ("B", "B", 1.0),
        ("b", "(B) a dog", 1.0),
        ("(B)", "A", 0.0),
        ("B.", "a dog", 1.0),
        ("a dog", "B", 1.0),
        ("A dog.", "B", 1.0),
        ("B. a dog", "b", 1.0),
        ("a cat", "a cat", 1.0),
        ("B", "A or B", 0.0),
        ("B", "none of them", 0.0),
        ("B", "C", 0.0),
        ("B", None, 0.0),
        ("B", "  ", 0.0),
        ("C", "B", None),
        ("a horse", "B", None),
        ("A. a dog", "B", None),
        ("", "B", None),
        (None, "B", None),
    ],
)
def test_choice(gold, answer, value):
    for options in (("a cat", "a dog"), ("A. a cat", "B. a dog")):
        score = accuracy(choice(gold, *options), answer)
        assert score.value == value
        assert score.explanation


def test_choice_corner_cases():
    assert accuracy(choice("same", "same", "same"), "A").value is None  # the text of two options
    assert accuracy(choice("B", "B", "A"), "B").value == 1.0  # a letter is a label, also if it is an option's text
    # the options are in the question's text
    assert [accuracy(choice("C"), answer).value for answer in ("C", "The answer is (C).", "D", "I think")] == [
        1,
        1,
        0,
        0,
    ]
    assert accuracy(choice("J"), "J").value == 1.0
    assert accuracy(choice("a cat"), "A").value is None


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        ("24.3 - 30.4", "24.3 - 30.4", 1.0),
        ("[10, 20]", "from 15 to 25 seconds", 5 / 15),
        ("0:10 to 0:20", "10.0, 20.0", 1.0),
        ("10 - 20", "20 - 30", 0.0),
        ("10 - 20", "12 - 14", 0.2),
        ("10 - 20", "at 12", 0.0),
        ("10 - 20", None, 0.0),
        ("somewhere", "10 - 20", None),
        ("20", "10 - 20", None),
    ],
)
def test_temporal(gold, answer, value):
    score = accuracy(Sample("s", "v", "q", (), gold, "temporal"), answer)
    assert score.value == (None if value is None else pytest.approx(value))


def test_iou():
    assert window_iou((0, 4), (2, 6)) == window_iou((2, 6), (0, 4)) == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("A red car.", "a red car", 1.0),
        ("the red car", "red car", 1.0),
        ("cat cat cat", "cat", 0.5),
        ("cat", "cat cat cat", 0.5),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("the", "A", 0.0),
        (".", "A", 0.0),
        ("A", "A", 1.0),
        ("The", "the", 1.0),
        ("vitamin A", "vitamin B", 0.5),
        ("[1.5, 20]", "[15, 20]", 0.5),
        ("1.50 s", "1.5 s", 1.0),
        ("it is 20.0", "20", 0.5),
        ("1,000 birds", "1000 birds", 1.0),
        ("-5", "5", 0.0),
        ("5-7", "5 7", 1.0),
        (".5", "0.5", 1.0),
        ("don’t", "don't", 1.0),
        ("Ｂ", "b", 1.0),
        ("红色汽车", "红色的汽车", 8 / 9),
        ("...", "...", 0.0),
        ("yes", "", 0.0),
    ],
)
def test_token_f1(answer, gold, value):
    assert token_f1(answer, gold) == pytest.approx(value)
    assert token_f1(gold, answer) == pytest.approx(value)


def test_answer_tokens():
    assert answer_tokens("The 3rd car, at 1:05 (or 2.50 s), costs $1,234,567.80!") == [
        "3rd", "car", "at", "1", "05", "or", "2.5", "s", "costs", "1234567.8",
    ]  # fmt: skip


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_texts_have_an_f1(one, other):
    assert 0.0 <= token_f1(one, other) <= 1.0
    assert token_f1(one, other) == token_f1(other, one)
    assert token_f1(one, one) in (0.0, 1.0)


def test_open():
    sample = Sample("s", "v", "q", (), "a red car", "open")
    assert accuracy(sample, "red car").value == pytest.approx(0.8)
    assert accuracy(sample, None) == Score(0.0, None, "no answer")
    assert accuracy(replace(sample, answer=None), "x").value is None


# --- tools ------------------------------------------------------------------------------------------------------------

RIGHT, WRONG = Score(1.0), Score(0.0)


def test_tool_reward():
    assert tool_reward(play(THINK + ANSWER), RIGHT).value == 0.0
    assert tool_reward(play(THINK + "<tool_call>?</tool_call>", THINK + ANSWER), RIGHT).value == 0.0
    parsed, ran = play(THINK + CALL, THINK + ANSWER), play(THINK + CALL, THINK + ANSWER, ran=1)
    assert [tool_reward(parsed, score).value for score in (WRONG, RIGHT)] == pytest.approx([0.1, 0.6])
    assert [tool_reward(ran, score).value for score in (WRONG, RIGHT)] == pytest.approx([0.3, 0.8])
    assert [tool_reward(ran, Score(value)).value for value in (0.49, 0.5)] == pytest.approx([0.3, 0.8])
    many = play(THINK + CALL * 5, THINK + ANSWER, ran=5)
    assert tool_reward(many, RIGHT) == replace(tool_reward(ran, RIGHT), explanation="5 calls executed")
    assert tool_reward(many, RIGHT, call_cost=0.1).value == pytest.approx(0.3)
    assert tool_reward(ran, Score.unscored("judge down")).value is None
    # a response that the model made up is no call
    assert tool_reward(play(THINK + "<tool_response>a cat</tool_response>" + ANSWER), RIGHT).value == 0.0


# --- the sum ----------------------------------------------------------------------------------------------------------


def answer_length(episode: Episode) -> Score:
    return Score(float(len(episode.answer or "")))


def judge_down(episode: Episode) -> Score:
    return Score.unscored("down")


def a_text(episode):
    return "0.5"


def a_score_of_text(episode):
    return Score("0.5")


def raises(episode):
    return {}["score"]


def a_float(episode: Episode) -> float:
    return 1.0


def not_finite(episode: Episode) -> Score:
    return Score(math.nan)


HERE = __name__


def test_the_terms_of_a_reward():
    episode = play(THINK + CALL + END, THINK + ANSWER + END, ran=1)
    name = f"{HERE}:answer_length"
    terms = reward(episode, RewardConfig(format_weight=0.5, tool_weight=1.0, functions=(name,)))
    assert list(terms) == ["accuracy", "format", "tool", name, "total"]
    # the anchor is not in the format reward unless it is asked for: 0.2 + 0.5 + 0.3 + 0.1, cut
    assert [score.value for score in terms.values()] == pytest.approx([1.0, 1.0, 0.8, 1.0, 1 + 0.5 + 0.8 + 1])
    assert reward(episode, RewardConfig())["total"].value == 1.0
    short = play("<think>x", prefix="")
    assert reward(short, RewardConfig())["format"].value == 0.0
    assert reward(short, RewardConfig(anchor_weight=0.5))["format"].value == pytest.approx(-0.15)
    assert reward(play(THINK + ANSWER), RewardConfig(answer_suffix=False))["format"].value == pytest.approx(0.7)


def test_failed_is_not_wrong():
    terms = reward(play(THINK + ANSWER, error=FAILURE), RewardConfig(functions=(f"{HERE}:answer_length",)))
    assert [score.value for score in terms.values()] == [None] * 5
    assert terms["total"].explanation == "main: server down"
    harmless = replace(FAILURE, scored=True)
    assert reward(play(THINK + ANSWER, error=harmless), RewardConfig())["total"].value == 1.0
    unscored = reward(play(THINK + ANSWER), RewardConfig(functions=(f"{HERE}:judge_down",)))
    assert unscored["accuracy"].value == 1.0
    assert unscored["total"].value is None
    assert "judge_down: down" in unscored["total"].explanation


def test_a_judge_takes_the_place_of_accuracy():
    episode = play(THINK + CALL, THINK + ANSWER, ran=1)
    down = reward(episode, RewardConfig(tool_weight=1.0), Score.unscored("judge down"))
    assert [down[name].value for name in ("accuracy", "tool", "total")] == [None, None, None]
    assert reward(episode, RewardConfig(accuracy_weight=0.0), Score.unscored("judge down"))["total"].value == 0.0
    assert reward(episode, RewardConfig(tool_weight=1.0), Score(0.5))["total"].value == pytest.approx(0.5 + 0.8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_colon", "module:function"),
        (":f", "module:function"),
        ("no.such.module:f", "PYTHONPATH"),
        ("math:no_such", "has no function no_such"),
        ("math:pi", "has no function pi"),
    ],
)
def test_user_rewards_that_cannot_be_had(name, message):
    with pytest.raises(RecipeError, match=message):
        load_function(name)
    with pytest.raises(RecipeError, match=message):
        reward(play(THINK + ANSWER), RewardConfig(functions=(name,)))


def test_a_user_reward_can_be_a_number():
    terms = reward(play(THINK + ANSWER), RewardConfig(accuracy_weight=0.0, functions=(f"{HERE}:a_float",)))
    assert terms["total"].value == terms[f"{HERE}:a_float"].value == a_float(play(THINK + ANSWER))


@pytest.mark.parametrize("name", ["not_finite", "a_text", "a_score_of_text"])
def test_user_rewards_that_give_no_score(name):
    with pytest.raises(RecipeError, match="must be a finite number or a Score"):
        reward(play(THINK + ANSWER), RewardConfig(functions=(f"{HERE}:{name}",)))


def test_a_user_reward_that_fails_is_one_line():
    with pytest.raises(RecipeError, match=r"raises' failed on sample .*: KeyError: 'score'") as caught:
        reward(play(THINK + ANSWER), RewardConfig(functions=(f"{HERE}:raises",)))
    assert "\n" not in str(caught.value)
