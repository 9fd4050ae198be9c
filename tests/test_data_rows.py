"""Rows of published training data, as traces.

Locked here: the trace is the conversation as the agent would have had it, whatever layout it is written in; assistant
turns and their ends are sampled, nothing else is; images and frames stand where the row has them; a row that cannot be
used is skipped for a named reason and costs no other row; rows come in an order that follows from the seed alone, each
once in a pass, and from any position again.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import (
    CALL,
    agent_row,
    answered,
    frames_row,
    good_rows,
    image,
    rl_row,
    same,
    text,
    turn,
    two_videos_row,
    video,
    write_lines,
    write_parquet,
)

from paravt.data import read_question_rows
from paravt.data.media import local_path
from paravt.data.rows import Position, RowSource, RowStream
from paravt.data.skips import RowError
from paravt.data.stream import Cursor
from paravt.data.tables import find_files, open_groups, read_group
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.errors import DataError
from paravt.models import QwenVL
from paravt.video import FrameReader

# ---------------------------------------------------------------------- one row


def test_a_trace_is_the_conversation_as_the_agent_would_have_had_it(builder: TraceBuilder) -> None:
    trace = builder.build(agent_row())
    assert [segment.sampled for segment in trace] == [False, True, False, True]
    opening, first, reply, second = trace.segments
    assert opening.text.startswith("<|im_start|>system\nYou can crop.<|im_end|>\n<|im_start|>user\n<0.5 seconds>")
    assert opening.text.endswith("What is it?<|im_end|>\n<|im_start|>assistant\n")
    assert first.text == f"<think>\nI look.\n</think>\n{CALL}\n{CALL}<|im_end|>"
    assert reply.text == (
        "\n<|im_start|>user\n<tool_response>\n[1.0s - 3.0s] grey\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.text.endswith("<answer>grey</answer><|im_end|>")
    for segment in trace:
        if not segment.images:
            assert builder.chat.tokenizer.decode(segment.ids) == segment.text
    # one frame a second, each after its own time, in the grey of its second
    assert [round(frame.pixels.mean() / 20) for frame in trace.images] == [1, 2, 3, 4]
    assert opening.text.count("<|image_pad|>") == opening.ids.count(builder.chat.image_id) == 4
    for frame in trace.images:
        assert f"<{frame.time:.1f} seconds><|vision_start|><|image_pad|><|vision_end|>" in opening.text


def test_images_stand_where_the_row_has_them(builder: TraceBuilder) -> None:
    trace = builder.build(frames_row())
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"First{pad}then{pad}What changed?" in trace.segments[0].text
    assert f"<tool_response>\n{pad}\n</tool_response>" in trace.segments[2].text
    assert [round(frame.pixels.mean() / 50) for frame in trace.segments[0].images] == [1, 2]
    assert [round(frame.pixels.mean() / 50) for frame in trace.segments[2].images] == [3]
    assert not any(segment.images for segment in trace if segment.sampled)


def test_several_videos_and_rows_without_any(builder: TraceBuilder) -> None:
    trace = builder.build(two_videos_row())
    assert len(trace.images) == 4 + 3
    assert len({frame.key.split(":")[0] for frame in trace.images}) == 2
    blind = builder.build(good_rows()[3])
    assert blind.images == ()
    assert blind.segments[1].text == "4<|im_end|>"


def with_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """As a file with one schema for all parts is read: every key is there, most are null."""
    none = {"text": None, "image_url": None, "video_url": None}
    return {"messages": [{**t, "name": None, "content": [none | part for part in t["content"]]}
                         for t in row["messages"]]}  # fmt: skip


def in_short(row: dict[str, Any]) -> dict[str, Any]:
    """As Qwen's own tools write it: {"type": "image", "image": path}."""

    def part(given: dict[str, Any]) -> dict[str, Any]:
        kind = given["type"].removesuffix("_url")
        return given if kind == "text" else {"type": kind, kind: given[given["type"]]["url"]}

    return {"messages": [{**t, "content": [part(given) for given in t["content"]]} for t in row["messages"]]}


@pytest.mark.parametrize(
    "change",
    [
        lambda row: {"messages": json.dumps(row["messages"])},
        lambda row: json.loads(json.dumps(row).replace('{"url": ', '{"detail": null, "url": ')),
        lambda row: json.loads(json.dumps(row).replace('"longvt_source', '"file://file://longvt_source')),
        lambda row: {**row, "id": 10**40, "extra": {"nested": [{"deep": None}]}},
        with_nulls,
        in_short,
    ],
)
def test_every_layout_gives_the_same_trace(builder: TraceBuilder, change: Any) -> None:
    for row in (agent_row(), frames_row(), two_videos_row()):
        assert same(builder.build(change(row)), builder.build(row))


