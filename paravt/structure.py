"""The structural automaton: which sampled tokens obey the template of an assistant turn, and which break it.

    turn = "<think>" text "</think>" (("<tool_call>" text "</tool_call>")+ | "<answer>" text "</answer>") "<|im_end|>"

Whitespace between the parts is free, the text of a call or an answer isn't blank. The automaton says for each token

    +1  it belongs to a structural tag that the template allows here,
    -1  it belongs to one that the template does not allow here (a turn that ends too early included), or it begins
        text where only structure may stand: before the think, between the parts, after the last one,
     0  it is not structural: reasoning, the arguments of calls, the answer's words, whitespace, and what follows a tag
        that breaks the template, up to the next tag.

- All continuations that are legal in a state count the same: `<tool_call>` as much as `<answer>`, another call as much
  as ending the turn.
- What breaks the template leaves the state as it was: the turn can still be put right, and what puts it right is legal.
- Only structure is judged. Whether the body of a call is JSON is not: arguments get no mark (the call's error reply and
  the rewards deal with them).
- Tags inside a think that is closed later are quotations, as for the parser of turns.
- A tag of several tokens has its verdict on *each* of them. A policy gradient then sees verdict x log pi(tag), whatever
  number of tokens the tokenizer makes of a tag; a share of 1/n each would make `<answer>` (three tokens in Qwen's
  vocabulary) worth a third of `<tool_call>` (one token) at the token where the two part.
- A token that holds both (`>.` ends a tag and begins junk) breaks.

Source: paper, selective anchoring R_fmt = sum over structural positions of log pi; the penalty is its gamma term.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

from paravt.spans import END_OF_TURN, Span, structural_spans, token_spans
from paravt.types import BadToolCall, StopReason, Trace, Turn

State = Literal["start", "think", "thought", "call", "called", "answer", "answered", "end"]
TokenBytes = Callable[[Sequence[int]], Sequence[bytes]]
"""From token ids to the raw bytes of each, e.g. `partial(paravt.spans.token_bytes, tokenizer)`."""

TEMPLATE: Mapping[State, Mapping[str, State]] = {
    "start": {"<think>": "think"},
    "think": {"</think>": "thought"},
    "thought": {"<tool_call>": "call", "<answer>": "answer"},
    "call": {"</tool_call>": "called"},
    "called": {"<tool_call>": "call", END_OF_TURN: "end"},
    "answer": {"</answer>": "answered"},
    "answered": {END_OF_TURN: "end"},
    "end": {},
}
"""For each state, the tags that may follow and the states they lead to."""
COMPLETE: frozenset[State] = frozenset(state for state, legal in TEMPLATE.items() if END_OF_TURN in legal)
"""Where a turn may end."""
_TEXT: frozenset[State] = frozenset(("think", "call", "answer"))
"""Where text may stand."""


@dataclass(frozen=True)
class Step:
    """One thing that the automaton judged: a tag, or (`span.tag` is "") a character where no text may stand."""

    span: Span
    state: State
    """Before the step."""
    obeys: bool


@dataclass(frozen=True)
class Walk:
    steps: tuple[Step, ...]
    state: State
    """After the last step. "end" if the end-of-turn token was there and legal."""

    @property
    def ended(self) -> bool:
        """Whether the text has an end-of-turn token, legal or not."""
        return any(step.span.tag == END_OF_TURN for step in self.steps)


def walk(text: str, state: State = "start") -> Walk:
    """Judge the structure of a turn's text. `state` is where a forced prefix has put the automaton.

    Takes linear time and never raises.
    """
    tags = structural_spans(text)
    steps = []
    closing = _think_end(tags, 0)  # of the think that is open, if it is closed: tags before it are quotations
    filled = False  # is there any text in the call or answer that is open?
    stray = False  # what follows a tag that breaks the template is the tag's fault
    at = 0
    for n, tag in enumerate(tags):
        first = _first_visible(text, at, tag.start)
        at = tag.end
        if state == "think" and closing is not None and n < closing:
            continue
        if first is not None and state not in _TEXT and not stray:
            steps.append(Step(Span("", first, first + 1), state, False))
        filled = filled or first is not None
        following = TEMPLATE[state].get(tag.tag)
        if following in ("called", "answered") and not filled:
            following = None
        steps.append(Step(tag, state, following is not None))
        stray = following is None
        if following is not None:
            state, filled = following, False
        if tag.tag == "<think>":
            closing = _think_end(tags, n + 1)
    first = _first_visible(text, at, len(text))
    if first is not None and state not in _TEXT and not stray:
        steps.append(Step(Span("", first, first + 1), state, False))
    return Walk(tuple(steps), state)


def _think_end(tags: Sequence[Span], start: int) -> int | None:
    """The index of the `</think>` of a think that is open at `start`; None if another think or the end comes first."""
    for n in range(start, len(tags)):
        if tags[n].tag in ("<think>", "</think>", END_OF_TURN):
            return n if tags[n].tag == "</think>" else None
    return None


def _first_visible(text: str, start: int, end: int) -> int | None:
    rest = text[start:end].lstrip()
    return end - len(rest) if rest else None


def verdicts(pieces: Sequence[bytes], *, state: State = "start", stopped: bool = True) -> tuple[int, ...]:
    """+1, -1 or 0 for each sampled token of one turn; see the module's docstring.

    pieces: the bytes of the sampled tokens, the end-of-turn token included if it was sampled.
    state: "think" if a `<think>` prefix was forced (`state_after`).
    stopped: False if the turn ran into a limit. Then, and also where the turn ended otherwise before it was complete,
    the end that is missing is marked at the last token.
    """
    # surrogateescape is exact in both directions: a character that the token budget cut in half does no harm
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    walked = walk(text, state)
    out = [0] * len(pieces)
    where = token_spans(pieces, [step.span for step in walked.steps], text)
    for step, tokens in zip(walked.steps, where, strict=True):
        for token in range(tokens.first, tokens.last):
            out[token] = -1 if not step.obeys or out[token] < 0 else 1
    if out and not walked.ended and not (stopped and walked.state in COMPLETE):
        out[-1] = -1
    return tuple(out)


def state_after(header: str) -> State:
    """Where the automaton stands after the (unsampled) text before a turn, which may end with a forced prefix."""
    header = header.rstrip()
    if header.endswith("<think>"):
        return "think"
    return "answer" if header.endswith("<answer>") else "start"


def turn_stops(trace: Trace) -> tuple[StopReason, ...]:
    """The stop reason of each sampled turn. A turn that ran into a limit was closed by an end token nobody sampled."""
    out: list[StopReason] = []
    for segment, following in zip_longest(trace.segments, trace.segments[1:]):
        if not segment.sampled:
            continue
        if following is None:
            out.append(trace.stop_reason or "stop")
        else:
            out.append("length" if following.text.startswith(END_OF_TURN) else "stop")
    return tuple(out)


def trace_verdicts(trace: Trace, token_bytes: TokenBytes) -> tuple[int, ...]:
    """The verdicts of all turns of a main trace, aligned with `trace.ids`; 0 at tokens that weren't sampled."""
    out: list[int] = []
    stops = iter(turn_stops(trace))
    header = ""
    for segment in trace.segments:
        if segment.sampled:
            pieces = token_bytes(segment.ids)
            out.extend(verdicts(pieces, state=state_after(header), stopped=next(stops) == "stop"))
        else:
            out.extend([0] * len(segment.ids))
        header = segment.text
    return tuple(out)


