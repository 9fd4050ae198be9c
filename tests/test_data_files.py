"""Files of rows, from the published layouts to training.

Locked here: local paths take the place of sentinels once, whatever the layout, and everything else of a row stays as it
is; a check finds what is wrong and where, and counts tokens as training has them without decoding; a row is shown as
the very tokens it becomes; no video is on both sides of a split; and a corpus goes all the way through, malformed rows
included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from qwen_vocabulary import qwen3_tokenizer
from rich.console import Console
from rows import (
    agent_row,
    answered,
    frames_row,
    good_rows,
    image,
    rl_row,
    text,
    turn,
    two_videos_row,
    video,
    write_image,
    write_lines,
    write_parquet,
    write_video,
)

from paravt.ask import shipped_model
from paravt.chat import TokenChat
from paravt.cli import main
from paravt.config import RLRecipe, SFTRecipe, load_recipe
from paravt.data.addresses import find_addresses
from paravt.data.check import Fault, FileCheck, check_files, require_usable
from paravt.data.layouts import listed_options
from paravt.data.materialize import bucket, materialize
from paravt.data.show import show_row
from paravt.data.split import split_files
from paravt.data.stats import file_stats, shared_media
from paravt.data.tables import raw_rows
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.data_terminal import show_checks, show_shown
from paravt.errors import DataError
from paravt.lab.factory import train_sft
from paravt.lab.tiny import build_processor
from paravt.models import QwenVL
from paravt.video import FrameReader

BAD: list[Any] = [
    {"messages": [turn("user", "q")]},
    answered(video("longvt_source/gone/none.mp4"), text("q")),
    answered(video("https://host/a.mp4"), text("q")),
    answered(video("../../etc/passwd"), text("q")),
    {"messages": "{", "videos": 7},
    {"messages": None},
    "not json",
    "[1]",
]


BAD_TEXTS = ["{", None, "[]", "null", json.dumps([turn("user", "q")])]


def corpus(directory: Path) -> Path:
    """A file of each layout, and some with malformed rows."""
    rows = good_rows()
    said = json.dumps(agent_row()["messages"])
    write_parquet(directory / "list.parquet", rows[:3])
    write_parquet(directory / "deep/text.parquet", rows, as_text=True)
    write_parquet(directory / "rl.parquet", [rl_row(), rl_row("a cat", "oe")])
    write_parquet(directory / "bad.parquet", [*({"messages": bad} for bad in BAD_TEXTS), {"messages": said}])
    write_lines(directory / "mixed.jsonl", [*rows, *BAD])
    write_video(directory / "own.mp4", seconds=5)
    question = {"video": "own.mp4", "question": "What?", "options": ["a", "b"], "answer": "B", "id": "q1"}
    write_lines(directory / "own.jsonl", [question])
    return directory


def rows_of(path: Path) -> list[Any]:
    return [row for _, row in raw_rows(path)]


# ---------------------------------------------------------------------- materialize


def test_sentinels_become_local_paths_and_nothing_else_changes(root: Path, tmp_path: Path) -> None:
    given, out = corpus(tmp_path / "in"), tmp_path / "out"
    done = {file.target.relative_to(out).as_posix(): file for file in materialize(str(given), out, root)}
    assert set(done) == {
        "list.parquet", "deep/text.parquet", "rl.parquet", "bad.parquet", "mixed.jsonl", "own.jsonl"
    }  # fmt: skip
    assert all(file.made for file in done.values())
    for name in done:
        for before, after in zip(rows_of(given / name), rows_of(out / name), strict=True):
            if not isinstance(before, dict):
                assert type(before) is type(after)
                continue
            for old, new in zip(find_addresses(before), find_addresses(after), strict=True):
                if "//" not in old and ".." not in old:
                    assert new in (f"file://{root / old}", str(given.absolute() / old))
                else:
                    assert new == old
                after = json.loads(json.dumps(after).replace(new, old))
            assert json.loads(json.dumps(before)) == after
    assert pq.read_schema(out / "list.parquet") == pq.read_schema(given / "list.parquet")
    assert pq.ParquetFile(out / "list.parquet").num_row_groups == 2
    mixed = done["mixed.jsonl"]
    assert mixed.missing == {"longvt_source/gone": [str(root / "longvt_source/gone/none.mp4")]}
    assert (mixed.rows, mixed.changed, mixed.remote, mixed.outside, mixed.unreadable) == (12, 4, 1, 1, 2)
    assert (given / "mixed.jsonl").read_text().splitlines()[8:] == (out / "mixed.jsonl").read_text().splitlines()[8:]


def test_again_it_changes_nothing_and_looks_for_what_was_missing(root: Path, tmp_path: Path) -> None:
    given = corpus(tmp_path / "in")
    once, twice = tmp_path / "once", tmp_path / "twice"
    materialize(str(given), once, root)
    materialize(str(once), twice, root)
    for name in ("list.parquet", "deep/text.parquet", "rl.parquet", "mixed.jsonl", "own.jsonl"):
        assert (once / name).read_bytes() == (twice / name).read_bytes() or rows_of(once / name) == rows_of(
            twice / name
        )
    before = {path: path.stat().st_mtime_ns for path in once.rglob("*.parquet")}
    late = write_video(root / "longvt_source/gone/none.mp4")
    try:
        again = materialize(str(given), once, root)
    finally:
        late.unlink()
    assert not any(file.made for file in again)
    assert not any(file.missing for file in again)
    assert {path: path.stat().st_mtime_ns for path in once.rglob("*.parquet")} == before
    # stopped before the last file was written: only that one is made
    (once / "rl.parquet").unlink()
    (once / "mixed.jsonl").write_text("cut of")
    assert {file.target.name for file in materialize(str(given), once, root) if file.made} == {
        "rl.parquet",
        "mixed.jsonl",
    }
    # in place
    write_lines(given / "list.parquet.materialized.json", [])
    materialize(str(given), given, root)
    assert rows_of(given / "list.parquet") == rows_of(once / "list.parquet")
    assert not any(path.name.endswith(".partial") for path in tmp_path.rglob("*"))


def test_what_cannot_be_materialized(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no parquet")
    write_lines(tmp_path / "empty.jsonl", [])
    for name, message in (
        ("bad.parquet", "bad.parquet: cannot be read: "),
        ("empty.jsonl", "no rows"),
        ("none.jsonl", "no such file"),
    ):
        with pytest.raises(DataError, match=message):
            materialize(str(tmp_path / name), tmp_path / "out", root)
    with pytest.raises(DataError, match="no such directory"):
        materialize(str(tmp_path), tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"layout of its original, \.parquet"):
        materialize(str(write_parquet(tmp_path / "a.parquet", [rl_row()])), tmp_path / "a.jsonl", root)
    # a column with a text that is no text costs its own row
    odd = pa.array([json.dumps(agent_row()["messages"]), "x"]).cast(pa.binary()).to_pylist()
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([odd[0], b"\xff\xfe"], pa.binary()).buffers())
    pq.write_table(pa.table({"messages": broken}), tmp_path / "odd.parquet")
    (done,) = materialize(str(tmp_path / "odd.parquet"), tmp_path / "odd", root)
    assert (done.rows, done.changed, done.unreadable) == (2, 1, 1)


def test_a_colon_in_a_name_is_no_address(root: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [answered(video("clip:1.mp4"), text("q"))])
    late = write_video(root / "clip:1.mp4")
    (done,) = materialize(str(path), tmp_path / "b.jsonl", root)
    assert (done.changed, done.remote, done.missing) == (1, 0, {})
    assert checked(tmp_path / "b.jsonl", root)[0].good == 1
    late.unlink()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("longvt_source/tvg/a/b.mp4", "longvt_source/tvg"), ("museg/charades/a.mp4", "museg/charades"),
        ("selfqa/a.mp4", "selfqa"), ("museg/a.mp4", "museg"), ("/data/x/a.mp4", "/data/x"), ("a.mp4", "."),
    ],
)  # fmt: skip
def test_buckets(path: str, name: str) -> None:
    assert bucket(path) == name


# ---------------------------------------------------------------------- check


def checked(path: Path, root: Path, **more: Any) -> tuple[FileCheck, list[Fault]]:
    faults: list[Fault] = []
    (check,) = check_files(
        [str(path)], RowConfig(root=root, max_pixels=1024), workers=2, on_fault=faults.append, **more
    )
    return check, faults


def test_what_a_check_finds(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "text.mp4", ["this is a text"])
    options = "Which?\nA. a cat\nB. a dog\n"
    late = json.loads(json.dumps(agent_row()).replace('\\"end_time\\": 3', '\\"end_time\\": 30'))
    own = {"video": "own.mp4", "question": "q?", "answer": "B", "options": ["a", "b"]}
    write_video(tmp_path / "own.mp4", seconds=3)
    rows: list[Any] = [
        *good_rows(),  # 0-3
        agent_row() | {"id": "x"},  # 4: as row 0
        answered(video("longvt_source/selftrace/a.mp4"), text(options), answer="<answer>C</answer>"),
        answered(video("longvt_source/selftrace/a.mp4"), text(options), answer="<answer>B. a dog</answer>"),
        answered({**video("longvt_source/selftrace/a.mp4"), "video_start": 1, "video_end": 90}, text("q")),
        late,
        answered(video(str(tmp_path / "text.mp4")), text("q")) | {"id": "x"},
        answered(image("x\x1b[31m.png")),  # 10
        rl_row("1.0 - 2.5"),
        rl_row("1.0 - 25"),
        rl_row("half past two"),
        rl_row("Z", "mcq"),
        rl_row("B", "mcq", options),  # 15
        rl_row("C", "mcq", options),
        own,
        own | {"answer": "c"},
        own | {"options": "ab"},
        "not json",  # 20
        {"text": "a row of something else"},
    ]
    check, faults = checked(write_lines(tmp_path / "c.jsonl", rows), root)
    assert [(fault.row, fault.kind, fault.usable) for fault in faults] == [
        (4, "duplicate_row", True), (5, "answer", True), (7, "window", True), (8, "window", True), (8, "window", True),
        (9, "media_damaged", False), (10, "media_missing", False), (12, "window", True), (13, "answer", True),
        (14, "answer", True), (16, "answer", True), (18, "answer", True), (19, "sample", False),
        (20, "not_a_row", False), (21, "not_a_row", False),
    ]  # fmt: skip
    assert (check.rows, check.usable, check.good) == (22, 17, 8)
    assert "the window 1 - 90 is past the end of the video (4 seconds)" in faults[2].message
    show_checks(Console(width=200), [check])
    shown = capsys.readouterr().out
    assert "5 answer (used), such as row 5: the answer 'C' is not exactly one of the 2 options" in shown
    assert "\x1b" not in shown
    twice, found = checked(write_lines(tmp_path / "d.jsonl", [own | {"id": 1}, own | {"id": 1, "question": "?"}]), root)
    assert [fault.kind for fault in found] == ["duplicate_id"]
    assert twice.usable == 2


def test_both_ends_of_a_video_are_decoded(root: Path, tmp_path: Path) -> None:
    """A file whose beginning is fine and whose end is not, as after a download that broke off."""
    draw = np.random.default_rng(0)
    with av.open(str(tmp_path / "whole.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=2, options={"preset": "ultrafast", "g": "4"})
        stream.width = stream.height = 64
        for _ in range(40):
            pixels = draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    whole = bytearray((tmp_path / "whole.mp4").read_bytes())
    start, end = whole.index(b"mdat"), whole.index(b"moov")
    half = (start + end) // 2
    whole[half : end - 4] = bytes(end - 4 - half)
    (tmp_path / "broken.mp4").write_bytes(whole)
    path = write_lines(tmp_path / "c.jsonl", [answered(video(str(tmp_path / "broken.mp4")), text("q"))])
    assert checked(path, root)[0].skipped == {"media_damaged": 1}
    assert checked(path, root, decode=False)[0].good == 1


def test_tokens_are_those_of_training(tiny: QwenVL, root: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [*good_rows(), rl_row()])
    config = RowConfig(root=root, max_pixels=1024)
    check, faults = checked(path, root, chat=tiny.chat, frames=4)
    assert not faults
    builder = TraceBuilder(tiny.chat, FrameReader(workers=1), config)
    assert list(check.tokens)[:4] == [len(builder.build(row).ids) for row in good_rows()]
    assert check.tokens[4] == len(show_row(str(path), "4", builder, 4).trace.ids)
    tight = RowConfig(root=root, max_pixels=1024, max_tokens=min(check.tokens))
    (short,) = check_files([str(path)], tight, chat=tiny.chat, frames=4)
    assert short.skipped["too_long"] + short.faults["too_long"] == 4


def test_a_file_without_a_good_row(root: Path, tmp_path: Path) -> None:
    check, _ = checked(write_lines(tmp_path / "c.jsonl", BAD), root)
    assert check.usable == 0
    with pytest.raises(DataError, match=r"c.jsonl: none of 8 rows can be used: \d \w+"):
        require_usable([check])


def test_options_in_a_text() -> None:
    assert listed_options("Which?\nA. a\n(B) b c \nC: d") == ("a", "b c", "d")
    assert listed_options("A. Smith wrote it\n1. x") == ()
    assert listed_options("B. b\nC. c") == ()


# ---------------------------------------------------------------------- show


@pytest.fixture(scope="module")
def qwen() -> TokenChat:
    """The real vocabulary."""
    return TokenChat(build_processor(qwen3_tokenizer()))


def test_a_row_is_shown_as_its_tokens_with_the_real_vocabulary(
    qwen: TokenChat, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marks of what is learned stand where the mask changes, also where the vocabulary would merge across: the line
    break after a turn's end, a letter after a bracket, halves of a character."""
    odd = answered(text("né🎬"), answer="So it's B.</think>\n<answer>B</answer>.\n🎬")
    path = write_lines(tmp_path / "c.jsonl", [agent_row(), frames_row(), odd])
    builder = TraceBuilder(qwen, FrameReader(workers=1), RowConfig(root=root, max_pixels=1024))
    for number, row in enumerate((agent_row(), frames_row(), odd)):
        shown = show_row(str(path), str(number), builder)
        ids, mask = shown.trace.ids, shown.trace.loss_mask
        learned = [i for i, m in zip(ids, mask, strict=True) if m]
        assert qwen.tokenizer.decode(learned) == "".join(piece.text for piece in shown.pieces if piece.learned)
        said = ["".join(p["text"] for p in t["content"]) if isinstance(t["content"], list) else t["content"]
                for t in row["messages"] if t["role"] == "assistant"]  # fmt: skip
        assert [piece.text for piece in shown.pieces if piece.learned] == [f"{turn}<|im_end|>" for turn in said]
        assert "".join(piece.text for piece in shown.pieces).count("×1(32×32)") == len(shown.trace.images)
        # what follows a learned turn begins with the line break that is never sampled
        assert all(piece.text.startswith("\n<|im_start|>") for piece in shown.pieces[2::2])
    show_shown(Console(width=200), shown)
    printed = capsys.readouterr().out
    assert "⟦So it's B.</think>\n<answer>B</answer>.\n🎬<|im_end|>⟧" in printed
    assert f"{len(ids)} tokens, {sum(mask)} of them learned, 0 images" in printed
    show_shown(Console(width=200, force_terminal=True, color_system="standard"), shown)
    coloured = capsys.readouterr().out
    assert "\x1b[1;32mSo it's B." in coloured
    assert "⟦" not in coloured


