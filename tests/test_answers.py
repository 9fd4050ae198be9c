"""Answer extraction: the letter or the window an answer names, and none rather than a guess.

The cases of `cases/answers.json` are the reference; the others lock the order of the rules and known traps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.answers import extract_letter, extract_window

CASES = json.loads((Path(__file__).parent / "cases" / "answers.json").read_text(encoding="utf-8"))
OPTIONS = CASES["options"]
TEN = [f"number {n}" for n in range(10)]


@pytest.mark.parametrize("case", CASES["letters"], ids=lambda case: case["text"])
def test_letter_cases(case):
    assert extract_letter(case["text"], OPTIONS) == case["letter"]


@pytest.mark.parametrize("case", CASES["times"], ids=lambda case: case["text"])
def test_time_cases(case):
    window = extract_window(case["text"])
    assert (window and list(window)) == case["window"]


# --- letters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("final answer is **B**", "B"),
        ("answer: b", "B"),
        ("**Answer:** C", "C"),
        ("ANSWER\nB", "B"),
        ("The best option is D.", "D"),
        ("The answer is option (B).", "B"),
        ("The correct choice would be: C", "C"),
        ("I'd go with option D.", "D"),
        ("\\boxed{C}", "C"),
        ('{"answer": "C"}', "C"),
        ("A is correct", "A"),
        ("C is the correct answer, not D", "C"),
        ("First I thought the answer is A; the final answer is C, like A.", "C"),
        ("The answer is A because it is red", "A"),
        ("the answer is a man walks a dog", "B"),
        ("Answer: A man walks a dog", "B"),
        ("The answer is not A but C", "C"),
    ],
)
def test_explicit_phrases(text, letter):
    assert extract_letter(text, OPTIONS) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("a.", "A"),
        ("(a)", "A"),
        ("A: a red car", "A"),
        ("A, since a car passes", "A"),
        ("Option C", "C"),
        ("option c", "C"),
        ("b because a car passes", "B"),
        ("B. A is wrong", "B"),
        ("C!", "C"),
        ("__C__", "C"),
        ("'C'", "C"),
        ("（Ｃ）", "C"),
        ("C and nothing else", "C"),
        ("B, a man", "B"),
        ("A man", None),
        ("A man is here", None),
        ("a man", None),
        ("C'est la vie", None),
        ("B-roll footage", None),
        ("C4 goes off", None),
    ],
)
def test_leading_labels(text, letter):
    assert extract_letter(text, OPTIONS) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("so a", "A"),
        ("I think C.", "C"),
        ("Based on my analysis, it is d", "D"),
        ("Neither A nor B, hence C.", "C"),
        ("B and C are wrong. D", "D"),
        ("Between B and C I pick C", "C"),
        ("答案是B", "B"),
        ("I believe (c) fits", "C"),
        ("It was shown in frame B of the clip", "B"),
    ],
)
def test_concluding_and_only_letters(text, letter):
    assert extract_letter(text, OPTIONS) == letter


@pytest.mark.parametrize(
    "text",
    [
        "The answer is A or B",
        "Answer: A/B",
        "answer: A and B",
        "B, C",
        "A B",
        "A or maybe B",
        "A,B,C,D",
        "Between B and C",
        "The answer is E, not A",
        "E. none of the above",
        "Vitamin E",
        "Not B",
        "It isn't (C)",
        "B is wrong",
        "not a red car",
        "a red car and a man walks a dog",
        "answer a question",
        "I",
        "I.",
        "I'm sure",
        "   \n",
        "?!",
    ],
)
def test_no_letter_or_more_than_one(text):
    assert extract_letter(text, OPTIONS) is None


def test_pronoun_and_ninth_option():
    assert extract_letter("I", TEN) == "I"
    assert extract_letter("(I)", TEN) == "I"
    assert extract_letter("The answer is I.", TEN) == "I"
    assert extract_letter("I think it is J", TEN) == "J"
    assert extract_letter("I think so", TEN) is None
    assert extract_letter("I, for one, can't tell", TEN) is None


def test_option_texts_that_contain_one_another():
    options = ["red", "a red car", "a red car and a dog", "blue"]
    assert extract_letter("red", options) == "A"
    assert extract_letter("It is a red car.", options) == "B"
    assert extract_letter("A red car and a dog are seen", options) == "C"
    assert extract_letter("It is a red car, so red", options) is None
    assert extract_letter("The answer is a red car and a dog.", options) == "C"
    assert extract_letter("It is covered in blueberries", options) is None


def test_option_texts():
    assert extract_letter("Walking.", ["A. Walking", "B. Running"]) == "A"
    assert extract_letter("RUNNING", ["A. A. Walking", "(B) Running"]) == "B"
    assert extract_letter("It is 3", ["1", "2", "3.5", "3"]) == "D"
    assert extract_letter("3.5 times", ["1", "2", "3.5", "3"]) == "C"
    assert extract_letter("No", ["Yes", "No"]) == "B"
    assert extract_letter("No, he does not", ["Yes", "No"]) == "B"
    assert extract_letter("红色的车开过来了", ["红色的车", "狗"]) == "A"
    assert extract_letter("Un CAFÉ noir", ["thé", "café"]) == "B"
    assert extract_letter("B", ["B", "A"]) == "B"
    assert extract_letter("A. Lincoln", ["a war", "A. Lincoln"]) == "B"


def test_duplicate_and_empty_options():
    assert extract_letter("a dog", ["a dog", "a dog", "a cat"]) is None
    assert extract_letter("a cat", ["a dog", "a dog", "a cat"]) == "C"
    assert extract_letter("B", ["a dog", "a dog", "a cat"]) == "B"
    assert extract_letter("B", ["", ""]) == "B"
    assert extract_letter("something", ["", ""]) is None
    assert extract_letter("B", []) is None


def test_at_most_26_options():
    options = [f"option number {n}" for n in range(30)]
    assert extract_letter("Z", options) == "Z"
    assert extract_letter("option number 25", options) == "Z"
    assert extract_letter("option number 28", options) is None


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("12s–19s", (12, 19)),
        ("12—19", (12, 19)),
        ("12-19", (12, 19)),
        ("24.3 -30.4", (24.3, 30.4)),
        (".5 ~ 1.5", (0.5, 1.5)),
        ("(12.5,18)", (12.5, 18)),
        ("12 19", (12, 19)),
        ("between 5 and 9 seconds", (5, 9)),
        ("between 5 and 9", (5, 9)),
        ("12 until 19", (12, 19)),
        ("from second 12 to second 19", (12, 19)),
        ("from about 12 to about 19 seconds", (12, 19)),
        ("From 12 seconds, to 19 seconds.", (12, 19)),
        ("<12.5 seconds> to <19 seconds>", (12.5, 19)),
        ("starts at 12 and ends at 19.5", (12, 19.5)),
        ("Start: 0:12\nEnd: 0:19", (12, 19)),
        ('{"start_time": 12.0, "end_time": 19.5}', (12, 19.5)),
        ("00:00:19,700 --> 00:00:25,600", (19.7, 25.6)),
        ("5 to 9 minutes", (300, 540)),
        ("1 min 5 s to 1 min 20 s", (65, 80)),
        ("1m5s - 1m20s", (65, 80)),
        ("1:05 to 80", (65, 80)),
        ("0 - 5", (0, 5)),
    ],
)
def test_notations(text, window):
    assert extract_window(text) == pytest.approx(window)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("The clip is 0 - 120 seconds. The event happens in 24.3 - 30.4.", (24.3, 30.4)),
        ("It scores 3-2, from 12 to 19 seconds", (12, 19)),
        ("I saw 2, 3 dogs; the answer is 5 to 9", (5, 9)),
        ("at 5, 12 - 19", (12, 19)),
        ("In 3 of 4 frames it happens from 1:05 to 1:20.", (65, 80)),
        ("It happens at 5 to 9. The final answer: 12 to 19", (12, 19)),
        ("12.5s to 18.0s (of 0 - 60 s)", (12.5, 18)),
        ("5 to 9, then 12 to 19", (5, 9)),
    ],
)
def test_the_best_introduced_pair_wins(text, window):
    assert extract_window(text) == window


@pytest.mark.parametrize(
    "text",
    [
        *("", "12 s", "12:19", "happens at 12 s", "12 - 12", "nan - 5", "5 - inf", "-5 to 10", "[-5, 10]", "5 to -3"),
        *("start: -5, end: 10", "2020-05-06", "5-9%", "v2 - 5", "2 and 3 people", "9" * 400 + " - 5", "twelve to 19"),
    ],
)
def test_no_window(text):
    assert extract_window(text) is None


# --- nothing breaks them --------------------------------------------------------------------------------------------

fragments = st.sampled_from(
    [
        *"ABCDEIabi",
        *"0159",
        "answer is ",
        "answer: ",
        " or ",
        " and ",
        " - ",
        " to ",
        "not ",
        ".",
        ",",
        ":",
        "(",
        ")",
        "*",
        "a red car",
        "a man walks a dog",
        "nothing",
        "\n",
        " seconds",
        "start ",
        "end ",
        "between ",
        "\ud800",
        "\0",
        "１",
        "ſ",
    ]
)
texts = st.text() | st.lists(fragments, max_size=12).map("".join)


@settings(deadline=None)
@given(texts, st.lists(st.text(max_size=5), max_size=5))
def test_any_text_gives_a_letter_of_the_options_or_none(text, options):
    for choices in (OPTIONS, TEN, options):
        letter = extract_letter(text, choices)
        assert letter is None or ord(letter) - ord("A") in range(len(choices))


@settings(deadline=None)
@given(texts)
def test_any_text_gives_a_window_or_none(text):
    window = extract_window(text)
    assert window is None or 0 <= window[0] < window[1] < math.inf


@settings(deadline=None)
@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_written_windows_are_read(start, end):
    start, end = round(start, 1), round(end, 1)
    expected = (min(start, end), max(start, end)) if start != end else None
    for template in ("The event happens in the {} - {} seconds", "[{}, {}]", "from {} to {}", "{}s–{}s"):
        assert extract_window(template.format(start, end)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "A " * 50_000,
            "A*" * 30_000,
            "B or " * 20_000,
            "answer: " * 20_000,
            "a red car " * 10_000,
            "(" * 100_000 + "x B",
        ),
        "not B and " + "(" * 20_000 + "xx " + "B, " * 10_000,
        *("1 " * 50_000, "1" * 100_000, "1:" * 50_000, "1-2 " * 15_000, "1, " * 20_000, "1 to the " + "the " * 30_000),
        *("start 1 " * 15_000, "start" + "a" * 100_000, "start_" * 20_000, "1 min 5 " * 15_000, " \t" * 50_000),
    ],
    ids=lambda text: text[:12],
)
def test_adversarial_texts_take_linear_time(text):
    extract_letter(text, OPTIONS)
    extract_window(text)
