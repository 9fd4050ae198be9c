"""Where the structure of a turn is: its tags as character spans of the text, and as spans of the sampled tokens.

With a byte-pair tokenizer a tag is several tokens, its first and last token can hold characters of its
neighbours (`>.` or `.</`), and a token can hold part of a character. So tokens are matched to tags by
byte offsets. A turn is never tokenised again: `pieces` are the bytes of the ids that were sampled.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

END_OF_TURN = "<|im_end|>"
STRUCTURAL_TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_code>",
    "</tool_code>",
    "<answer>",
    "</answer>",
    END_OF_TURN,
)
_TAG = re.compile("|".join(map(re.escape, STRUCTURAL_TAGS)))


@dataclass(frozen=True)
class Span:
    """A tag and the characters [start, end) it takes in a text."""

    tag: str
    start: int
    end: int


@dataclass(frozen=True)
class TokenSpan:
    """A tag and the tokens [first, last) that hold at least one of its bytes."""

    tag: str
    first: int
    last: int


def structural_spans(text: str) -> tuple[Span, ...]:
    """The structural tags of a text, in order; they never overlap. Quoted tags are reported like all others."""
    return tuple(Span(match[0], match.start(), match.end()) for match in _TAG.finditer(text))


def token_spans(pieces: Sequence[bytes], spans: Sequence[Span], text: str) -> tuple[TokenSpan, ...]:
    """Map character spans of `text`, in order, to ranges of tokens.

    pieces: the raw bytes of each token. Together they must be `text` in UTF-8; bytes that aren't UTF-8 are
    expected as Python's `surrogateescape` decodes them. Where one token holds bytes of two tags, both spans
    have it. `structural_token_spans` does the same for the structural tags without needing a text.

    Raises ValueError if the pieces don't spell the text, or a span is empty, outside of it or out of order.
    """
    joined = b"".join(pieces)
    if text.encode("utf-8", "surrogateescape") != joined:
        raise ValueError("the tokens don't spell the text: were they decoded with errors or cleaned up?")
    byte_spans = []
    at_char = at_byte = 0
    for span in spans:
        if not at_char <= span.start < span.end <= len(text):
            raise ValueError(f"span {span.start}..{span.end} is empty, out of order or outside the text")
        first = at_byte + len(text[at_char : span.start].encode("utf-8", "surrogateescape"))
        at_byte = first + len(text[span.start : span.end].encode("utf-8", "surrogateescape"))
        at_char = span.end
        byte_spans.append(Span(span.tag, first, at_byte))
    return _overlaps(pieces, byte_spans)


def structural_token_spans(pieces: Sequence[bytes]) -> tuple[TokenSpan, ...]:
    """The structural tags of a token sequence as token ranges, whatever else the bytes are.

    Tags are ASCII, and an ASCII byte is never part of a longer UTF-8 character, so they can be found in the
    bytes themselves: a character that the token budget cut in half does no harm.
    """
    return _overlaps(pieces, structural_spans(b"".join(pieces).decode("latin-1")))


def _overlaps(pieces: Sequence[bytes], byte_spans: Sequence[Span]) -> tuple[TokenSpan, ...]:
    """Token ranges of byte spans that are in order and don't overlap: one walk over both."""
    ends = list(accumulate(map(len, pieces)))
    out = []
    token = 0
    for span in byte_spans:
        while ends[token] <= span.start:
            token += 1
        first = token
        while ends[token] < span.end:
            token += 1
        out.append(TokenSpan(span.tag, first, token + 1))
    return tuple(out)


@functools.cache
def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet of byte-level vocabularies: printable Latin-1 stands for itself, the rest follows at U+0100."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(moved)}


def _is_byte_level(backend: Any) -> bool:
    if backend is None or backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts] == ["ByteLevel"]


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The raw bytes of each id: what the tokenizer's decoder would put at its place.

    tokenizer: a transformers fast tokenizer (or a `tokenizers.Tokenizer`) with a byte-level vocabulary, such as
    Qwen's. Added tokens are their own text. An id beyond the vocabulary (models pad their embeddings) has no
    bytes, as it has no text when decoded.

    Raises TypeError if the tokenizer isn't byte-level.
    """
    return byte_reader(tokenizer)(ids)


def byte_reader(tokenizer: Any) -> Callable[[Sequence[int]], list[bytes]]:
    """`token_bytes` of one tokenizer, for many calls: it is looked at once, and so is each of its ids."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "get_added_tokens_decoder") or not _is_byte_level(backend):
        raise TypeError(
            f"{type(tokenizer).__name__} isn't a fast byte-level tokenizer: the bytes of its ids are unknown"
        )
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    byte_of = _byte_of()

    @functools.cache
    def read(i: int) -> bytes:
        token = added.get(i)
        if token is None:
            token = backend.id_to_token(i) or ""
            if all(char in byte_of for char in token):
                return bytes(byte_of[char] for char in token)
        return token.encode("utf-8")

    return lambda ids: [read(i) for i in ids]
