"""The structural automaton.

Locked here: every legal continuation of a state has the same verdict, whatever it is and however many tokens it takes;
what breaks the template is marked where it happens and leaves the state as it was; reasoning, arguments and answers
have no verdict; a turn without a break is exactly a turn that the parser calls strict, but for what is inside calls.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt.spans import STRUCTURAL_TAGS
from paravt.structure import COMPLETE, TEMPLATE, state_after, trace_verdicts, turn_kind, turn_stops, verdicts, walk
from paravt.turns import parse_turn, render_call
from paravt.types import BadToolCall, Segment, Trace

CASES = json.loads((Path(__file__).parent / "cases" / "turns.json").read_text(encoding="utf-8"))
END = "<|im_end|>"
CALL = render_call("crop_video", {"start_time": 1, "end_time": 2})
PIECE = re.compile("|".join(map(re.escape, STRUCTURAL_TAGS)) + r"|\s+|[^<\s]+|<")
# for each state, a text that leads to it
LEADS = {
    "start": "",
    "think": "<think>a",
    "thought": "<think>a</think>",
    "call": "<think>a</think><tool_call>{}",
    "called": "<think>a</think><tool_call>{}</tool_call>",
    "answer": "<think>a</think><answer>B",
    "answered": "<think>a</think><answer>B</answer>",
    "end": "<think>a</think><answer>B</answer>" + END,
}


def pieces(text: str) -> list[bytes]:
    """Tokens as in the lab: a tag is one, a word is one."""
    return [match[0].encode() for match in PIECE.finditer(text)]


def marked(text: str, **kwargs) -> list[tuple[str, int]]:
    """The tokens that have a verdict."""
    tokens = pieces(text)
    found = verdicts(tokens, **kwargs)
    return [(token.decode(), verdict) for token, verdict in zip(tokens, found, strict=True) if verdict]


def test_a_calling_and_an_answering_turn():
    text = f"<think>\nlook\n</think>\n{CALL}\n{CALL}{END}"
    tags = ["<think>", "</think>", *["<tool_call>", "</tool_call>"] * 2, END]
    assert marked(text) == [(tag, 1) for tag in tags]
    text = f"seen\n</think>\n<answer>the red car</answer>{END}"
    assert marked(text, state="think") == [(tag, 1) for tag in ("</think>", "<answer>", "</answer>", END)]


@pytest.mark.parametrize("state", TEMPLATE)
def test_every_legal_continuation_of_a_state_counts_the_same_and_every_other_one_breaks(state):
    assert walk(LEADS[state]).state == state
    lead = len(pieces(LEADS[state]))
    for tag in STRUCTURAL_TAGS:
        verdict = verdicts(pieces(LEADS[state] + tag + "x"))[lead]
        assert verdict == (1 if tag in TEMPLATE[state] else -1), tag


def test_the_states_where_structure_is_a_choice():
    choices = {state: set(legal) for state, legal in TEMPLATE.items() if len(legal) > 1}
    assert choices == {"thought": {"<tool_call>", "<answer>"}, "called": {"<tool_call>", END}}
    assert {"called", "answered"} == COMPLETE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("B" + END, [("B", -1), (END, -1)], id="no structure"),
        pytest.param("<answer>B</answer>" + END, [("<answer>", -1), ("</answer>", -1), (END, -1)], id="no think"),
        pytest.param("Well <think>", [("Well", -1), ("<think>", 1)], id="prose, then put right"),
        pytest.param(LEADS["thought"] + " So so <answer>", [("<think>", 1), ("</think>", 1), ("So", -1),
                     ("<answer>", 1)], id="prose before the answer: its first token"),
        pytest.param(LEADS["called"] + " and " + CALL, [("<think>", 1), ("</think>", 1), ("<tool_call>", 1),
                     ("</tool_call>", 1), ("and", -1), ("<tool_call>", 1), ("</tool_call>", 1)],
                     id="prose between calls"),
        pytest.param("<think>a <answer>B</answer>" + END, [("<think>", 1), ("<answer>", -1), ("</answer>", -1),
                     (END, -1)], id="think never closed"),
        pytest.param("<think>a<think>b</think>", [("<think>", 1), ("<think>", -1), ("</think>", 1)], id="think twice"),
        pytest.param("<think>no <tool_call>x</tool_call> <answer> here</think><answer>", [("<think>", 1),
                     ("</think>", 1), ("<answer>", 1)], id="tags quoted in a think that is closed"),
        pytest.param(LEADS["thought"] + "<tool_code>f()</tool_code>", [("<think>", 1), ("</think>", 1),
                     ("<tool_code>", -1), ("</tool_code>", -1)], id="python form"),
    ],
)  # fmt: skip
def test_what_breaks_the_template(text, expected):
    steps = walk(text).steps
    judged = [(text[step.span.start : step.span.end], 1 if step.obeys else -1) for step in steps]
    assert judged == [(token if token in STRUCTURAL_TAGS else token[0], verdict) for token, verdict in expected]


@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_blank_answers_and_calls_are_not_closed_by_their_tags(empty):
    assert marked(f"{LEADS['thought']}<answer>{empty}</answer>{END}")[2:] == [
        ("<answer>", 1),
        ("</answer>", -1),
        (END, -1),
    ]
    assert marked(f"{LEADS['thought']}<tool_call>{empty}</tool_call>{END}")[3:] == [("</tool_call>", -1), (END, -1)]


def test_the_body_of_a_call_is_not_judged():
    for body in ("{}", "crop_video(", '{"name": "crop_video", "argum'):
        assert all(v == 1 for _, v in marked(f"<think>a</think><tool_call>{body}</tool_call>{END}"))


def test_junk_after_the_last_part_is_marked_once_and_ending_is_still_right():
    text = LEADS["answered"] + "\nIndeed it is so." + END
    assert marked(text)[4:] == [("Indeed", -1), (END, 1)]
    assert marked(LEADS["answered"] + "</answer>" + END)[4:] == [("</answer>", -1), (END, 1)]


@pytest.mark.parametrize("state", [state for state in TEMPLATE if state not in ("start", "end")])
def test_a_length_stop_marks_the_last_token(state):
    tokens = pieces(LEADS[state])
    assert verdicts(tokens, stopped=False)[-1] == -1
    # a turn that stopped with another token than the template's: right where a turn may end
    assert (verdicts(tokens)[-1] == -1) == (state not in COMPLETE)
    assert verdicts(pieces(LEADS["end"]), stopped=False)[-1] == 1
    assert verdicts([], stopped=False) == ()


def test_a_tag_of_several_tokens_has_its_verdict_on_each_of_them():
    tokens = [b"a", b"</", b"think", b">\n", b"<", b"answer", b">", b"B", b"</", b"answer", b">", END.encode()]
    assert verdicts(tokens, state="think") == (0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1)
    tokens = [b"a", b"</think>", b"<", b"tool", b"_code", b">"]
    assert verdicts(tokens, state="think") == (0, 1, -1, -1, -1, -1)


def test_the_gradient_of_a_tag_does_not_depend_on_its_number_of_tokens():
    """At a choice between a one-token and a three-token tag, equal verdicts give no preference.

    Exact expected policy gradient: E[sum over tokens of verdict * grad log pi(token)] at the parameter of the choice.
    """
    for logit in (-2.0, 0.0, 1.5):
        p = 1 / (1 + math.exp(-logit))  # of the first token of `<answer>`, against `<tool_call>`
        answer = verdicts([b"<", b"answer", b">", b"x"], state="thought")[:3]
        call = verdicts([b"<tool_call>", b"x"], state="thought")[:1]
        at_choice = p * answer[0] * (1 - p) + (1 - p) * call[0] * (-p)
        assert at_choice == pytest.approx(0.0)


def test_tokens_that_merge_a_tag_with_its_neighbours():
    # `>.` ends the tag and begins junk: it breaks; `>\n` and `.</` hold nothing wrong
    assert verdicts([b"<answer", b">B.</", b"answer", b">.", END.encode()], state="thought") == (1, 1, 1, -1, 1)
    assert verdicts([b"so.</", b"think", b">\n\n", b"<answer>"], state="think")[:3] == (1, 1, 1)


def test_bytes_that_are_no_text():
    half = "é".encode()[:1]
    assert verdicts([b"<think>", half], stopped=False) == (1, -1)
    assert verdicts([b"</think>", "\u00a0".encode(), b"<answer>", b"x"], state="think")[:3] == (1, 0, 1)
    # 0x85 and 0xa0 are whitespace in Latin-1, but not as a part of a character
    assert verdicts([b"</think>", "…".encode()[:2], "…".encode()[2:], b"<answer>", b"x"], state="think")[1] == -1


def test_the_state_after_a_header():
    assert state_after("...<|im_start|>assistant\n") == "start"
    assert state_after("...<|im_start|>assistant\n<think>\n") == "think"
    assert state_after("...<|im_start|>assistant\n<answer>") == "answer"


def as_ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_the_verdicts_of_a_trace():
    first, second = "a</think>" + CALL, "b</think><answer>B</answer>" + END
    header = "<|im_start|>assistant\n<think>\n"
    segments = [(header, False), (first, True), (END + "\nreply" + header, False), (second, True)]
    trace = Trace("main", "main", tuple(Segment(as_ids(t), s, t) for t, s in segments), "stop")
    assert turn_stops(trace) == ("length", "stop")
    found = trace_verdicts(trace, lambda ids: [bytes([i]) for i in ids])
    assert len(found) == len(trace.ids)
    assert {v for v, sampled in zip(found, trace.loss_mask, strict=True) if not sampled} == {0}
    assert found[len(header) + len(first) - 1] == -1  # the end that the first turn lacks
    assert sum(found) == len("</think>") * 2 + len("<tool_call></tool_call>") - 2 + len("<answer></answer>" + END)


words = st.sampled_from(
    [*STRUCTURAL_TAGS[:-1], " ", "\n", "x", "é", CALL, CALL[len("<tool_call>") : -len("</tool_call>")]]
)


@settings(deadline=None, max_examples=500)
@given(st.lists(words, max_size=9))
def test_no_break_means_strict(parts):
    text = "".join(parts)
    turn = parse_turn(text)
    walked = walk(text)
    clean = all(step.obeys for step in walked.steps) and walked.state in COMPLETE
    sound = all(not isinstance(call, BadToolCall) and not call.repaired for call in turn.calls)
    assert turn.strict == (clean and sound)
    assert (turn_kind(turn) == "ok") == turn.strict
    assert set(verdicts(pieces(text), stopped=False)) <= {-1, 0, 1}


@settings(deadline=None)
@given(st.lists(st.sampled_from([*STRUCTURAL_TAGS, "x", " ", "é"]), max_size=12), st.randoms())
def test_verdicts_do_not_depend_on_how_the_text_is_cut_into_tokens(parts, random):
    data = "".join(parts).encode()
    one = verdicts([bytes([byte]) for byte in data], stopped=False)
    cuts = sorted(random.sample(range(len(data) + 1), min(4, len(data) + 1)))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]
    ends = np.cumsum([len(token) for token in tokens])
    for token, end, verdict in zip(tokens, ends, verdicts(tokens, stopped=False), strict=True):
        held = one[end - len(token) : end]
        assert verdict == (-1 if -1 in held else max(held)) or end == len(data)


def test_long_texts_take_linear_time():
    for unit in ("<think>", "</think>", "<answer>", "x<tool_call>", "<think></answer>"):
        walk(unit * 20_000)


KINDS = [
    "ok", "ok", "ok", "ok", "think_unclosed", "think_missing", "answer_empty", "call_malformed", "call_malformed",
    "call_malformed", "call_repaired", "call_repaired", "call_repaired", "call_python", "call_python",
    "call_malformed", "call_repaired", "call_malformed", "call_malformed", "junk_after", "prose_between", "junk_after",
    "junk_after", "think_unclosed",
]  # fmt: skip


@pytest.mark.parametrize(("case", "kind"), list(zip(CASES, KINDS, strict=True)), ids=[case["why"] for case in CASES])
def test_the_names_of_what_is_wrong(case, kind):
    assert turn_kind(parse_turn(case["text"])) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "structure_missing"),
        ("It is B.", "structure_missing"),
        ("<think>a</think>", "structure_missing"),
        ("<think>a</think> It is B.", "structure_missing"),
        ("<think>a", "think_unclosed"),
        ("Well. " + LEADS["answered"], "prose_between"),
        ("so.</think><answer>B</answer>", "think_missing"),
        (LEADS["answer"], "answer_unclosed"),
        (f"<think>a</think>{CALL} and {CALL}", "prose_between"),
        ("<think>a</think><tool_call>crop_video(1, 2)</tool_call>", "call_python"),
        ("<think>a</think><tool_call>crop_video(1, 2", "call_malformed"),
    ],
)
def test_further_names(text, kind):
    assert turn_kind(parse_turn(text)) == kind
    assert turn_kind(parse_turn(text), "length") == "length"
