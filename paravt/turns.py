"""The one parser of assistant turns, shared by the agent, the rewards and the evaluation.

    turn   = think (call+ | answer)                                     strict; whitespace between them is free
    think  = "<think>" text "</think>"                                  empty text is allowed, another <think> isn't
    call   = "<tool_call>" {"name": .., "arguments": {..}} "</tool_call>"
    answer = "<answer>" text without structural tags, not blank "</answer>"

Whatever a model writes is read as a series of *pieces* of these kinds, by the following rules.

- A `<think>` whose `</think>` comes before another `<think>` is closed; nothing inside it is a structure, so calls
  and answers can be quoted. A think that is never closed ends at the next tag, and structures after it count.
- A call (also `<tool_code>`) or an answer ends at the next structural tag of any kind. A closing tag, even a wrong
  one, completes it; before an opening tag or the end of the turn it is unclosed.
- Complete are: closed calls (also bad ones: they get an error reply), unclosed calls that can run, and closed
  answers that aren't blank. The first complete piece decides whether the turn calls or answers; without one, the
  first unclosed bad call or unclosed non-blank answer does. A turn that calls has no answer and all its calls; a
  turn that answers has no calls.
- A call block may hold several calls, as JSON objects, python literals or python calls with literal arguments, alone,
  in lists, or wrapped (`print(crop_video(..))`). All but one canonical object make the calls `repaired`.

Parsing takes linear time and never raises.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paravt.spans import END_OF_TURN, Span, structural_spans
from paravt.tools import TOOLS, Tool, ToolArgumentError
from paravt.types import BadToolCall, ToolCall, Turn

_END_MARKERS = (END_OF_TURN, "<|endoftext|>")
_MAX_CALL_CHARS = 4096
"""A longer call isn't parsed: real ones have a hundred characters, and parsers recurse over nested input."""
_MAX_RAW_CHARS = 1000

_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_OUTSIDE = re.compile(r"#[^\n]*|[A-Za-z_][\w.]*|[()\[\]{}]")
# Inside brackets, strings hide brackets. One that isn't closed ends with its line, so that scanning is linear.
_INSIDE = re.compile(r""""(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|[A-Za-z_][\w.]*|[()\[\]{}]""")
_PAREN = re.compile(r"[ \t]*\(")

Kind = Literal["think", "call", "answer"]
_KINDS: dict[str, Kind] = {"<think>": "think", "<tool_call>": "call", "<tool_code>": "call", "<answer>": "answer"}


@dataclass(frozen=True)
class _Piece:
    """A think, a call block or an answer: [start, end) of the turn's text, tags included."""

    kind: Kind
    start: int
    end: int
    body: str
    closed: bool
    """By any closing tag."""
    matched: bool
    """Opened and closed by the canonical tags of its kind."""


@dataclass(frozen=True)
class _Attempt:
    """A call as written, before its tool has seen it."""

    raw: str
    name: str
    arguments: Mapping[str, object]
    clean: bool


def parse_turn(text: str, tools: Mapping[str, Tool] = TOOLS) -> Turn:
    """Parse one assistant turn, the forced prefix included. See the module's docstring for the rules.

    `Turn.text` is the text without end-of-turn markers at its end; `Turn.think` is the first closed think (or else
    the first unclosed one), stripped. Never raises.
    """
    text = _without_end_markers(text)
    pieces = _pieces(text)
    thinks = sorted((piece for piece in pieces if piece.kind == "think"), key=lambda piece: not piece.closed)
    calls, answer = _decide(pieces, tools)
    return Turn(
        text=text,
        think=thinks[0].body.strip() if thinks else None,
        calls=calls,
        answer=answer,
        strict=_is_strict(text, pieces, calls, answer),
    )


def render_call(name: str, arguments: Mapping[str, object]) -> str:
    """The canonical text of a call; whole numbers are written without a fraction.

    Raises ValueError for NaN and infinities, TypeError for values that JSON doesn't have.
    """
    shown = {key: _whole(value) for key, value in arguments.items()}
    body = json.dumps({"name": name, "arguments": shown}, ensure_ascii=False, allow_nan=False)
    # "<" can only stand in a string here, and a tag in a string must not end the call.
    return "<tool_call>\n" + body.replace("<", "\\u003c") + "\n</tool_call>"


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _without_end_markers(text: str) -> str:
    end = keep = len(text)
    while True:
        while end > 0 and text[end - 1].isspace():
            end -= 1
        marker = next((m for m in _END_MARKERS if text.endswith(m, 0, end)), None)
        if marker is None:
            return text[:keep]
        end = keep = end - len(marker)