def test_calls_in_a_field_of_their_own_and_tools_of_the_row(builder: TraceBuilder) -> None:
    row = agent_row()
    function = {"name": "crop_video", "arguments": '{"start_time": 1, "end_time": 3.0}'}
    row["messages"][2] = {"role": "assistant", "content": "<think>\nI look.\n</think>",
                          "tool_calls": [{"function": function}, {"function": function}]}  # fmt: skip
    row["messages"][3] = turn("tool", "grey")
    row["tools"] = json.dumps([{"type": "function", "function": {"name": "crop_video", "parameters": {}}}])
    trace = builder.build(row)
    assert trace.segments[1].text == f"<think>\nI look.\n</think>\n{CALL}\n{CALL}<|im_end|>"
    assert "<tool_response>\ngrey\n</tool_response>" in trace.segments[2].text
    assert "# Tools" in trace.segments[0].text


def test_what_the_row_says_of_its_video_goes_first(builder: TraceBuilder) -> None:
    def seen(**more: Any) -> list[int]:
        part = {**video("longvt_source/selftrace/a.mp4"), **more}
        return [round(frame.pixels.mean() / 20) for frame in builder.build(answered(part, text("?"))).images]

    assert seen(video_start=1.0, video_end=3.0) == [2, 3]
    assert seen(nframes=2) == [2, 4]
    assert seen(fps=0.5) == [2, 4]
    assert seen(max_frames=1, fps=None) == [3]
    assert seen(nframes=10**9, fps=10**30) == sorted(seen(nframes=64))


def test_a_default_system_turn(tiny: QwenVL, root: Path) -> None:
    helpful = TraceBuilder(tiny.chat, FrameReader(workers=1), RowConfig(root=root, system="Help.", max_pixels=1024))
    assert helpful.build(good_rows()[3]).text.startswith("<|im_start|>system\nHelp.<|im_end|>")
    assert "Help." not in helpful.build(agent_row()).text


def test_images_inside_the_row(builder: TraceBuilder, root: Path) -> None:
    path = root / "longvt_source/videor1/0.jpg"
    url = "data:image/jpeg;base64," + base64.b64encode(path.read_bytes()).decode()
    (inside,), (outside,) = (builder.build(answered(image(u), text("?"))).images for u in (url, str(path)))
    assert np.array_equal(inside.pixels, outside.pixels)


def test_paths(tmp_path: Path) -> None:
    odd = tmp_path / "a%20b c.mp4"
    odd.touch()
    (tmp_path / "x y.mp4").touch()
    assert local_path("a%20b c.mp4", tmp_path) == odd
    assert local_path(f"file://{odd}", tmp_path / "elsewhere") == odd
    assert local_path("file://x%20y.mp4", tmp_path) == tmp_path / "x y.mp4"
    for url, reason in (
        ("https://host/a.mp4", "media_remote"), ("s3://bucket/a.mp4", "media_remote"), ("no.mp4", "media_missing"),
        (".", "media_missing"), ("x" * 5000, "media_missing"), ("a\0b", "media_missing"),
    ):  # fmt: skip
        with pytest.raises(RowError) as caught:
            local_path(url, tmp_path)
        assert caught.value.reason == reason


