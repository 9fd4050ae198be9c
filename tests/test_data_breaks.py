"""Commands on data in the hands of someone unlucky or hostile.

Locked here: nothing that was there before is lost by naming the wrong file; what looks like another file and is the
same one is found; a number that is none is refused where it is given; a row that nobody could have thought of costs no
other row.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rows import CALL, answered, good_rows, image, rl_row, text, turn, video, write_lines, write_video

from paravt.cli import main
from paravt.data.check import check_files
from paravt.data.copies import paired_files, whole_file
from paravt.data.journal import Journal
from paravt.data.materialize import materialize
from paravt.data.rows import RowSource, RowStream
from paravt.data.show import find_row
from paravt.data.split import split_files
from paravt.data.tables import find_files, open_groups
from paravt.data.traces import RowConfig, TraceBuilder
from paravt.errors import DataError
from paravt.questions import read_samples
from paravt.ranks import Ranks
from paravt.sft_batches import Batches


def ends(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    """The exit code of a command and what it said to standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code, " ".join(capsys.readouterr().err.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", "").split())


# ---------------------------------------------------------------------- the wrong file


def test_the_faults_of_a_file_do_not_take_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", good_rows())
    (tmp_path / "link.jsonl").symlink_to(path)
    before = path.read_bytes()
    for name in ("a.jsonl", "link.jsonl"):
        code, said = ends(capsys, "data", "check", path, "--faults", tmp_path / name)
        assert code == 2
        assert "is one of the files that are looked at" in said
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["a.jsonl", "other.jsonl"])
def test_a_copy_takes_the_place_of_no_other_file(root: Path, tmp_path: Path, name: str) -> None:
    first = write_lines(tmp_path / "one/a.jsonl", good_rows())
    second = write_lines(tmp_path / "two/a.jsonl", good_rows()[:1])
    out = tmp_path / "out"
    materialize(str(first), out / "a.jsonl", root)
    write_lines(out / "other.jsonl", ["mine"])
    before = (out / name).read_bytes()
    with pytest.raises(DataError, match=rf"{name}: is there already, and is no copy of .*two/a\.jsonl; remove it"):
        materialize(str(second), out / name, root)
    assert (out / name).read_bytes() == before
    assert {path.name for path in out.iterdir()} == {"a.jsonl", "a.jsonl.materialized.json", "other.jsonl"}


def test_a_copy_whose_record_was_not_written_any_more_is_its_own(root: Path, tmp_path: Path) -> None:
    """A process can be killed between the two."""
    path = write_lines(tmp_path / "a.jsonl", good_rows())
    (done,) = materialize(str(path), tmp_path / "out.jsonl", root)
    (tmp_path / "out.jsonl.materialized.json").unlink()
    (again,) = materialize(str(path), tmp_path / "out.jsonl", root)
    assert (again.rows, again.changed, again.files) == (done.rows, done.changed, done.files)
    assert (tmp_path / "out.jsonl.materialized.json").exists()


def test_in_its_own_place_also_by_another_name(root: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "real/a.jsonl", good_rows())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert [done.changed for done in materialize(str(tmp_path / "link"), tmp_path / "real", root)] == [3]
    before = path.read_bytes()
    assert [done.changed for done in materialize(str(path), path, root)] == [0]
    assert path.read_bytes() == before


def test_links_in_a_circle(root: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in/a.jsonl", good_rows())
    (tmp_path / "in/again").symlink_to(tmp_path / "in")
    (tmp_path / "loop").symlink_to("loop")
    assert len(find_files([f"{tmp_path}/in/**/*.jsonl", f"{tmp_path}/in/a.jsonl"])) == 1
    with pytest.raises(OSError, match=r"loop"):
        materialize(str(tmp_path / "in"), tmp_path / "loop", root)


def test_a_directory_is_copied_into_the_one_above_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in/a.jsonl", good_rows())
    copied = write_lines(tmp_path / "in/out/a.jsonl", good_rows())
    assert paired_files(str(copied.parent), tmp_path) == [(copied, tmp_path / "a.jsonl")]
    assert paired_files(str(path.parent), tmp_path / "in/out") == [(path, tmp_path / "in/out/a.jsonl")]


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_file_that_is_no_journal_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    """Questions that are named as the file of measurements of themselves."""
    write_video(tmp_path / "v.mp4")
    rows = [{"video": "v.mp4", "question": "What?", "answer": "x", "id": name} for name in "ab"]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + ending)
    before = path.read_bytes()
    code, said = ends(capsys, "data", "difficulty", path, "--out", path, "--frames", "1", "--samples", "1")
    assert code == 2
    assert "q.jsonl:1: measured with another policy or other settings; choose another --out" in said
    assert path.read_bytes() == before