def _pieces(text: str) -> list[_Piece]:
    tags = [span for span in structural_spans(text) if span.tag != END_OF_TURN]
    out = []
    n = 0
    while n < len(tags):
        kind = _KINDS.get(tags[n].tag)
        if kind is None:  # a closing tag without anything to close
            n += 1
            continue
        closing = _think_end(tags, n) if kind == "think" else n + 1
        closed = closing is not None and closing < len(tags) and tags[closing].tag.startswith("</")
        if closing is None or not closed:
            closing = n + 1
        body_end = tags[closing].start if closing < len(tags) else len(text)
        end = tags[closing].end if closed else body_end
        matched = closed and tags[n].tag != "<tool_code>" and tags[closing].tag == tags[n].tag.replace("<", "</")
        body = text[tags[n].end : body_end]
        out.append(_Piece(kind, tags[n].start, end, body, closed, matched))
        n = closing + closed
    return out


def _think_end(tags: list[Span], opened: int) -> int | None:
    """The index of the `</think>` that closes the think at `opened`; None if there's none before the next think."""
    for n in range(opened + 1, len(tags)):
        if tags[n].tag in ("<think>", "</think>"):
            return n if tags[n].tag == "</think>" else None
    return None


def _decide(pieces: list[_Piece], tools: Mapping[str, Tool]) -> tuple[tuple[ToolCall | BadToolCall, ...], str | None]:
    """The calls of the turn, or its answer: the first complete piece decides, else the first incomplete one."""
    calls: list[ToolCall | BadToolCall] = []
    calling = False
    unclosed_answer = None
    for n, piece in enumerate(pieces):
        if piece.kind == "answer" and not calling and (body := piece.body.strip()):
            if piece.closed:
                return (), body
            if not calls and unclosed_answer is None:
                unclosed_answer = body
        elif piece.kind == "call":
            doubled = (
                not piece.closed and not piece.body.strip() and [p.kind for p in pieces[n + 1 : n + 2]] == ["call"]
            )
            if doubled:  # only an opening tag written twice
                continue
            found = _read_block(piece, tools)
            calls.extend(found)
            calling = calling or piece.closed or any(isinstance(call, ToolCall) for call in found)
    if not calling and unclosed_answer is not None:
        return (), unclosed_answer
    return tuple(calls), None


def _is_strict(text: str, pieces: list[_Piece], calls: tuple[ToolCall | BadToolCall, ...], answer: str | None) -> bool:
    kinds = [piece.kind for piece in pieces]
    if not all(piece.matched for piece in pieces) or kinds[:1] != ["think"]:
        return False
    edges = [0, *(edge for piece in pieces for edge in (piece.start, piece.end)), len(text)]
    if any(text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)):
        return False
    if kinds[1:] == ["answer"]:
        return answer is not None
    clean = all(isinstance(call, ToolCall) and not call.repaired for call in calls)
    return len(kinds) > 1 and set(kinds[1:]) == {"call"} and clean


def _read_block(piece: _Piece, tools: Mapping[str, Tool]) -> list[ToolCall | BadToolCall]:
    """All calls of a call block, at least one."""
    body = piece.body.strip()
    out: list[ToolCall | BadToolCall] = []
    # After a call with unbalanced brackets, what follows may be its remains: only calls of known tools are taken.
    lost = False
    for start, end in _chunks(body):
        if end is None:
            if not lost:
                line = body[start : start + _MAX_RAW_CHARS].split("\n", 1)[0]
                out.append(BadToolCall(line, "the call is cut off or its brackets don't match"))
            lost = True
            continue
        canonical = piece.matched and start == 0 and end == len(body)
        for item in _attempts(body[start:end], tools):
            if isinstance(item, BadToolCall):
                known = False
                call: ToolCall | BadToolCall = item
            else:
                known = item.name in tools
                call = _check(item, tools, canonical and item.clean)
            if known or not lost:
                out.append(call)
                lost = lost and not known
    if out:
        return out
    reason = "the tool call holds no call" if body else "the tool call is empty"
    return [BadToolCall(body[:_MAX_RAW_CHARS], f'{reason}: write {{"name": ..., "arguments": {{...}}}}')]


def _check(attempt: _Attempt, tools: Mapping[str, Tool], canonical: bool) -> ToolCall | BadToolCall:
    tool = tools.get(attempt.name)
    if tool is None:
        shown = ascii(attempt.name)[:60]
        known = ", ".join(tools) or "none"
        return BadToolCall(attempt.raw, f"unknown tool {shown}; available tools: {known}")
    try:
        arguments, repaired = tool.normalise(attempt.arguments)
    except ToolArgumentError as error:
        return BadToolCall(attempt.raw, str(error))
    return ToolCall(tool.name, arguments, repaired or not canonical)