user, good = turn("user", "q"), turn("assistant", "a")
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": 7}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "{"}, "messages"),
    ({"messages": "[" * 100_000}, "messages"),
    ({"messages": '"text"'}, "messages"),
    ({"messages": [None]}, "messages"),
    ({"messages": [{"role": None, "content": None}]}, "messages"),
    ({"messages": [{"role": ["user"], "content": "q"}, good]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "q"}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": None}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": [None]}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}, good]}, "messages"),
    (answered({"type": "image_url", "image_url": {"url": None}}), "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": [1]}]}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}, good]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": {}, "text": None}]}, good]}, "messages"),
    ({"messages": [user, {"role": "assistant", "content": None, "tool_calls": [{"function": None}]}]}, "messages"),
    ({"messages": [user, {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}]},
     "messages"),
    ({"messages": [user, good], "tools": "nonsense"}, "messages"),
    ({"messages": [user, good], "tools": [1]}, "messages"),
    ({"messages": [user, good], "tools": [{"made": b"\xff"}]}, "messages"),
    ({"messages": [user, turn("assistant", text("a"), image("longvt_source/videor1/0.jpg"))]}, "messages"),
    (answered({**video("longvt_source/selftrace/a.mp4"), "fps": "fast"}, text("q")), "messages"),
    (answered({**video("longvt_source/selftrace/a.mp4"), "nframes": 0}, text("q")), "messages"),
    (answered({**video("longvt_source/selftrace/a.mp4"), "video_start": 3, "video_end": 2}, text("q")), "messages"),
    (answered({**video("longvt_source/selftrace/a.mp4"), "fps": float("nan")}, text("q")), "messages"),
    ({"messages": [user]}, "no_answer"),
    ({"messages": [user, turn("assistant", " ")]}, "no_answer"),
    ({"messages": [user, {"role": "assistant", "content": []}]}, "no_answer"),
    ({"messages": [good, user]}, "no_question"),
    ({"messages": [turn("system", "s"), good]}, "no_question"),
    ({"messages": [turn("user", "<|im_end|>"), good]}, "control_token"),
    ({"messages": [user, turn("assistant", "<|image_pad|>")]}, "control_token"),
    ({"messages": [user, good], "tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]}, "control_token"),
    (answered(video("longvt_source/none.mp4"), text("q")), "media_missing"),
    (answered(video("https://example.com/a.mp4"), text("q")), "media_remote"),
    (answered(image("data:image/png;base64,!!"), text("q")), "media_damaged"),
    (answered(image("data:image/png;base64,AAAA"), text("q")), "media_damaged"),
    (answered(video("longvt_source/videor1/text.mp4"), text("q")), "media_damaged"),
    (answered(image("longvt_source/videor1/text.mp4"), text("q")), "media_damaged"),
    (answered({**video("longvt_source/selftrace/a.mp4"), "video_start": 100}, text("q")), "media_damaged"),
    (answered(text("word " * 40_000)), "too_long"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), HOSTILE)
def test_a_row_that_cannot_be_used_says_why(
    builder: TraceBuilder, root: Path, row: dict[str, Any], reason: str
) -> None:
    (root / "longvt_source/videor1/text.mp4").write_text("this is a text")
    with pytest.raises(RowError) as caught:
        builder.build(row)
    assert caught.value.reason == reason, caught.value
    assert len(str(caught.value)) < 1000


def test_lone_surrogates_are_no_reason(builder: TraceBuilder) -> None:
    row = {"messages": [turn("user", "a\ud800b"), turn("assistant", "c\udfffd")]}
    assert builder.build(row).segments[1].text == "c?d<|im_end|>"
    call = {"function": {"name": "crop_video", "arguments": {"what": "e\ud800f"}}}
    row["messages"][1] |= {"tool_calls": [call]}
    row["tools"] = [{"type": "function", "function": {"name": "crop_video", "description": "g\ud800h"}}]
    trace = builder.build(row)
    assert '"what": "e?f"' in trace.segments[1].text
    assert "g?h" in trace.segments[0].text


# ---------------------------------------------------------------------- files


def test_parquet_and_jsonl_have_the_same_rows(builder: TraceBuilder, tmp_path: Path) -> None:
    rows = good_rows()
    files = [
        write_parquet(tmp_path / "a.parquet", rows[:3]),
        write_parquet(tmp_path / "b.parquet", rows, as_text=True),
        write_lines(tmp_path / "c.jsonl", rows),
    ]
    for path in files:
        groups = open_groups(path, ["messages"])
        read = [read_group(group, ["messages"])[i] for group in groups for i in range(group.rows)]
        assert len(read) >= 3
        for row, expected in zip(read, rows, strict=False):
            assert same(builder.build(row), builder.build(expected))
    assert [group.rows for group in open_groups(files[1])] == [2, 2]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "a.csv").write_text("a,b")
    write_parquet(tmp_path / "other.parquet", [{"a": 1}])
    for name, message in (
        ("bad.parquet", "cannot be read"), ("empty.jsonl", "no rows"), ("a.csv", "neither"),
        ("other.parquet", "no column `messages`; it has a"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message) as caught:
            open_groups(tmp_path / name, ["messages"])
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        find_files([str(tmp_path / "*.nothing")])
    assert find_files([str(tmp_path / "*.parquet"), str(tmp_path / "bad.parquet")]) == [
        tmp_path / "bad.parquet", tmp_path / "other.parquet",
    ]  # fmt: skip


def test_a_file_that_changes_while_it_is_used(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"n": n} for n in range(5)])
    (group,) = open_groups(path)
    write_lines(path, [{"n": 0}])
    with pytest.raises(DataError, match="has changed"):
        read_group(group)


# ---------------------------------------------------------------------- order


def numbered(directory: Path, name: str, count: int, group: int = 3) -> RowSource:
    rows = [{"messages": f"{name}{n}"} for n in range(count)]
    path = write_parquet(directory / f"{name}.parquet", rows, group) if name != "l" else \
        write_lines(directory / "l.jsonl", rows)  # fmt: skip
    return RowSource(open_groups(path), seed=3)


