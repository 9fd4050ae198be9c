"""Odd files of rows, full disks and processes that were killed.

Locked here: one line says what is wrong and with which file; a row that cannot be gone through costs no other row; what
was there before is there afterwards, and the same command goes on.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from disk import full_disk
from PIL import Image
from rows import agent_row, answered, good_rows, image, text, turn, video, write_lines, write_parquet

from paravt.cli import main
from paravt.data import tables
from paravt.data.check import check_files
from paravt.data.copies import whole_file
from paravt.data.journal import Journal
from paravt.data.json_text import DEEPEST, parse
from paravt.data.materialize import materialize
from paravt.data.skips import RowError
from paravt.data.split import split_files
from paravt.data.stats import file_stats
from paravt.data.tables import open_groups, raw_rows, read_group
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.errors import DataError, RecipeError
from paravt.metrics import MetricsFile
from paravt.provenance import lock_directory


def files_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------- odd files


def test_a_damaged_file_is_named_and_not_the_one_that_is_written(root: Path, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "page.parquet", [agent_row() for _ in range(50)], group=50, as_text=True)
    content = bytearray(path.read_bytes())
    content[20:200] = bytes(180)  # its footer is whole
    path.write_bytes(content)
    for go in (
        lambda: materialize(str(path), tmp_path / "out", root),
        lambda: check_files([str(path)], RowConfig(root=root)),
        lambda: split_files([str(path)], tmp_path / "parts", 0.5),
    ):
        with pytest.raises(DataError, match=r"page\.parquet: cannot be read: \S") as caught:
            go()
        assert "\n" not in str(caught.value)
    assert not files_in(tmp_path) - {"page.parquet"}


def test_a_column_that_is_there_twice(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["messages", "messages"]), path)
    with pytest.raises(DataError, match="the column `messages` is there twice"):
        open_groups(path)
    with pytest.raises(DataError, match="the column `messages` is there twice"):
        materialize(str(path), tmp_path / "out", root)


def nested(depth: int) -> str:
    return '{"messages": ' + "[" * depth + "]" * depth + "}"


def test_rows_that_are_nested_deeply_cost_no_other_row(root: Path, tmp_path: Path, builder: TraceBuilder) -> None:
    tools = [json.loads('{"a": ' * 50 + "1" + "}" * 50)]
    deep: list[Any] = [nested(depth) for depth in (DEEPEST, 300, 600, 990, 100_000)]
    rows = [*deep, {"messages": "[" * 400 + "]" * 400}, agent_row() | {"tools": tools}]
    path = write_lines(tmp_path / "deep.jsonl", rows)
    (done,) = materialize(str(path), tmp_path / "out.jsonl", root)
    assert (done.rows, done.unreadable, done.changed) == (7, 5, 1)
    assert (tmp_path / "out.jsonl").read_text().splitlines()[:6] == path.read_text().splitlines()[:6]
    (check,) = check_files([str(path)], RowConfig(root=root), chat=builder.chat)
    assert (check.good, check.skipped) == (1, {"not_a_row": 5, "messages": 1})
    (stats,) = file_stats([str(path)], root)
    assert stats.unreadable == {"not_a_row": 5, "messages": 1}
    done_split = split_files([str(path)], tmp_path / "parts", 0.5, root=root)
    assert done_split.rows == {"train": 6, "validation": 1}


def test_how_deep_json_may_be() -> None:
    assert parse("[" * DEEPEST + "]" * DEEPEST)
    assert parse('{"a": [' * (DEEPEST // 2) + "1" + "]}" * (DEEPEST // 2))
    for text_ in ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), '{"a":' * 200 + "1" + "}" * 200, "[" * 10**6):
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
            parse(text_)


def test_addresses_that_no_file_can_have(root: Path, tmp_path: Path) -> None:
    rows = [answered(video(name), text("q")) for name in ("a\0b", "half\ud800.mp4", "x" * 5000, "~", "//", "file://")]
    path = write_lines(tmp_path / "odd.jsonl", [*rows, *good_rows()])
    (done,) = materialize(str(path), tmp_path / "out.jsonl", root)
    assert done.rows == 10
    (check,) = check_files([str(tmp_path / "out.jsonl")])
    assert check.good == 4
    assert check.skipped.total() == 6
    assert file_stats([str(path)])[0].rows == 10
    assert sum(split_files([str(path)], tmp_path / "parts", 0.5).rows.values()) == 10


def test_half_of_a_character_costs_no_other_row_and_stays_as_it_is(root: Path, tmp_path: Path) -> None:
    rows = [answered(video("longvt_source/selftrace/a.mp4"), text(f"q {said}")) for said in ("\ud800", "é🎬", "x")]
    for path in (
        write_parquet(tmp_path / "a.parquet", rows, as_text=True),
        write_lines(tmp_path / "a.jsonl", rows),
    ):
        (done,) = materialize(str(path), tmp_path / "out", root)
        assert (done.rows, done.changed) == (3, 3)
        for row, (_, made) in zip(rows, raw_rows(tmp_path / "out" / path.name), strict=True):
            assert isinstance(made, dict)
            turns = json.loads(made["messages"]) if isinstance(made["messages"], str) else made["messages"]
            assert turns[0]["content"][1] == row["messages"][0]["content"][1]
            assert turns[0]["content"][0]["video_url"]["url"] == f"file://{root}/longvt_source/selftrace/a.mp4"
    assert "é🎬" in (tmp_path / "out/a.jsonl").read_text()


def test_an_image_of_a_kind_that_cannot_be_read_is_a_row_that_is_skipped(
    root: Path, tmp_path: Path, builder: TraceBuilder
) -> None:
    path = tmp_path / "a.dds"
    Image.new("RGB", (40, 40)).save(path)
    content = bytearray(path.read_bytes())
    content[80:84] = bytes(4)  # no known format of pixels
    path.write_bytes(content)
    with pytest.raises(RowError) as caught:
        builder.build(answered(image(str(path)), text("q")))
    assert caught.value.reason == "media_damaged"


def test_lines_are_read_in_stretches_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may hold their images."""
    monkeypatch.setattr(tables, "_BYTES", 2000)
    path = write_lines(tmp_path / "a.jsonl", [{"n": n, "image": "x" * (900 if n % 3 else 5000)} for n in range(20)])
    groups = open_groups(path)
    assert [row["n"] for group in groups for row in map(read_group(group).__getitem__, range(group.rows))] == [
        *range(20)
    ]
    assert max(group.bytes for group in groups) < 2000 + 5100
    assert [group.first for group in groups] == [sum(g.rows for g in groups[:n]) for n in range(len(groups))]


