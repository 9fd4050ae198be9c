"""Samples and the order in which they are used."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paravt.data import Cursor, SampleStream, read_samples
from paravt.errors import DataError
from paravt.types import Sample


def test_samples_are_read_with_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    rows = [
        {"video": "a.mp4", "question": "q", "extra": 1},
        {"video": "/v/b.mp4", "question": "q", "options": ["x", "y"], "answer": "B", "id": 7},
        {"video": "c.mp4", "question": "q", "type": "temporal", "answer": "1 - 2"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    first, second, third = read_samples(path)
    assert first == Sample("1", str(tmp_path / "a.mp4"), "q", metadata={"extra": 1})
    assert (second.id, second.video, second.type, second.answer) == ("7", "/v/b.mp4", "choice", "B")
    assert third.type == "temporal"


def test_only_a_line_break_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    questions = ["one\u2028two", "three\x85four", "five"]
    rows = [{"video": "a.mp4", "question": question} for question in questions]
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text, encoding="utf-8", newline="")
    assert [sample.question for sample in read_samples(path)] == questions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no samples"),
        ("{", "s.jsonl:1: not JSON"),
        ("[]", "s.jsonl:1: a sample is a JSON object"),
        ('{"video": "a", "question": " "}', "`question` must be a text"),
        ('{"video": "a", "question": "q", "options": "ab"}', "`options` must be a list"),
        ('{"video": "a", "question": "q", "type": "choice"}', "needs `options`"),
        ('{"video": "a", "question": "q", "type": "dance"}', "must be one of"),
        ('{"video": "a", "question": "q", "answer": []}', "`answer` must be"),
        ('{"video": "a", "question": "q", "answer": NaN}', "NaN is not JSON"),
        ('{"video": "a", "question": "q", "id": {}}', "`id` must be"),
        ("[" * 100_000, "s.jsonl:1: not JSON"),
        ('{"video": "a", "question": "q", "id": 1}\n{"video": "a", "question": "q", "id": "1"}', "s.jsonl:2: .*twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_samples(path)


def test_every_sample_once_in_a_pass_and_another_order_in_the_next() -> None:
    samples = [Sample(str(i), "v", "q") for i in range(7)]
    taken = SampleStream(samples, seed=1).take(21)
    passes = [[draw.sample.id for draw in taken if draw.visit == n] for n in range(3)]
    assert all(sorted(ids) == [str(i) for i in range(7)] for ids in passes)
    assert len({tuple(ids) for ids in passes}) == 3
    assert [draw.sample.id for draw in SampleStream(samples, seed=1).take(7)] == passes[0]
    assert [draw.sample.id for draw in SampleStream(samples, seed=2).take(7)] != passes[0]


@pytest.mark.parametrize("stop", [0, 3, 7, 10])
def test_a_saved_cursor_continues(stop: int) -> None:
    samples = [Sample(str(i), "v", "q") for i in range(7)]
    whole = SampleStream(samples, seed=1).take(20)
    stream = SampleStream(samples, seed=1)
    head = stream.take(stop)
    saved = Cursor(stream.cursor.visit, stream.cursor.index)
    assert head + SampleStream(samples, seed=1, cursor=saved).take(20 - stop) == whole


def test_what_is_put_back_comes_first_and_nothing_is_lost() -> None:
    samples = [Sample(str(i), "v", "q") for i in range(7)]
    whole = SampleStream(samples, seed=1).take(20)
    stream = SampleStream(samples, seed=1)
    head = stream.take(9)
    left = [head[2], head[5], head[8]]  # of two passes
    saved = json.loads(json.dumps(asdict(stream.cursor_without(left))))
    again = SampleStream(samples, seed=1, cursor=Cursor.restored(saved))
    first = again.take(2)
    assert first == left[:2]
    # put back once more, before all that still waits to come again
    once_more = SampleStream(samples, seed=1, cursor=again.cursor_without(first))
    assert once_more.take(14) == [*left, *whole[9:]]
    assert stream.take(11) == whole[9:], "the stream itself goes on as if nothing had been put back"
