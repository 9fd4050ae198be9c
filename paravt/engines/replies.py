"""What chat servers answer, read with suspicion: whatever else they send is an EngineError, never a surprise later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paravt.engines.base import Completion
from paravt.errors import EngineError
from paravt.types import StopReason, Usage


def read_completion(url: str, body: bytes) -> Completion:
    """The completion in the body of a response that a chat completion was asked of.

    Raises EngineError if it is none, or if the server did not answer (a content filter, say).
    """
    try:
        answer = as_object(read_json(body), "the body")
        choices = as_list(answer.get("choices"), "choices")
        choice = as_object(choices[0], "choices[0]") if choices else {"finish_reason": "no choices"}
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length", "tool_calls"):
            raise EngineError(f"{url}: no answer ({short(finish)})")
        text = _turn_text(as_object(choice.get("message"), "message"))
        usage = _usage(answer.get("usage"))
    except NotThat as error:
        raise EngineError(f"{url}: not a chat completion: {error}") from error
    stop_reason: StopReason = "length" if finish == "length" else "stop"
    return Completion((), text, None, stop_reason, policy_version=0, usage=usage)


def read_models(url: str, body: bytes) -> list[str]:
    """The names in the body of a response that the list of models was asked of. Raises EngineError if it is none."""
    try:
        rows = as_list(as_object(read_json(body), "the body").get("data"), "data")
        return [_string(as_object(row, "data").get("id"), "id") for row in rows]
    except NotThat as error:
        raise EngineError(f"{url}: not a list of models: {error}; is this a chat server?") from error


class NotThat(Exception):
    """Something is of another type than it must be."""


def _turn_text(message: Mapping[str, Any]) -> str:
    """The turn as the model wrote it: servers that parse reasoning and calls out of it are undone."""
    text = _text_or_none(message.get("content"), "content")
    reasoning = _text_or_none(message.get("reasoning") or message.get("reasoning_content"), "reasoning")
    if reasoning:
        text = f"<think>\n{reasoning}\n</think>\n{text}"
    for call in as_list(message.get("tool_calls") or [], "tool_calls"):
        function = as_object(as_object(call, "a tool call").get("function"), "the function of a tool call")
        # the arguments are JSON text already, and may be broken: the turn's parser is the one to judge that
        name = json.dumps(_string(function.get("name"), "the name of a tool call"))
        arguments = _string(function.get("arguments"), "the arguments of a tool call")
        text += f'\n<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return text.encode("utf-8", "replace").decode("utf-8")  # JSON can spell lone surrogates, which nobody can send back


def _usage(value: object) -> Usage:
    """Zeros where a server does not say."""
    usage = as_object(value or {}, "usage")
    return Usage(*(_count(usage.get(name), name) for name in ("prompt_tokens", "completion_tokens")))


def read_json(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise NotThat(f"no JSON but {short(body.decode('utf-8', 'replace'))}") from None


def as_object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise NotThat(f"{name} is {short(value)}")
    return value


def as_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise NotThat(f"{name} is {short(value)}")
    return value


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise NotThat(f"{name} is {short(value)}")
    return value


def _text_or_none(value: object, name: str) -> str:
    return "" if value is None else _string(value, name)


def _count(value: object, name: str) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise NotThat(f"{name} is {short(value)}")
    return value


def short(value: object) -> str:
    """On one line, and not the server's whole page."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    return ascii(text if len(text) <= 80 else text[:77] + "...")