def test_what_a_journal_takes_for_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    for torn in ("notes", "[1, ", '{"a": 1}\nnotes', "[" * 100_000 + "\n"):
        path.write_text(torn)
        with pytest.raises(DataError, match=r"j\.jsonl:[12]: not JSON"), Journal(path):
            pass
        assert path.read_text() == torn
    path.write_text('{"a": 1}\n{"a": 2}')  # killed between a line and its end
    with Journal(path) as journal:
        assert journal.rows == [{"a": 1}, {"a": 2}]
        journal.add({"a": 3})
        journal.add({"a": 4})
    path.write_text(path.read_text() + '{"a": 5')
    with Journal(path) as journal:
        journal.add({"a": 6})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 6]


def test_traces_do_not_take_the_place_of_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_video(tmp_path / "v.mp4")
    path = write_lines(tmp_path / "traces.jsonl", [{"video": "v.mp4", "question": "q", "answer": "x"}])
    before = path.read_bytes()
    code, said = ends(capsys, "data", "traces", path, "--out", tmp_path, "--lab")
    assert code == 6
    assert "traces.jsonl: is there already, and no run of this made it; choose another --out" in said
    assert path.read_bytes() == before


def test_whoever_is_done_does_not_remove_what_the_next_one_writes(tmp_path: Path, monkeypatch: Any) -> None:
    """Between the renaming of a file and the end of its writer, another one can have begun."""
    path = tmp_path / "a.jsonl"
    rename = Path.replace

    def renamed(self: Path, target: Path) -> Path:
        done = rename(self, target)
        self.write_text("of the next one")
        return done

    with whole_file(path) as partial:
        partial.write_text("whole")
        monkeypatch.setattr(Path, "replace", renamed)
    assert path.read_text() == "whole"
    assert partial.read_text() == "of the next one"


# ---------------------------------------------------------------------- one file under two names


def test_no_video_is_on_both_sides_whatever_it_is_called(tmp_path: Path) -> None:
    for number in range(30):
        write_video(tmp_path / f"{number}.mp4", seconds=1, fps=1 + number % 9)
    for number in range(9, 30):  # of one size, and different
        with (tmp_path / f"{number}.mp4").open("ab") as file:
            file.write(number.to_bytes(4, "big"))
    same = tmp_path / "a b.mp4"
    write_video(same, seconds=3)
    shutil.copy(same, tmp_path / "copy.mp4")
    os.link(same, tmp_path / "hard.mp4")
    (tmp_path / "soft.mp4").symlink_to(same)
    names = ["a%20b.mp4", "a b.mp4", "copy.mp4", "hard.mp4", "soft.mp4", f"file://{same}", "./a b.mp4"]
    rows = [answered(video(name), text("q")) for name in (*names, *(f"{number}.mp4" for number in range(30)))]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    for seed in range(8):
        split_files([str(path)], tmp_path / str(seed), 0.4, seed, tmp_path)
        held_out = (tmp_path / str(seed) / "validation/rows.jsonl").read_text().splitlines()
        shown = {json.loads(line)["messages"][0]["content"][0]["video_url"]["url"] for line in held_out}
        assert len(shown & set(names)) in (0, len(names))
        assert len(shown) > 7  # so those that only look alike are apart


def test_a_video_with_a_colon_in_its_name_is_no_address(root: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "Talk: the end.mp4")
    path = write_lines(tmp_path / "a.jsonl", [answered(video("Talk: the end.mp4"), text("q"))])
    (done,) = materialize(str(path), tmp_path / "out.jsonl", tmp_path)
    assert (done.remote, done.changed, done.missing) == (0, 1, {})
    (check,) = check_files([str(tmp_path / "out.jsonl")])
    assert check.good == 1