def test_a_row_by_its_id_and_rows_that_cannot_be_shown(tiny: QwenVL, root: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [frames_row(), agent_row() | {"id": "mine"}, *BAD])
    builder = TraceBuilder(tiny.chat, FrameReader(workers=1), RowConfig(root=root, max_pixels=1024))
    assert show_row(str(path), "mine", builder).trace == show_row(str(path), "1", builder).trace
    for wanted, message in (("2", "would be skipped .no_answer"), ("8", "row 8: not JSON"), ("99", "no row 99")):
        with pytest.raises(DataError, match=message):
            show_row(str(path), wanted, builder)


# ---------------------------------------------------------------------- split and stats


def test_no_video_is_on_both_sides(tmp_path: Path) -> None:
    def asks(*names: str) -> dict[str, Any]:
        return answered(*(video(f"v/{name}.mp4") for name in names), text(f"about {names}"))

    chained = [asks(f"c{n}", f"c{n + 1}") for n in range(12)]  # all of them belong together
    lone = [asks(f"l{n % 40}") for n in range(120)]
    first = write_parquet(tmp_path / "a.parquet", [*chained[:6], *lone[:60]], group=7)
    blind: list[Any] = [good_rows()[3], "not json", {"messages": [turn("user", image("file://v/l0.mp4"))]}]
    second = write_lines(tmp_path / "sub/b.jsonl", [*lone[60:], *chained[6:], *blind])
    question = {"video": "../v/l1.mp4", "question": "q", "answer": "a"}
    third = write_lines(tmp_path / "sub/q.jsonl", [question])
    files = [str(first), str(second), str(third)]
    out = tmp_path / "out"
    done = split_files(files, out, 0.2, root=tmp_path)
    total = 12 + 120 + 3 + 1
    assert sum(done.rows.values()) == total
    assert 0.1 * total < done.rows["validation"] <= 0.2 * total
    sides: dict[str, set[str]] = {}
    count = 0
    for part in ("train", "validation"):
        found = sides.setdefault(part, set())
        for path in (out / part).rglob("*.*"):
            for row in rows_of(path):
                count += 1
                if isinstance(row, dict):
                    found |= {Path(address).name for address in find_addresses(row)}
    assert count == total
    assert not sides["train"] & sides["validation"]
    assert sides["validation"]
    assert len({f"c{n}.mp4" for n in range(13)} & sides["validation"]) in (0, 13)
    stats = file_stats([str(path) for path in out.rglob("*.parquet")])
    assert shared_media(stats) == 0
    again = split_files(files, tmp_path / "again", 0.2, root=tmp_path)
    assert again == done
    assert rows_of(tmp_path / "again/validation/a.parquet") == rows_of(out / "validation/a.parquet")
    split_files(files, tmp_path / "other", 0.2, 1, tmp_path)
    assert rows_of(tmp_path / "other/train/a.parquet") != rows_of(out / "train/a.parquet")
    with pytest.raises(DataError, match="nothing to validate on"):
        split_files([str(first)], out, 0.001, root=tmp_path)