def _chunks(body: str) -> Iterator[tuple[int, int | None]]:
    """The bracketed parts of a block, in order: `{..}`, `[..]` and `name(..)`; the end is None if there is none."""
    closer_at: dict[int, int] = {}
    starts: list[tuple[int, int]] = []
    open_brackets: list[int] = []
    open_kinds = dict.fromkeys(")]}", 0)
    pos = 0
    while match := (_INSIDE if open_brackets else _OUTSIDE).search(body, pos):
        token, at, pos = match[0], match.start(), match.end()
        if token in _CLOSERS:
            open_brackets.append(at)
            open_kinds[_CLOSERS[token]] += 1
            if token != "(":
                starts.append((at, at))
        elif token in open_kinds:
            # Brackets that stay open inside a closed pair are dropped; a closer without an opener is skipped.
            while open_kinds[token]:
                opener = open_brackets.pop()
                open_kinds[_CLOSERS[body[opener]]] -= 1
                if _CLOSERS[body[opener]] == token:
                    closer_at[opener] = at
                    break
        elif token[0] not in "\"'#" and (paren := _PAREN.match(body, pos)):
            starts.append((at, paren.end() - 1))
    pos = 0
    for start, opener in starts:
        if start >= pos:
            closer = closer_at.get(opener)
            yield start, None if closer is None else closer + 1
            pos = opener + 1 if closer is None else closer + 1


def _attempts(chunk: str, tools: Mapping[str, Tool]) -> list[_Attempt | BadToolCall]:
    raw = chunk[:_MAX_RAW_CHARS]
    if len(chunk) > _MAX_CALL_CHARS:
        return [BadToolCall(raw, f"the call has more than {_MAX_CALL_CHARS} characters")]
    if chunk[0] in "[{":
        try:
            value, clean = _load_json(chunk)
        except (ValueError, RecursionError):
            pass
        else:
            clean = clean and isinstance(value, dict)
            values = value if isinstance(value, list) else [value]
            return [_from_object(raw, item, clean) for item in values if isinstance(item, dict)]
    try:
        return _from_python(raw, ast.parse(chunk, mode="eval").body, tools)
    # What ast and literal_eval raise for input that is malformed, not literal or nested too deeply.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return [BadToolCall(raw, 'the call is not valid JSON: write {"name": ..., "arguments": {...}}')]


def _load_json(text: str) -> tuple[Any, bool]:
    """A JSON value, and whether no object in it repeats a key. Raises ValueError, also for NaN and Infinity."""
    repeated = False

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        out = dict(pairs)
        repeated = repeated or len(out) < len(pairs)
        return out

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, object_pairs_hook=collect, parse_constant=refuse), not repeated


def _from_object(raw: str, value: Mapping[Any, Any], clean: bool) -> _Attempt | BadToolCall:
    """The call that an object describes. Flat arguments, `parameters` and OpenAI's `function` are understood."""
    if "name" not in value and isinstance(value.get("function"), dict):
        value, clean = value["function"], False
    name = value.get("name")
    if not isinstance(name, str):
        return BadToolCall(raw, 'the call has no "name"')
    clean = clean and set(value) == {"name", "arguments"}
    rest = {str(key): item for key, item in value.items() if key != "name"}
    arguments = rest.get("arguments", rest.get("parameters", rest))
    if isinstance(arguments, str):
        clean = False
        try:
            arguments = _load_literal(arguments)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return BadToolCall(raw, '"arguments" is a string that is not a JSON object')
    if not isinstance(arguments, dict):
        return BadToolCall(raw, '"arguments" must be an object')
    return _Attempt(raw, name, {str(key): item for key, item in arguments.items()}, clean)


def _load_literal(text: str) -> Any:
    try:
        return _load_json(text)[0]
    except ValueError:
        return ast.literal_eval(text.strip())


def _from_python(raw: str, node: ast.expr, tools: Mapping[str, Tool]) -> list[_Attempt | BadToolCall]:
    """The calls in a python expression. Only literals are ever given a value; nothing is run."""
    if isinstance(node, ast.Dict):
        return [_from_object(raw, ast.literal_eval(node), False)]
    if isinstance(node, (ast.List, ast.Tuple)) and all(isinstance(item, ast.Dict) for item in node.elts):
        return [_from_object(raw, ast.literal_eval(item), False) for item in node.elts]
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
    known = [call for call in calls if _called(call) in tools]
    if known:  # also those inside print(..), a list, another call
        known.sort(key=lambda call: (call.lineno, call.col_offset))
        return [_from_call(raw, call, tools) for call in known]
    if isinstance(node, ast.Call) and (name := _called(node)) not in ("", "print"):
        return [_Attempt(raw, name, {}, False)]
    return []


def _called(call: ast.Call) -> str:
    """The name of the function, without the objects it may be an attribute of."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _from_call(raw: str, call: ast.Call, tools: Mapping[str, Tool]) -> _Attempt | BadToolCall:
    tool = tools[_called(call)]
    arguments: dict[str, object] = {}
    try:
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("**arguments")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        values = [ast.literal_eval(value) for value in call.args]
    except (ValueError, TypeError, RecursionError, MemoryError):
        return BadToolCall(raw, f"the arguments of {tool.name} must be plain numbers and strings")
    # Positional values are the required parameters if their number fits, else all parameters in order.
    required = [name for name in tool.required if name not in arguments]
    names = required if len(required) == len(values) else [n for n in tool.parameters if n not in arguments]
    if len(values) > len(names):
        return BadToolCall(raw, f"too many arguments: {tool.name} takes {', '.join(tool.parameters)}")
    return _Attempt(raw, tool.name, {**arguments, **dict(zip(names, values, strict=False))}, False)