# ---------------------------------------------------------------------------------------------------- names for logs

FormatKind = Literal[
    "ok", "think_unclosed", "think_missing", "call_malformed", "call_python", "call_repaired", "prose_between",
    "junk_after", "answer_empty", "answer_unclosed", "structure_missing", "length", "forced",
]  # fmt: skip


FORMAT_KINDS: tuple[FormatKind, ...] = get_args(FormatKind)


def turn_kind(turn: Turn, stop: StopReason = "stop") -> FormatKind:
    """The first thing, in reading order, that keeps a turn from being strict; a cut-off turn is "length"."""
    if turn.strict:
        return "ok"
    if stop == "length":
        return "length"
    walked = walk(turn.text + END_OF_TURN)
    broken = next((step for step in walked.steps if not step.obeys), None)
    if broken is not None:
        return _kind_of_break(broken, walked.steps)
    if any(isinstance(call, BadToolCall) for call in turn.calls):
        return "call_malformed"
    if turn.calls:
        return "call_python" if re.search(r"<tool_call>\s*(?:print\s*\()?\[?[A-Za-z_]", turn.text) else "call_repaired"
    return "forced"


def _kind_of_break(step: Step, steps: Sequence[Step]) -> FormatKind:
    tag, state = step.span.tag, step.state
    later = [other.span.tag for other in steps if other.span.start > step.span.start]
    structures = {"<tool_call>", "<tool_code>", "<answer>"}
    if state == "think":
        return "think_unclosed"
    if tag == "<tool_code>":
        return "call_python" if state != "answered" else "junk_after"
    if state == "start":
        if "<think>" in later:
            return "prose_between"
        return "think_missing" if structures & {tag, *later} else "structure_missing"
    if state == "thought":
        if structures & set(later):
            return "prose_between"
        return "structure_missing"
    if state == "call":
        return "call_malformed"
    if state == "called":
        return "prose_between" if tag == "" and "<tool_call>" in later else "junk_after"
    if state == "answer":
        return "answer_empty" if tag == "</answer>" else "answer_unclosed"
    return "junk_after"