def test_stats_of_every_layout(tmp_path: Path) -> None:
    """No media are needed."""
    given = corpus(tmp_path / "in")
    write_lines(given / "rl2.jsonl", [rl_row("B", "mcq", "Which?\nA. a\nB. b"), rl_row("b", "mcq", "?\nA. a\nB. b")])
    stats = {one.path.name: one for one in file_stats([f"{given}/*.parquet", f"{given}/*.jsonl"])}
    conversations = stats["list.parquet"]
    assert (conversations.rows, conversations.videos, conversations.images) == (3, 3, 3)
    assert conversations.calls == {2: 1, 1: 1, 0: 1}
    assert (conversations.parallel, conversations.strict, len(conversations.media)) == (1, 2, 5)
    assert stats["rl.parquet"].types == {"temporal": 1, "open": 1}
    assert stats["rl2.jsonl"].letters == {"B": 2}
    assert stats["mixed.jsonl"].unreadable.total() == 5
    assert all(json.dumps(one.to_dict()) for one in stats.values())


# ---------------------------------------------------------------------- all the way


def test_from_published_files_to_a_trained_checkpoint(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def paravt(*arguments: str | Path) -> tuple[int, str]:
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, capsys.readouterr().out

    given, local = corpus(tmp_path / "in"), tmp_path / "local"
    code, shown = paravt("data", "materialize", given, local, "--root", root)
    assert code == 0
    assert "longvt_source/gone" in shown
    faults = tmp_path / "faults.jsonl"
    model = str(shipped_model())
    good = [local / "deep/text.parquet", local / "rl.parquet", local / "own.jsonl"]
    code, shown = paravt("data", "check", *good, "--model", model, "--faults", faults)
    assert (code, faults.read_text()) == (0, "")
    code, shown = paravt("data", "check", local / "list.parquet", local / "deep/text.parquet")
    assert code == 1
    assert "3 duplicate_row (used), such as row 0: the same as" in shown  # in another layout
    code, shown = paravt("data", "check", local / "mixed.jsonl", "--model", model, "--faults", faults, "--json")
    assert code == 1
    (said,) = map(json.loads, shown.splitlines())
    assert said["usable"] == 4
    assert said["tokens"]["max"] > 0
    assert len(faults.read_text().splitlines()) == len(BAD)
    code, shown = paravt("data", "check", local / "bad.parquet", "--json")
    assert code == 1
    assert json.loads(shown)["skipped"] == {"messages": 3, "not_a_row": 1, "no_answer": 1}
    code, shown = paravt("data", "show", local / "bad.parquet", "5", "--fps", "0.5", "--json")
    assert code == 0
    assert len(json.loads(shown)["images"]) == 2  # of four seconds
    bad = write_lines(tmp_path / "bad.jsonl", BAD)
    assert paravt("data", "check", bad)[0] == 6
    code, shown = paravt("data", "show", local / "deep/text.parquet", "0")
    assert code == 0
    assert "⟦<think>\nI look." in shown
    code, shown = paravt("data", "show", local / "own.jsonl", "q1", "--frames", "2", "--json")
    assert code == 0
    assert len(json.loads(shown)["images"]) == 2
    assert paravt("data", "stats", local / "list.parquet")[0] == 0
    extra = [root / f"extra-{n}.png" for n in range(40)]  # so many that either part has some, whatever their hashes are
    for path in extra:
        write_image(path)
    more = [answered(image(str(path)), text("What?")) for path in extra]
    files = [
        local / "list.parquet",
        local / "bad.parquet",
        local / "mixed.jsonl",
        write_lines(tmp_path / "more.jsonl", more),
    ]
    code, shown = paravt("data", "split", *files, "--out", tmp_path / "parts", "--validation", "0.2")
    assert code == 0, shown
    parts = {part: [str(p) for p in (tmp_path / "parts" / part).rglob("*.*")] for part in ("train", "validation")}
    data = {"kind": "messages", "files": parts["train"],
            "validation": {"files": parts["validation"], "rows": 2, "every": 2}}  # fmt: skip
    recipe = SFTRecipe.model_validate(
        {
            "model": {"kind": "pretrained", "path": model, "dtype": "float32"},
            "threads": 1,
            "stages": [{"name": "rows", "steps": 2, "batch_size": 2, "learning_rate": 1e-4, "data": data}],
        }
    )
    train_sft(recipe, tmp_path / "run", Console(quiet=True))
    last = json.loads((tmp_path / "run/rows.jsonl").read_text().splitlines()[-1])
    assert last["validation/loss"] > 0
    assert (tmp_path / "run/rows/model.safetensors").exists()


def test_two_videos_of_one_row_are_both_changed(root: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [two_videos_row()])
    materialize(str(path), tmp_path / "b.jsonl", root)
    (row,) = rows_of(tmp_path / "b.jsonl")
    assert find_addresses(row) == [f"file://{root / name}" for name in
                                   ("longvt_source/selftrace/a.mp4", "museg/charades/b.mp4")]  # fmt: skip


def test_recipes_of_ones_own_are_valid() -> None:
    recipes = Path(__file__).parents[1] / "recipes" / "own"
    sft, rl = load_recipe(SFTRecipe, recipes / "sft.yaml"), load_recipe(RLRecipe, recipes / "rl.yaml")
    assert Path(rl.model.path) == Path("runs/own-sft") / sft.stages[-1].name
    assert rl.data.kind == "jsonl"
    assert rl.data.difficulty is not None
