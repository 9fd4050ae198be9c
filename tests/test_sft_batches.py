"""The rows of each update of supervised training, loaded ahead.

Locked here: a row that cannot be used is counted and costs no other row; batches go on from any of them; what is made
ahead is bounded. What several processes make of it is in `test_sft_ranks`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from rows import answered, good_rows, same, text, turn, video, write_lines

from paravt.data.rows import Position, RowSource, RowStream
from paravt.data.tables import open_groups
from paravt.data.traces import TraceBuilder
from paravt.errors import DataError
from paravt.ranks import Ranks
from paravt.sft_batches import Batch, Batches


def mixed_stream(directory: Path, position: Position | None = None) -> RowStream:
    bad = [{"messages": [turn("user", "q")]}, {"messages": "{"}, answered(video("none.mp4"), text("q"))]
    path = write_lines(directory / "mixed.jsonl", [*good_rows(), *bad, "not json", "[1]", "null"])
    return RowStream([RowSource(open_groups(path), 2, ["messages"])], [1.0], 2, position)


def taken(batches: Batches, size: int, count: int) -> list[Batch]:
    try:
        return [batches.take(size) for _ in range(count)]
    finally:
        batches.close()


def test_bad_rows_are_counted_and_cost_no_good_one(
    builder: TraceBuilder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = taken(Batches(mixed_stream(tmp_path), builder, Ranks(), workers=2, ahead=5), 4, 3)
    # 10 rows in a pass, 4 of them good: each batch of 4 is what one pass has to give
    expected = {len(builder.build(row).ids) for row in good_rows()}
    for batch in made:
        assert batch.rows == 4
        assert {len(trace.ids) for trace in batch.mine} == expected
        assert batch.tokens == sum(sum(trace.loss_mask) for trace in batch.mine)
    drawn, skipped = made[-1].position.drawn, made[-1].skipped
    assert sum(skipped.values()) == drawn - 12
    assert Counter(skipped).keys() == {"no_answer", "messages", "media_missing", "not_a_row"}
    assert sum("skipped (messages): " in message for message in caplog.messages) == 1


def test_batches_go_on_from_any_of_them(builder: TraceBuilder, tmp_path: Path) -> None:
    whole = taken(Batches(mixed_stream(tmp_path), builder, Ranks(), workers=2, ahead=6), 3, 6)
    for stop in (1, 3, 5):
        saved = json.loads(json.dumps(whole[stop - 1].to_dict()))
        stream = mixed_stream(tmp_path, Position.from_dict(saved["position"]))
        rest = taken(Batches(stream, builder, Ranks(), 1, 1, saved["skipped"]), 3, 6 - stop)
        for again, batch in zip(rest, whole[stop:], strict=True):
            assert (again.position, again.skipped) == (batch.position, batch.skipped)
            assert all(same(a, b) for a, b in zip(again.mine, batch.mine, strict=True))


def test_a_corpus_without_a_usable_row_ends(builder: TraceBuilder, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "none.jsonl", [answered(video("none.mp4"), text("q"))] * 5)
    stream = RowStream([RowSource(open_groups(path), 0)], [1.0], 0)
    with pytest.raises(DataError, match=r"no row can be used: 5 media_missing; .*none.jsonl: row \d: none.mp4"):
        taken(Batches(stream, builder, Ranks(), workers=2, ahead=3), 2, 1)


def test_what_is_made_ahead_is_bounded_and_it_is_told_how_long_it_was_waited_for(
    builder: TraceBuilder, tmp_path: Path
) -> None:
    stream = mixed_stream(tmp_path)
    made = Batches(stream, builder, Ranks(), workers=1, ahead=4)
    first = made.take(2)
    made._thread.submit(int).result()  # it makes rows in order: all that it was asked for are there now
    # rows that were taken, four made ahead, and at most two that are being loaded
    assert first.position.drawn + 4 <= stream.position.drawn <= first.position.drawn + 4 + 2
    assert first.waited > 0
    made.close()
    assert first.rows == len(first.mine) == 2