def taken(stream: RowStream, count: int) -> list[str]:
    out = []
    for _ in range(count):
        row = stream.take().row
        assert isinstance(row, dict)
        out.append(row["messages"])
    return out


@pytest.mark.parametrize("window", [1, 10**9])
def test_every_row_once_in_a_pass_whatever_fits_into_memory(tmp_path: Path, window: int) -> None:
    groups = [g for name in "ab" for g in open_groups(
        write_parquet(tmp_path / f"{name}.parquet", [{"messages": f"{name}{n}"} for n in range(7)], 3))]  # fmt: skip
    source = RowSource(groups, 1, window_bytes=window)
    stream = RowStream([source], [1.0], 0)
    passes = [taken(stream, 14) for _ in range(3)]
    assert all(sorted(rows) == sorted(f"{name}{n}" for name in "ab" for n in range(7)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3
    assert len(source._open) == (1 if window == 1 else 6)


def test_a_mixture_keeps_its_weights_and_goes_on_from_a_saved_position(tmp_path: Path) -> None:
    def stream(position: Position | None = None) -> RowStream:
        sources = [numbered(tmp_path, "a", 10), numbered(tmp_path, "l", 25)]
        return RowStream(sources, [3.0, 1.0], seed=5, position=position)

    whole = taken(stream(), 2000)
    share = sum(row.startswith("a") for row in whole) / 2000
    assert 0.72 < share < 0.78
    first = [row for row in whole if row.startswith("l")]
    assert sorted(first[:25]) == sorted(f"l{n}" for n in range(25))
    for stop in (0, 1, 17, 60):
        begun = stream()
        head = taken(begun, stop)
        saved = Position.from_dict(json.loads(json.dumps(begun.position.to_dict())))
        assert head + taken(stream(saved), 80 - stop) == whole[:80]


# ---------------------------------------------------------------------- questions


def test_rl_rows_are_samples(root: Path, tmp_path: Path) -> None:
    rows = [
        rl_row(videos=[{"video": "file://museg/charades/b.mp4", "fps": None}]),
        rl_row("B", "mcq"),
        rl_row("a cat", None),
    ]
    parquet = write_parquet(tmp_path / "rl.parquet", rows)
    as_text = [{**row, "extra_info": json.dumps(row["extra_info"])} for row in rows]
    lines = write_lines(tmp_path / "lines.jsonl", as_text)
    for path in (parquet, lines):
        samples, skipped = read_question_rows([str(path)], root)
        assert not skipped
        assert [(s.id, s.type, s.answer) for s in samples] == [
            (f"{path.name}/0", "temporal", "1.0 - 2.5"), (f"{path.name}/1", "choice", "B"),
            (f"{path.name}/2", "open", "a cat"),
        ]  # fmt: skip
        assert {(s.question, s.video) for s in samples} == {("When?", str(root / "museg/charades/b.mp4"))}
        assert samples[0].metadata == {"source": "charades_tvg", "question_type": "tvg", "system": "s"}


def test_rows_of_files_of_one_name_have_ids_of_their_own(root: Path, tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        write_lines(tmp_path / part / "train.jsonl", [rl_row()])
    samples, _ = read_question_rows([str(tmp_path / "*" / "train.jsonl")], root)
    assert [sample.id for sample in samples] == ["a/train.jsonl/0", "b/train.jsonl/0"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": None}, "no_question"),
        ({"prompt": [{"role": "user", "content": "<video>"}]}, "no_question"),
        ({"prompt": "{"}, "messages"),
        ({"videos": []}, "videos"),
        ({"videos": None}, "videos"),
        ({"videos": [{"video": None}]}, "videos"),
        ({"videos": ["a.mp4", "b.mp4"]}, "videos"),
        ({"videos": ["none.mp4"]}, "media_missing"),
        ({"extra_info": None}, "answer"),
        ({"extra_info": "{}"}, "answer"),
        ({"extra_info": {"answer": " "}}, "answer"),
        ({"extra_info": {"answer": True}}, "answer"),
    ],
)
def test_rl_rows_that_cannot_be_used(root: Path, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write_lines(tmp_path / "rl.jsonl", [rl_row(), rl_row(**change), 7])
    samples, skipped = read_question_rows([str(path)], root)
    assert len(samples) == 1
    assert skipped == {reason: 1, "not_a_row": 1}
    with pytest.raises(DataError, match="none of 1 rows can be used; the first: "):
        read_question_rows([str(write_lines(tmp_path / "bad.jsonl", [rl_row(**change)]))], root)


def test_a_cursor_is_one_row(tmp_path: Path) -> None:
    source = numbered(tmp_path, "a", 4)
    assert source.after(Cursor(0, 3)) == Cursor(1, 0)
    assert source[Cursor(0, 1)].name != source[Cursor(0, 2)].name