def test_questions_that_say_file(tmp_path: Path) -> None:
    place = write_video(tmp_path / "v.mp4")
    there = {"video": f"file://{place}", "question": "q", "answer": "x"}
    away = {"video": "https://host/v.mp4", "question": "q", "answer": "x"}
    path = write_lines(tmp_path / "q.jsonl", [there] + [{**there, "video": f"{n}.mp4"} for n in range(4)] + [away])
    assert read_samples(path)[0].video == str(place)
    split_files([str(path)], tmp_path / "parts", 0.5)
    said = [json.loads(line)["video"] for part in ("train", "validation")
            for line in (tmp_path / "parts" / part / "q.jsonl").read_text().splitlines()]  # fmt: skip
    assert sorted(said) == sorted([str(place), "https://host/v.mp4", *(f"{tmp_path}/{n}.mp4" for n in range(4))])


# ---------------------------------------------------------------------- numbers that are none


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("check", "--fps"), ("show", "--fps"), ("difficulty", "--temperature"), ("difficulty", "--pass-at"),
        ("split", "--validation"), ("traces", "--temperature"), ("traces", "--min-accuracy"), ("traces", "--skew"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_options_that_are_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str, value: str
) -> None:
    path = write_lines(tmp_path / "q.jsonl", [{"video": "v.mp4", "question": "q", "answer": "x"}])
    out = ["--out", tmp_path / "out"] if command in ("traces", "difficulty", "split") else []
    code, said = ends(capsys, "data", command, path, *out, option, value)
    assert code == 2
    assert f"Invalid value for '{option}'" in said
    assert not (tmp_path / "out").exists()


def test_budgets_that_are_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "q.jsonl", [{"video": "v.mp4", "question": "q", "answer": "x"}])
    for budgets in ("²", "4,,8", "4,4", "-1", "", "99999999999"):
        code, said = ends(capsys, "data", "difficulty", path, "--frames", budgets)
        assert (code, "numbers from 1 to 65536" in said) == (2, True)


def test_answers_that_are_no_number(root: Path, tmp_path: Path) -> None:
    asked = {"video": str(root / "museg/charades/b.mp4"), "question": "q"}
    odd: list[Any] = [float("nan"), float("inf"), True, [], {}]
    rows = [{**asked, "answer": answer} for answer in odd] + [rl_row(answer, "oe") for answer in odd[:3]]
    path = write_lines(tmp_path / "a.jsonl", [*rows, {**asked, "answer": 2.5}, {**asked, "answer": "x", "id": True}])
    (check,) = check_files([str(path)], RowConfig(root=root))
    assert (check.good, check.skipped) == (1, {"sample": 6, "answer": 3})


# ---------------------------------------------------------------------- rows