# ---------------------------------------------------------------------- full disks, killed processes, two at once


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_copy_that_finds_no_room_leaves_the_one_before(root: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    write = write_parquet if name == "a.parquet" else write_lines
    write(tmp_path / name, good_rows()[:3])
    materialize(str(tmp_path / name), out, root)
    before = (out / name).read_bytes()
    write(tmp_path / name, good_rows()[:3] * 20)
    with full_disk(1000), pytest.raises(OSError, match="large") as caught:
        materialize(str(tmp_path / name), out, root)
    assert caught.value.filename == str(out / name)
    assert files_in(out) == {name, f"{name}.materialized.json"}
    assert (out / name).read_bytes() == before
    (done,) = materialize(str(tmp_path / name), out, root)
    assert (done.rows, done.made) == (60, True)


def test_what_a_killed_process_left_is_written_anew_and_two_do_not_write_one_file(root: Path, tmp_path: Path) -> None:
    path, out = write_lines(tmp_path / "a.jsonl", good_rows()), tmp_path / "out"
    out.mkdir()
    left = out / ".a.jsonl.partial"
    left.write_text("half of a line that is longer than all that will be written\n" * 1000)
    with left.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"out/a\.jsonl: another process is writing it"):
            materialize(str(path), out, root)
        assert left.exists()
    materialize(str(path), out, root)
    assert files_in(out) == {"a.jsonl", "a.jsonl.materialized.json"}
    assert len(list(raw_rows(out / "a.jsonl"))) == 4
    with whole_file(out / "b.jsonl") as partial:
        partial.write_text("whole")
        assert "b.jsonl" not in files_in(out)
    assert (out / "b.jsonl").read_text() == "whole"


def test_a_split_is_finished_by_the_same_call_and_no_other_one_is_mixed_in(tmp_path: Path) -> None:
    rows = [answered(video(f"{n}.mp4"), text("q")) for n in range(20)]
    first, second = (write_lines(tmp_path / f"{name}.jsonl", rows) for name in "ab")
    files, out = [str(first), str(second)], tmp_path / "out"
    with full_disk(1000), pytest.raises(OSError, match="large") as caught:
        split_files(files, out, 0.3)
    assert caught.value.filename == str(out / "train/a.jsonl")
    done = split_files(files, out, 0.3)
    whole = {name: (out / name).read_bytes() for name in files_in(out)}
    assert {"train/a.jsonl", "train/b.jsonl", "validation/a.jsonl", "validation/b.jsonl"} < set(whole)
    (out / "validation/b.jsonl").unlink()  # as if it had been killed before it came to it
    assert split_files(files, out, 0.3) == done
    assert {name: (out / name).read_bytes() for name in files_in(out)} == whole
    for other in ({"patterns": [str(first)], "share": 0.3}, {"patterns": files, "share": 0.3, "seed": 1}):
        with pytest.raises(DataError, match="holds another split"):
            split_files(out=out, **other)
    assert {name: (out / name).read_bytes() for name in files_in(out)} == whole
    with lock_directory(out), pytest.raises(RecipeError, match="another process is running there"):
        split_files(files, out, 0.3)


def test_a_check_says_at_once_that_its_faults_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [turn("user", "q")]}] * 30)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(path), "--faults", str(tmp_path / "file" / "faults.jsonl")])
    assert ended.value.code == 6
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip().endswith("/file: File exists")
    with full_disk(1000), pytest.raises(SystemExit) as ended:
        main(["data", "check", str(path), "--faults", str(tmp_path / "faults.jsonl")])
    assert ended.value.code == 6
    assert capsys.readouterr().err.strip().endswith("faults.jsonl: File too large")
    assert files_in(tmp_path) == {"a.jsonl", "file"}


def test_a_journal_and_metrics_that_find_no_room(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"

    def write() -> None:
        with Journal(path) as journal:
            for number in range(100):
                journal.add({"number": number, "text": "x" * 90})

    with full_disk(1000), pytest.raises(OSError, match="large") as caught:
        write()
    assert caught.value.filename == str(path)
    with Journal(path) as journal:
        assert [row["number"] for row in journal.rows] == list(range(len(journal.rows)))
        assert 5 < len(journal.rows) < 10
        journal.add({"number": "next"})
    assert path.read_text().splitlines()[-1] == '{"number": "next"}'
    metrics = MetricsFile(tmp_path / "m.jsonl")
    with full_disk(10), pytest.raises(OSError, match="large") as caught:
        metrics.add(1, {"loss": 1.0})
    assert caught.value.filename == str(tmp_path / "m.jsonl")
    assert metrics.cut(0) == []
