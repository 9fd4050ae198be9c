"""The turn parser: which structure of a turn wins, what is repaired, what is strict, and that nothing breaks it.

The cases of `cases/turns.json` are the reference; the others lock the rules of the module's docstring.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.tools import TOOLS, crop_window
from paravt.turns import parse_turn, render_call
from paravt.types import BadToolCall, ToolCall

CASES = json.loads((Path(__file__).parent / "cases" / "turns.json").read_text(encoding="utf-8"))
THINK = "<think>\nI look.\n</think>\n"


def call(start: float, end: float) -> str:
    return render_call("crop_video", {"start_time": start, "end_time": end})


def windows(turn):
    found = [crop_window(item.arguments) for item in turn.runnable]
    return [[window.start_time, window.end_time] for window in found]


def errors(turn):
    return [item.error for item in turn.calls if isinstance(item, BadToolCall)]


@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
def test_cases(case):
    turn = parse_turn(case["text"])
    assert windows(turn) == case["windows"]
    assert len(errors(turn)) == case["bad"]
    assert turn.answer == case["answer"]
    assert turn.strict is case["strict"]


# --- which structure wins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found", "bad", "answer"),
    [
        pytest.param(THINK, [], 0, None, id="nothing but a think"),
        pytest.param("", [], 0, None, id="nothing"),
        pytest.param(THINK + "<answer>B", [], 0, "B", id="unclosed answer at the end"),
        pytest.param(THINK + "<answer>", [], 0, None, id="opened answer"),
        pytest.param(THINK + "<answer>B</think>", [], 0, "B", id="answer closed with the wrong tag"),
        pytest.param(THINK + "<answer>B</answer><answer>C</answer>", [], 0, "B", id="two answers: the first"),
        pytest.param(THINK + "<answer></answer><answer>C</answer>", [], 0, "C", id="a blank answer is none"),
        pytest.param(THINK + "<answer><answer>C</answer></answer>", [], 0, "C", id="answer tag twice"),
        pytest.param(THINK + "<answer></answer>" + call(1, 2), [[1, 2]], 0, None, id="blank answer, then a call"),
        pytest.param(THINK + "<answer>B\n" + call(1, 2), [[1, 2]], 0, None, id="unclosed answer, then a call"),
        pytest.param(THINK + "<tool_call>?</tool_call><answer>B</answer>", [], 1, None, id="closed bad call, answer"),
        pytest.param(THINK + "<tool_call>?<answer>B</answer>", [], 0, "B", id="unclosed bad call, answer"),
        pytest.param(THINK + "<tool_call>? <answer>B", [], 1, None, id="all unclosed: the first"),
        pytest.param(THINK + "<answer>B <tool_call>?", [], 0, "B", id="all unclosed: the first (answer)"),
        pytest.param(THINK + "<tool_call>", [], 1, None, id="opened call"),
        pytest.param(THINK + "<tool_call>\n" + call(1, 2), [[1, 2]], 0, None, id="call tag twice"),
        pytest.param(THINK + "<tool_call>?\n" + call(1, 2), [[1, 2]], 1, None, id="unclosed bad call, then a call"),
        pytest.param(
            THINK + call(1, 2) + "<answer>B</answer>" + call(3, 4), [[1, 2], [3, 4]], 0, None, id="all calls run"
        ),
        pytest.param("<think>so <answer>A</answer> or " + call(1, 2) + "</think>", [], 0, None, id="quoted"),
        pytest.param(
            THINK + call(1, 2) + "<think>" + call(3, 4) + "</think>", [[1, 2]], 0, None, id="quoted in a later think"
        ),
        pytest.param(
            "<think>a " + call(1, 2) + "<think>b</think><answer>B</answer>", [[1, 2]], 0, None, id="think reopened"
        ),
        pytest.param("because.</think>\n<answer>B</answer>", [], 0, "B", id="think never opened"),
        pytest.param("<Answer>B</Answer> <answer >C", [], 0, None, id="other tags are text"),
    ],
)
def test_which_structure_wins(text, found, bad, answer):
    turn = parse_turn(text)
    assert windows(turn) == found
    assert len(errors(turn)) == bad
    assert turn.answer == answer
    assert not turn.strict


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", "<|im_end|>\n", "<|im_end|>\n<|endoftext|>"])
def test_end_markers_are_not_part_of_the_text(end):
    turn = parse_turn(THINK + "<answer>B</answer>" + end)
    assert turn.text == THINK + "<answer>B</answer>"
    assert turn.strict
    assert parse_turn(THINK + "<answer>B" + end).answer == "B"
    assert parse_turn(THINK + call(1, 2).removesuffix("</tool_call>") + end).runnable[0].repaired


def test_think():
    assert parse_turn("<answer>B</answer>").think is None
    assert parse_turn(THINK).think == "I look."
    assert parse_turn("<think>open <answer>B</answer>").think == "open"
    assert parse_turn("<think>\n<think>\nwell\n</think>\n<answer>B</answer>").think == "well"


# --- strict ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        THINK + call(1, 2),
        THINK + call(1.5, 2) + call(3, 4) + "\n\n" + call(5, 6),
        THINK + "<answer>B</answer>",
        THINK + "<answer>\nThe event happens in the 24.3 - 30.4 seconds.\n</answer>",
        " \n" + THINK + "<answer>B</answer>\n",
        "<think></think><answer>B</answer>",
        "<think>a <answer>quote</answer> </answer> b</think><answer>B</answer>",
        THINK
        + '<tool_call>{"arguments":{"end_time":2,"start_time":1,"video_path":"v"},"name":"crop_video"}</tool_call>',
    ],
)
def test_strict(text):
    assert parse_turn(text).strict


@pytest.mark.parametrize(
    "text",
    [
        call(1, 2),
        "Well. " + THINK + call(1, 2),
        THINK + call(1, 2) + "That's all.",
        THINK + call(1, 2) + "and" + call(3, 4),
        THINK + THINK + "<answer>B</answer>",
        "<think>\n<think>\nwell</think>\n<answer>B</answer>",
        THINK + "<answer>B</answer>" + THINK,
        THINK + "<answer>B<think></answer>",
        THINK + "<answer>B</answer>.",
        THINK + "<answer>B</answer><|im_end|>more",
        THINK + "</think><answer>B</answer>",
        THINK + "<tool_code>crop_video(1, 2)</tool_code>",
        THINK + '<tool_code>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}</tool_code>',
        THINK + call(1, 2).replace("</tool_call>", "</tool_code>"),
        THINK + call(1, 2) + call(2, 1),
    ],
)
def test_not_strict(text):
    assert not parse_turn(text).strict


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2, "fps": 1}}',
        '{"name": "crop_video", "arguments": {"start_time": -1, "end_time": 2}}',
        '{"name": "crop_video", "arguments": {"start_time": "1", "end_time": 2}}',
        '{"name": "crop_video", "arguments": {"start": 1, "end": 2}}',
        '{"name": "crop_video", "arguments": {"start_time": 0, "start_time": 1, "end_time": 2}}',
        '{"name": "x", "name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}',
        '{"id": 1, "name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}',
        '{"name": "crop_video", "parameters": {"start_time": 1, "end_time": 2}}',
        '{"name": "crop_video", "start_time": 1, "end_time": 2}',
        '{"type": "function", "function": {"name": "crop_video", "arguments": "{\\"start\\": 1, \\"end\\": 2}"}}',
        '[{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}]',
        '```json\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}\n```',
        '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}}',
        'I crop: {"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}} (again)',
        "{'name': 'crop_video', 'arguments': {'start_time': 1, 'end_time': 2}}",
        "[{'name': 'crop_video', 'arguments': {'start_time': 1, 'end_time': 2}}]",
        "{'name': 'crop_video', 'arguments': \"{'start_time': 1, 'end_time': 2}\"}",
        "crop_video(1, 2)",
        "crop_video(1, end_time=2)",
        "crop_video(start_time=0, start_time=1, end_time=2)",
        "crop_video('v.mp4', start_time=1, end_time=2)",
        "crop_video('v.mp4', 1, end_time=2)",
        "crop_video (\n  start_time = 1,\n  end_time = 2,\n)",
        "```python\nclip = crop_video(1, 2)\nprint(clip)\n```",
        "print(default_api.crop_video(start_time='0:01', end_time='0:02'))",
        "# crop_video(8, 9) would be too late\ncrop_video(1, 2)",
        "[crop_video(1, 2)]",
    ],
)
def test_repaired(body):
    for tag in ("tool_call", "tool_code"):
        turn = parse_turn(f"{THINK}<{tag}>{body}</{tag}>")
        assert windows(turn) in ([[1, 2]], [[0, 2]])
        assert not errors(turn)
        assert turn.runnable[0].repaired
        assert not turn.strict


def test_several_python_calls_in_one_block():
    body = "crop_video(1, 2)\ncrop_video(start_time=3, end_time=4)\nprint(crop_video('v.mp4', 5, 6), crop_video(7, 8))"
    assert windows(parse_turn(f"<tool_code>\n{body}\n</tool_code>")) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_one_bad_call_does_not_void_its_peers_in_a_block():
    turn = parse_turn("<tool_code>crop_video(1, 2\ncrop_video(3, 4)\ncrop_video(6, 5)\nopen('x')\n</tool_code>")
    assert windows(turn) == [[3, 4]]
    assert len(errors(turn)) == 3
    assert [isinstance(item, ToolCall) for item in turn.calls] == [False, True, False, False]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "empty"),
        ("look at the end", "no call"),
        ("[1, 2]", "no call"),
        ("print('hello')", "no call"),
        ("{}", '"name"'),
        ('{"name": 3, "arguments": {}}', '"name"'),
        ('{"name": "crop_video", "arguments": 3}', '"arguments"'),
        ('{"name": "crop_video", "arguments": "now"}', '"arguments"'),
        ('{"name": "crop_video"}', "start_time is missing"),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": NaN}}', "not valid JSON"),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": Infinity}}', "not valid JSON"),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 1e999}}', "finite"),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": ' + "9" * 400 + "}}", "finite"),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": true}}', "end_time must be a number"),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}', "cut off"),
        ('{"name": "crop_video", "arguments": {"a": "' + "x" * 5000 + '"}}', "more than 4096 characters"),
        ('{"name": "' + "\\ud800" * 99 + '", "arguments": {}}', "unknown tool"),
        ("[" * 1500 + "]" * 1500, "not valid JSON"),
        ("[" + "-" * 4000 + "1]", "not valid JSON"),
        ("{" + "(" * 1500 + ")" * 1500 + "}", "not valid JSON"),
        ("crop_video(__import__('os').system('true'), 2)", "plain numbers"),
        ("crop_video(a, b)", "plain numbers"),
        ("crop_video(**{'start_time': 1, 'end_time': 2})", "plain numbers"),
        ("crop_video(1, 2, 3, 4)", "too many arguments"),
        ("crop_video(1)", "start_time is missing"),
        ("crop_video(\0, 2)", "not valid JSON"),
        ("open_file('x')", "unknown tool 'open_file'; available tools: crop_video"),
    ],
)
def test_bad_calls_say_why(body, reason):
    turn = parse_turn(f"{THINK}<tool_call>{body}</tool_call>")
    assert len(turn.calls) == 1
    (error,) = errors(turn)
    assert reason in error
    assert "\n" not in error
    assert len(error) < 160
    error.encode("utf-8")


def test_tools_are_those_given():
    turn = parse_turn(THINK + call(1, 2), tools={})
    assert errors(turn) == ["unknown tool 'crop_video'; available tools: none"]
    assert parse_turn(THINK + "<answer>B</answer>", tools={}).strict


# --- rendering ------------------------------------------------------------------------------------------------------


def test_render_call_is_canonical():
    assert call(10, 20.0) == (
        '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 10, "end_time": 20}}\n</tool_call>'
    )
    assert '"start_time": 40.5' in call(40.5, 55)
    with pytest.raises(ValueError, match="JSON"):
        call(float("nan"), 1)


@settings(deadline=None)
@given(
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.just("</tool_call>"),
)
def test_rendered_calls_round_trip(start, end, path):
    arguments = {"start_time": min(start, end), "end_time": max(start, end) + 1.0}
    if path is not None:
        arguments["video_path"] = path
    turn = parse_turn(THINK + render_call("crop_video", arguments))
    assert turn.calls == (ToolCall("crop_video", arguments),)
    assert turn.strict


# --- nothing breaks it ----------------------------------------------------------------------------------------------

fragments = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_code>", "</tool_code>", "<answer>", "</answer>"),
        *(
            "<|im_end|>",
            "<|endoftext|>",
            "B",
            "\n",
            " ",
            "crop_video(1, 2)",
            "crop_video(",
            "print(",
            ")",
            "{",
            "}",
            "[",
        ),
        *("]", '"', "'", "\\", "#", ",", ":", "-", "\0", "\ud800", "٣", "NaN", "1e999", '"name"', '"arguments"'),
        '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}',
        '{"name": "crop_video", "arguments": {"start_time": "1:00", "end_time": 9}}',
        "{'name': 'crop_video', 'arguments': {'start_time': 1, 'end_time': 2}}",
    ]
)
texts = (
    st.text() | st.lists(fragments, max_size=12).map("".join) | st.lists(fragments | st.text(max_size=3)).map("".join)
)


@settings(deadline=None)
@given(texts)
def test_any_text_parses_and_the_invariants_hold(text):
    turn = parse_turn(text)
    assert parse_turn(text) == turn
    assert text.startswith(turn.text)
    assert turn.answer is None or (turn.answer.strip() and not turn.calls)
    calls_run = bool(turn.calls) and all(isinstance(item, ToolCall) and not item.repaired for item in turn.calls)
    if turn.strict:
        assert (turn.answer is not None) != calls_run
        assert turn.think is not None
    assert all(item.name in TOOLS for item in turn.runnable)
    assert all(item.error and "\n" not in item.error for item in turn.calls if isinstance(item, BadToolCall))


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 30_000,
        "<tool_call>" * 20_000,
        "<answer>" * 25_000,
        "<answer>b" * 20_000,
        "<|im_end|>" * 20_000,
        " " * 200_000,
        "<tool_call>{" * 15_000,
        "<tool_call>" + "{" * 200_000,
        "<tool_call>" + "[{" * 50_000 + "}]" * 50_000,
        '<tool_call>{"' + '\\"' * 100_000,
        "<tool_call>" + '"' * 200_000,
        "<tool_call>" + "a" * 200_000,
        "<tool_call>" + "a(" * 100_000,
        "<tool_call>" + "a\t\t\t\t" * 40_000,
        "<tool_call>" + "crop_video(1, 2){" * 5_000,
        "<tool_call>{" + "}(" * 100_000,
        "<tool_call>" + ("[0" + "+1" * 2_000 + "]") * 50,
        "<tool_call>" + ('{"a":' * 600 + "1" + "}" * 600) * 50,
    ],
    ids=lambda text: text[:20],
)
def test_adversarial_texts_take_linear_time(text):
    turn = parse_turn(text)
    assert not turn.strict
    assert all(len(item.raw) <= 1000 for item in turn.calls if isinstance(item, BadToolCall))
