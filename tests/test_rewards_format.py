"""The published graded format score, condition by condition, against values computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rewards import ANSWER, CALL, CASES, END, THINK

from paravt.rewards import (
    format_graded,
)
from paravt.spans import STRUCTURAL_TAGS

GRADED = [
    # text, with answer suffix and anchor weight 0.5, vanilla
    pytest.param("", 0.0, 0.0, id="nothing"),
    pytest.param("hello", 0.0, 0.0, id="balanced, but nothing to add it to"),
    pytest.param(THINK, 0.2 + 0.5 * 0.4 + 0.1, 0.3 + 0.1, id="think alone"),
    pytest.param(THINK + ANSWER, 1.0, 0.3 + 0.2 + 0.1 + 0.1, id="perfect: 1.15, cut to 1"),
    pytest.param(ANSWER, 0.5 + 0.1, 0.3 + 0.1, id="a bare answer"),
    pytest.param("long enough reasoning\n</think>\n" + ANSWER, 0.5, 0.3, id="the forced prefix hidden"),
    pytest.param("<think>x", -0.15, 0.0, id="negative: the penalty alone"),
    pytest.param("<think>123456789</think>", 0.1 - 0.1, 0.0, id="nine characters are no think"),
    pytest.param("<think> 1234567890 </think>", 0.5, 0.4, id="ten are, stripped"),
    pytest.param("<think>short</think>" + ANSWER, 0.5 + 0.1, 0.3 + 0.1, id="short think: no anchor"),
    pytest.param("<think>long enough <answer>B</answer>", 0.2 + 0.5 - 0.15, 0.3 + 0.3, id="unclosed think, ok"),
    pytest.param("<think>abc<answer>B</answer> and so on", 0.5 - 0.15, 0.3, id="unclosed think ends at the answer"),
    pytest.param("<think>abc<tool_response>and so on", -0.15, 0.0, id="... at any <tool_"),
    pytest.param("<think>abc<|im_end|>and so on", -0.15, 0.0, id="... at the end of the turn"),
    pytest.param("<think>abc, and so on", 0.2 - 0.15, 0.3, id="... or at the end"),
    pytest.param("</think><think>long enough", 0.2 + 0.2 + 0.1, 0.4, id="closed before it is opened"),
    pytest.param(THINK + "<answer> </answer>", 0.5, 0.4, id="blank answer"),
    pytest.param(THINK + "<answer></answer>" + ANSWER, 1.0, 0.7, id="any answer that isn't blank"),
    pytest.param(THINK + "<answer>B", 0.4, 0.3, id="unclosed answer: nothing, and unbalanced"),
    pytest.param(THINK + ANSWER + "</answer>", 1.0, 0.6, id="unbalanced: 1.05, cut to 1"),
    pytest.param(THINK + CALL, 0.4 + 0.3 + 0.1, 0.3 + 0.3 + 0.1, id="think before a call"),
    pytest.param(CALL + THINK, 0.4 + 0.1, 0.3 + 0.1, id="think after a call"),
    pytest.param(CALL, 0.0, 0.0, id="a call alone"),
    pytest.param("<think>x</think>" + CALL, 0.3 + 0.1, 0.3 + 0.1, id="a short think before a call counts there"),
    pytest.param("<think>long enough " + CALL, 0.2 - 0.15 + 0.3, 0.3 + 0.3, id="unclosed think before a call"),
    pytest.param(THINK + CALL.removesuffix("</tool_call>"), 0.7, 0.6, id="unclosed call: parsable, unbalanced"),
    pytest.param(THINK + CALL.removesuffix("</tool_call>") + END, 0.4, 0.3, id="... but not with the end token in it"),
    pytest.param(THINK + "<tool_call></tool_call>", 0.5, 0.4, id="empty call"),
    pytest.param(THINK + "<tool_call>[]</tool_call>", 0.5, 0.4, id="no object"),
    pytest.param(THINK + '<tool_call>{"tool": 1}</tool_call>', 0.5, 0.4, id="no name"),
    pytest.param(THINK + '<tool_call>{"name": 1}</tool_call>', 0.8, 0.7, id="any name"),
    pytest.param(THINK + "<tool_call>?</tool_call>" + CALL, 0.8, 0.7, id="some call"),
    pytest.param(THINK + "<tool_code>f(1)</tool_code>", 0.8, 0.7, id="python form"),
    pytest.param(THINK + "<tool_code>f(1)" + END, 0.7, 0.6, id="python form, unclosed"),
    pytest.param(THINK + "<tool_code>\n # f(1)\n</tool_code>", 0.5, 0.4, id="only a comment"),
    pytest.param(THINK + "<tool_code># a\nf(1)</tool_code>", 0.8, 0.7, id="a line that is no comment"),
    pytest.param(THINK + "<tool_code>f</tool_code>", 0.5, 0.4, id="no parenthesis"),
    pytest.param(THINK + "<tool_code><|im_end|>f(1)</tool_code>", 0.5, 0.4, id="body begins with the end token"),
    pytest.param(THINK + "<tool_code>f</tool_code>" + CALL, 0.8, 0.7, id="first tag, other call"),
    pytest.param(THINK + CALL + END + THINK + ANSWER + END, 1.0, 1.0, id="two turns: the +0.3 is lost on the anchor"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "suffix", "vanilla"), GRADED)
def test_graded_by_condition(text, suffix, vanilla):
    assert format_graded(text) == pytest.approx(suffix, abs=1e-12)
    assert format_graded(text, answer_suffix=False, anchor_weight=0.0) == pytest.approx(vanilla, abs=1e-12)
    assert format_graded(text, answer_suffix=False) == format_graded(text, answer_suffix=False, anchor_weight=0.0)


CASE_VALUES = [
    (0.8, 0.7), (1.0, 0.7), (1.0, 0.7), (1.0, 1.0), (0.55, 0.6), (0.6, 0.4), (0.5, 0.4), (0.5, 0.4), (0.5, 0.4),
    (0.8, 0.7), (0.5, 0.4), (0.5, 0.4), (0.8, 0.7), (0.8, 0.7), (0.8, 0.7), (0.7, 0.6), (0.8, 0.7), (0.8, 0.7),
    (0.8, 0.7), (1.0, 1.0), (1.0, 0.7), (1.0, 1.0), (1.0, 0.6), (0.35, 0.6),
]  # fmt: skip


@pytest.mark.parametrize(("case", "values"), list(zip(CASES, CASE_VALUES, strict=True)), ids=[c["why"] for c in CASES])
def test_graded_of_the_cases(case, values):
    assert format_graded(case["text"]) == pytest.approx(values[0])
    assert format_graded(case["text"], answer_suffix=False) == pytest.approx(values[1])


def test_the_weight_of_the_anchor():
    assert format_graded(THINK + ANSWER, anchor_weight=0.0) == pytest.approx(0.8)
    assert format_graded(THINK, anchor_weight=1.0) == pytest.approx(0.2 + 0.4 + 0.1)
    assert format_graded("<think>x", anchor_weight=1.0) == pytest.approx(-0.3)
    # 0.2 - 0.3: the balance is only for what is above 0
    assert format_graded("<think>long enough", anchor_weight=1.0) == pytest.approx(-0.1)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*STRUCTURAL_TAGS, "x", "long enough to count", "f(1)", CALL]), max_size=10))
def test_graded_is_bounded(parts):
    assert -0.15 <= format_graded("".join(parts)) <= 1.0


def test_long_texts_take_linear_time():
    for unit in ("<think>", "<answer>", "<tool_call>", "<tool_code>(", "<answer></tool_call>"):
        format_graded(unit * 20_000)