def test_an_example_is_of_what_it_stands_for(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kind of fault can be of rows that are skipped, and of rows that are used."""
    path = write_lines(tmp_path / "a.jsonl", [rl_row(extra_info={}), rl_row("Z", "mcq")])
    with pytest.raises(SystemExit):
        main(["data", "check", str(path), "--root", str(root)])
    said = capsys.readouterr().out
    assert "1 answer (skipped), such as row 0: `extra_info` has no `answer`" in said
    assert "1 answer (used), such as row 1: the answer 'Z' is not exactly one" in said


def test_odd_rows_cost_no_other_row(root: Path, tmp_path: Path, builder: TraceBuilder) -> None:
    place = "longvt_source/selftrace/a.mp4"
    rows = [
        answered(image("data:image/png;base64,\u00e9"), text("q")),
        answered({**video(place), "nframes": 0.5}, text("q")),
        answered({**video(place), "max_frames": 0.9}, text("q")),
        answered({**video(place), "video_start": 100, "video_end": 200}, text("q")),
    ]
    path = write_lines(tmp_path / "a.jsonl", [*rows, *good_rows()])
    for chat in (None, builder.chat):
        (check,) = check_files([str(path)], RowConfig(root=root), chat=chat)
        assert (check.good, check.skipped, check.faults) == (4, {"media_damaged": 2, "messages": 2}, {})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"start_time": 3, "end_time": 1}', "must be greater than start_time"),
        ('{"start_time": NaN, "end_time": 1}', "not valid JSON"),
        ('{"end_time": 1}', "start_time is missing"),
    ],
)
def test_calls_that_cannot_run_are_told(root: Path, tmp_path: Path, arguments: str, problem: str) -> None:
    call = CALL.replace('{"start_time": 1, "end_time": 3}', arguments)
    row = answered(video("longvt_source/selftrace/a.mp4"), text("q"))
    row["messages"][1:1] = [turn("assistant", f"<think>\nx\n</think>\n{call}"), turn("tool", "r")]
    other = json.loads(json.dumps(row).replace("crop_video", "weather"))
    told = []
    (check,) = check_files(
        [str(write_lines(tmp_path / "a.jsonl", [row, other]))], RowConfig(root=root), on_fault=told.append
    )
    assert (check.faults, check.good, check.usable) == ({"window": 1}, 1, 2)
    assert problem in told[0].message


def test_rows_by_an_id_that_is_a_number(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1}, {"id": 70}, {"id": "80"}, {"id": "²"}])
    assert [find_row(path, wanted)[0] for wanted in ("0", "1", "70", "80", "²")] == [0, 1, 1, 2, 3]
    with pytest.raises(DataError, match="no row 71"):
        find_row(path, "71")


def test_a_source_with_few_good_rows_is_used_and_one_with_none_is_told(
    builder: TraceBuilder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bad rows of two passes can follow each other, and those of a source that is drawn more often than others."""
    bad, good = answered(video("none.mp4"), text("q")), good_rows()[3]
    few = write_lines(tmp_path / "few.jsonl", [bad, bad, good])
    none = write_lines(tmp_path / "none.jsonl", [bad] * 2)
    for seed in range(6):
        stream = RowStream([RowSource(open_groups(few), seed)], [1.0], seed)
        made = Batches(stream, builder, Ranks(), workers=1, ahead=1)
        batch = made.take(12)
        made.close()
        assert batch.rows == 12
        assert batch.skipped["media_missing"] == batch.position.drawn - 12
    stream = RowStream([RowSource(open_groups(none), 0), RowSource(open_groups(few), 0)], [20.0, 1.0], 0)
    made = Batches(stream, builder, Ranks(), workers=1, ahead=1)
    assert made.take(3).rows == 3
    made.close()
    assert sum("mixture.0: none of its rows can be used: " in message for message in caplog.messages) == 1


def test_names_in_the_log_do_not_steer_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [rl_row(videos=[]), {**rl_row(), "videos": ["\x1b]0;title\x07\ngone.mp4"]}]
    path = write_lines(tmp_path / "rl.jsonl", rows)
    recipe = tmp_path / "sft.yaml"
    data = {"kind": "messages", "files": [str(write_lines(tmp_path / "a.jsonl", [
        answered(video("\x1b]0;title\x07\nparavt: all is well.mp4"), text("q"))]))]}  # fmt: skip
    recipe.write_text(json.dumps({"stages": [
        {"name": "a", "steps": 1, "batch_size": 1, "learning_rate": 1e-4, "data": data}]}))  # fmt: skip
    for arguments in (["data", "check", str(path)], ["sft", str(recipe), "--out", str(tmp_path / "out")]):
        with pytest.raises(SystemExit):
            main(arguments)
        said = capfd.readouterr()
        assert "\x1b]" not in said.out + said.err
    assert "\nparavt: all is well" not in said.err
    assert "skipped (media_missing): " in said.err


def test_what_is_trained_on_is_not_validated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", good_rows())
    (tmp_path / "held.jsonl").symlink_to(path)
    data = {"kind": "messages", "files": [str(path)], "validation": {"files": [str(tmp_path / "held.jsonl")]}}
    recipe = tmp_path / "sft.yaml"
    stage = {"name": "a", "steps": 1, "batch_size": 1, "learning_rate": 1e-4, "data": data}
    recipe.write_text(json.dumps({"stages": [stage]}))
    code, said = ends(capsys, "sft", recipe, "--out", tmp_path / "out")
    assert code == 6
    assert "held.jsonl: is trained on, and cannot be validated on" in said
