"""Every loader on a small data set in its published layout, with the traps that the real ones have.

Locked here, in words: options come without labels and gold answers as letters; what the data say is never replaced by
a guess, and what is wrong with them is a fault, not an exception; ids are unique; missing videos are known before
anything is asked, and a row can only ever name a file below the directories that were given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_data
import pyarrow.parquet as pq
import pytest
from app_server import AppServer
from conftest import LONG
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from huggingface_hub import constants

from paravt.bench import files
from paravt.bench.benchmarks import BENCHMARKS, PAPER
from paravt.bench.charades import as_written
from paravt.bench.loaded import Loaded
from paravt.bench.mmvu import _DISCIPLINE_OF
from paravt.bench.own import load_own
from paravt.bench.rows import split_options, without_labels
from paravt.errors import DataError
from paravt.rewards import accuracy
from paravt.types import Sample
from paravt.video import open_video

LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "videomme": bench_data.videomme,
    "videomme_subtitles": bench_data.videomme,
    "longvideobench": bench_data.longvideobench,
    "longvideobench_subtitles": bench_data.longvideobench,
    "lvbench": bench_data.lvbench,
    "mlvu": bench_data.mlvu,
    "mmvu": bench_data.mmvu,
    "charades": bench_data.charades,
}


def faults(loaded: Loaded, *kinds: str) -> list[tuple[str, str]]:
    return [(fault.where, fault.message) for fault in loaded.faults if fault.kind in kinds]


def by_id(loaded: Loaded) -> dict[str, Sample]:
    return {sample.id.partition("/")[2]: sample for sample in loaded.samples}


# ---------------------------------------------------------------------------------------------------- each layout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_holds_for_all(name: str, tmp_path: Path) -> None:
    benchmark = BENCHMARKS[name]
    loaded = benchmark.load(LAYOUTS[name](tmp_path))
    assert (loaded.name, loaded.source) == (name, str(tmp_path))
    assert len({sample.id for sample in loaded.samples}) == len(loaded.samples) > 0
    json.dumps([dict(sample.metadata) for sample in loaded.samples])  # rows on disk hold them
    for sample in loaded.samples:
        assert sample.id.startswith(f"{name}/")
        assert sample.metadata["bench"] == name
        assert set(benchmark.breakdown) <= set(sample.metadata)
        assert benchmark.macro is None or sample.metadata[benchmark.macro]
        assert (sample.answer is None) == ("gold_missing" in sample.metadata)
        if sample.answer is not None:
            assert accuracy(sample, sample.answer).value == 1.0
        if sample in loaded.playable:
            assert open_video(sample.video).duration > 2
    short = f"rows where {benchmark.rows} were published"
    assert any(fault.kind == "size" and fault.message.endswith(short) for fault in loaded.faults)


def test_the_paper_has_seven() -> None:
    assert len(PAPER) == 7
    assert set(PAPER) == set(BENCHMARKS) - {"longvideobench_subtitles"}


def test_videomme(tmp_path: Path) -> None:
    loaded = BENCHMARKS["videomme"].load(bench_data.videomme(tmp_path))
    assert [sample.id for sample in loaded.samples][:4] == [
        f"videomme/{n}" for n in ("001-1", "001-2", "001-3", "002-1")
    ]
    sample = loaded.samples[3]
    assert sample.video == str(tmp_path / "data" / "-x.Y2.mp4")
    assert sample.options == ("One.", "A. Two.", "Three.", "Four."), "only the label is taken off, once"
    assert (sample.answer, sample.type) == ("B", "choice")
    assert sample.metadata == {"bench": "videomme", "duration": "long", "domain": "Knowledge",
                               "sub_category": "Astronomy", "task_type": "Counting Problem"}  # fmt: skip
    assert loaded.counts() == {"size": 2}


def test_videomme_with_subtitles(tmp_path: Path) -> None:
    loaded = BENCHMARKS["videomme_subtitles"].load(bench_data.videomme(tmp_path))
    paths = [sample.metadata.get("subtitles") for sample in loaded.samples]
    assert paths == [str(tmp_path / "subtitle" / "fFj-_93ACGo.srt")] * 3 + [None] * 3
    assert faults(loaded, "subtitles") == [("-x.Y2.srt", "no such file")]


@pytest.mark.parametrize("table", ["validation-00000-of-00001.parquet", "lvb_val.json"])
def test_longvideobench(table: str, tmp_path: Path) -> None:
    bench_data.longvideobench(tmp_path)
    for other in {"validation-00000-of-00001.parquet", "lvb_val.json"} - {table}:
        (tmp_path / other).unlink()
    loaded = BENCHMARKS["longvideobench_subtitles"].load(tmp_path)
    samples = by_id(loaded)
    assert samples["v1_0"].options == ("a cat", "a dog", "a cow", "a hen")
    assert (samples["v1_0"].answer, samples["v1_1"].answer) == ("D", "E")
    assert samples["v1_0"].metadata["duration_group"] == "15"
    assert samples["v1_0"].metadata["subtitles"] == str(tmp_path / "subtitles" / "v1_en.json")
    assert samples["v1_0"].metadata["subtitles_offset"] == 100.0
    if table.endswith(".parquet"):
        assert samples["v2_0"].options == ("a cat", "N/A", "a cow"), "no letter moves"
        assert samples["v2_0"].answer == "C"
        assert samples["v2_1"].metadata["gold_missing"] == "D"
        assert [where for where, _ in faults(loaded, "gold")] == ["longvideobench_subtitles/v2_1"]


def test_longvideobench_without_subtitles(tmp_path: Path) -> None:
    loaded = BENCHMARKS["longvideobench"].load(bench_data.longvideobench(tmp_path))
    assert not any("subtitles" in sample.metadata for sample in loaded.samples)


def test_lvbench(tmp_path: Path) -> None:
    loaded = BENCHMARKS["lvbench"].load(bench_data.lvbench(tmp_path))
    first, second = loaded.samples
    assert (first.question, first.options) == ("What year appears?", ("1636", "1366", "1363", "1633"))
    assert (first.answer, second.answer) == ("D", None)
    assert second.metadata["question_type"] == ["event understanding", "reasoning"]
    assert faults(loaded, "gold") == [("lvbench/1", "the answer 'F' is not exactly one of the options")]
    (bad,) = faults(loaded, "row")
    assert bad == (f"{tmp_path}/data/train-00000-of-00001.parquet: row 2", "no lines of options in `question`")


def test_lvbench_in_the_authors_file(tmp_path: Path) -> None:
    loaded = BENCHMARKS["lvbench"].load(bench_data.lvbench_authors(tmp_path))
    assert [sample.id for sample in loaded.samples] == ["lvbench/7", "lvbench/8"]
    assert loaded.samples[0].options == ("a man", "a dog,\nand a cat", "nobody")
    assert loaded.samples[0].video == str(tmp_path / "all_videos" / "abc.mp4")
    assert loaded.samples[0].metadata["type"] == "sport"


def test_mlvu(tmp_path: Path) -> None:
    loaded = BENCHMARKS["mlvu"].load(bench_data.mlvu(tmp_path))
    samples = by_id(loaded)
    assert (samples["C_0"].question, samples["C_0"].options) == ("How many?", ("1", "2", "3", "4"))
    assert [sample.answer for sample in loaded.samples] == ["C", "D", None, None, "D", None]
    assert samples["C_2"].metadata["gold_missing"] == "9"
    assert faults(loaded, "duplicate") == [("mlvu/C_4#2", "the id 'mlvu/C_4' occurs before")]
    assert [where for where, _ in faults(loaded, "options")] == ["mlvu/C_3", "mlvu/C_4"]
    assert faults(loaded, "gold") == [
        ("mlvu/C_2", "the answer '9' is not exactly one of the options"),
        ("mlvu/C_3", "the answer '2' is not exactly one of the options"),
        ("mlvu/C_4#2", "the answer 'A' is a letter, and the text of option B"),
    ]


def test_mlvu_in_the_authors_files(tmp_path: Path) -> None:
    loaded = BENCHMARKS["mlvu"].load(bench_data.mlvu_authors(tmp_path))
    assert [sample.id for sample in loaded.samples] == ["mlvu/plotQA_0", "mlvu/needle_0"], "generation is left out"
    assert [open_video(sample.video).duration for sample in loaded.samples] == [8, 3], "same name, each its own"
    assert {sample.answer for sample in loaded.samples} == {"B"}


def test_mmvu(tmp_path: Path) -> None:
    loaded = BENCHMARKS["mmvu"].load(bench_data.mmvu(tmp_path))
    free, choice, bad = loaded.samples
    assert (free.type, free.options, free.answer) == ("open", (), "Depth-First Search (DFS)")
    assert free.metadata["discipline"] == "Engineering"
    assert (choice.type, choice.answer, len(choice.options)) == ("choice", "A", 5)
    assert [open_video(sample.video).duration for sample in (free, choice)] == [8, 3]
    assert bad.metadata["gold_missing"] == "E"
    assert bad.video == str(tmp_path / "videos" / "Dentistry" / "0.mp4"), "not the 0.mp4 of another subject"
    assert loaded.missing == {bad.video}
    assert len(_DISCIPLINE_OF) == 27


def test_charades(tmp_path: Path) -> None:
    loaded = BENCHMARKS["charades"].load(bench_data.charades(tmp_path))
    assert [sample.answer for sample in loaded.samples] == ["24.3 - 30.4", "0 - 6.9", None]
    assert [sample.id for sample in loaded.samples] == [f"charades/000{n}" for n in ("0_3MSZA", "1_3MSZA", "2_AO8RW")]
    assert {sample.type for sample in loaded.samples} == {"temporal"}
    assert loaded.samples[0].question.endswith(": person turn a light on.")
    assert faults(loaded, "gold") == [("charades/0002_AO8RW", "the answer '5 - 5' is no window of time")]


def test_times_are_what_was_written() -> None:
    assert [as_written(time) for time in (24.296875, 24.3, 24.25, 0.0, 100.0)] == [24.3, 24.3, 24.25, 0.0, 100.0]


# ---------------------------------------------------------------------------------------------------- what is missing


def test_missing_videos_are_a_table_and_a_list(tmp_path: Path) -> None:
    loaded = BENCHMARKS["videomme"].load(bench_data.videomme(tmp_path / "a"))
    assert not loaded.missing_folders()
    gone = tmp_path / "a" / "data" / "-x.Y2.mp4"
    gone.unlink()
    (tmp_path / "a" / "videos_chunked_01.zip").write_bytes(b"PK")
    cut = BENCHMARKS["videomme"].load(tmp_path / "a")
    other = BENCHMARKS["mmvu"].load(bench_data.mmvu(tmp_path / "b"))
    found = [(one.name, row) for one in (cut, other) for row in one.missing_folders()]
    assert [(name, row.folder, row.videos, row.missing, row.questions) for name, row in found] == [
        ("videomme", str(tmp_path / "a" / "data"), 2, 1, 3),
        ("mmvu", str(tmp_path / "b" / "videos" / "Dentistry"), 1, 1, 1),
    ]
    assert faults(cut, "video") == [(str(gone), "no such file (1 archives here are to be unpacked)")]
    assert [sample.id for sample in cut.playable] == ["videomme/001-1", "videomme/001-2", "videomme/001-3"]


def test_missing_videos_are_counted_where_the_others_are(tmp_path: Path) -> None:
    bench_data.mlvu(tmp_path)
    (tmp_path / "part_1").mkdir()
    (tmp_path / "o_1.mp4").rename(tmp_path / "part_1" / "o_1.mp4")
    (tmp_path / "c_1.mp4").unlink()
    (row,) = BENCHMARKS["mlvu"].load(tmp_path).missing_folders()
    assert (row.folder, row.videos, row.missing, row.questions) == (str(tmp_path / "part_1"), 2, 1, 5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is empty"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a pointer of Git LFS")],
)
def test_a_video_that_is_none(content: bytes, reason: str, tmp_path: Path) -> None:
    bench_data.lvbench(tmp_path)
    next(tmp_path.rglob("*.mp4")).write_bytes(content)
    ((_, message),) = faults(BENCHMARKS["lvbench"].load(tmp_path), "video")
    assert reason in message


def test_videos_elsewhere_with_other_suffixes_and_behind_links(tmp_path: Path) -> None:
    bench_data.lvbench(tmp_path / "rows")
    (video,) = (tmp_path / "rows").rglob("*.mp4")
    (tmp_path / "disk").mkdir()
    video.rename(tmp_path / "disk" / "Cm73ma6Ibcs.MKV")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "loop").symlink_to(tmp_path / "here")
    loaded = BENCHMARKS["lvbench"].load(tmp_path / "rows", videos=tmp_path / "here")
    assert not loaded.missing
    assert open_video(loaded.samples[0].video).duration == bench_data.SECONDS
    with pytest.raises(DataError, match="no such directory"):
        BENCHMARKS["lvbench"].load(tmp_path / "rows", videos=tmp_path / "nowhere")


def test_one_name_for_two_files_is_not_decided(tmp_path: Path) -> None:
    bench_data.lvbench(tmp_path)
    bench_data.video(tmp_path / "other" / "Cm73ma6Ibcs.mp4", seconds=3)
    ((_, message),) = faults(BENCHMARKS["lvbench"].load(tmp_path), "video")
    assert message.startswith("2 different files with this name, such as ")


@pytest.mark.parametrize("name", [LONG, "../secret/x.mp4", "a/../../secret/x.mp4"])
def test_a_row_names_no_file_outside(name: str, tmp_path: Path) -> None:
    bench_data.video(tmp_path / "secret" / "x.mp4")
    bench_data.mlvu(tmp_path / "data")
    table = tmp_path / "data" / "mlvu" / "test-00000-of-00001.parquet"
    bench_data.parquet(table, [{**row, "video_name": name} for row in pq.read_table(table).to_pylist()])
    loaded = BENCHMARKS["mlvu"].load(tmp_path / "data")
    assert not loaded.playable
    assert faults(loaded, "video")[0][1] == "not a relative name"
    assert all(Path(sample.video).resolve().is_relative_to(tmp_path / "data") for sample in loaded.samples)


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    bench_data.mmvu(tmp_path)
    table = tmp_path / "validation.json"
    rows = json.loads(table.read_text())
    broken: list[Any] = [
        "text",
        {**rows[1], "question": None},
        {**rows[1], "choices": {"A": ""}},
        {**rows[1], "question_type": "essay"},
        {**rows[1], "answer": ["A"]},
        {**rows[1], "answer": float("nan")},
    ]
    table.write_text(json.dumps([rows[0], *broken]))
    loaded = BENCHMARKS["mmvu"].load(tmp_path)
    assert len(loaded.samples) == 1
    assert faults(loaded, "row") == [
        (f"{table}: row 1", "a row is a JSON object"),
        (f"{table}: row 2", "no `question`"),
        (f"{table}: row 3", "`choices` are empty"),
        (f"{table}: row 4", "`question_type` is 'essay'"),
        (f"{table}: row 5", "no `answer`"),
        (f"{table}: row 6", "no `answer`"),
    ]
    table.write_text(json.dumps(broken))
    with pytest.raises(DataError, match=r"none of 6 rows of MMVU val can be used; the first: .*row 0: a row is a JSON"):
        BENCHMARKS["mmvu"].load(tmp_path)


def test_more_options_than_letters_and_numbers_without_end(tmp_path: Path) -> None:
    bench_data.mlvu(tmp_path / "mlvu")
    table = tmp_path / "mlvu" / "mlvu" / "test-00000-of-00001.parquet"
    first, *rest = pq.read_table(table).to_pylist()
    bench_data.parquet(table, [{**first, "candidates": [f"{n}" for n in range(27)]}, *rest])
    loaded = BENCHMARKS["mlvu"].load(tmp_path / "mlvu")
    assert faults(loaded, "row") == [(f"{table}: row 0", "27 options; 26 can be lettered")]
    assert len(loaded.samples) == len(rest)

    bench_data.longvideobench(tmp_path / "lvb")
    next((tmp_path / "lvb").glob("*.parquet")).unlink()
    table = tmp_path / "lvb" / "lvb_val.json"
    first, *rest = json.loads(table.read_text())
    table.write_text(json.dumps([{**first, "correct_choice": 10**400}, *rest]))
    loaded = BENCHMARKS["longvideobench"].load(tmp_path / "lvb")
    assert faults(loaded, "row") == [(f"{table}: row 0", "`correct_choice` is not a number")]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_directory_without_the_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of the published files is here: \S+"):
        BENCHMARKS[name].load(tmp_path)


def test_a_damaged_table_is_one_line(tmp_path: Path) -> None:
    bench_data.videomme(tmp_path)
    table = tmp_path / "videomme" / "test-00000-of-00001.parquet"
    table.write_bytes(table.read_bytes()[:200])
    with pytest.raises(DataError, match=r"test-00000-of-00001\.parquet: cannot be read: .*") as caught:
        BENCHMARKS["videomme"].load(tmp_path)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub with one data set, whose files are those of the directory; and another whose terms are not accepted."""
    root = tmp_path / "hub"
    root.mkdir()
    app = FastAPI()
    sha = "1" * 40

    @app.get("/api/datasets/{owner}/{name}/revision/{revision}")
    @app.get("/api/datasets/{owner}/{name}")
    def info(owner: str, name: str, revision: str = "main") -> Any:
        if owner == "longvideobench":
            return JSONResponse({"error": "?"}, status_code=403, headers={"x-error-code": "GatedRepo"})
        if owner != "lmms-lab":
            return JSONResponse({"error": "?"}, status_code=404, headers={"x-error-code": "RepoNotFound"})
        names = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
        return {"id": f"{owner}/{name}", "sha": sha, "siblings": [{"rfilename": one} for one in names]}

    @app.get("/api/datasets/{owner}/{name}/tree/{revision}")
    def tree(owner: str, name: str, revision: str) -> Any:
        return [
            {"type": "file", "path": str(path.relative_to(root)), "size": path.stat().st_size, "oid": path.name}
            for path in sorted(root.rglob("*"))
            if path.is_file()
        ]

    @app.api_route("/datasets/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(owner: str, name: str, revision: str, path: str) -> Any:
        return Response((root / path).read_bytes(), headers={"x-repo-commit": sha, "etag": f'"{Path(path).name}"'})

    server = AppServer(app)
    server.start()
    monkeypatch.setattr(files, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield root
    server.stop()


def test_tables_come_from_the_hub_and_videos_do_not(hub: Path, tmp_path: Path) -> None:
    bench_data.charades(hub)
    loaded = BENCHMARKS["charades"].load()
    assert loaded.source == f"lmms-lab/charades_sta@{'1' * 40}"
    assert len(loaded.samples) == 3
    assert not loaded.playable, "videos are never downloaded"
    assert not list((tmp_path / "cache").rglob("*.mp4"))
    assert BENCHMARKS["charades"].load(videos=hub).missing == set()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("longvideobench", "accept its terms at https://huggingface.co/datasets/longvideobench/LongVideoBench and set"),
        ("mmvu", "no such data set on the hub"),
    ],
)
def test_what_the_hub_does_not_give(name: str, message: str, hub: Path) -> None:
    with pytest.raises(DataError, match=message):
        BENCHMARKS[name].load()


def test_a_hub_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError) as caught:
        BENCHMARKS["lvbench"].load()
    assert str(caught.value).startswith("lmms-lab/LVBench: the hub cannot be asked (")
    assert str(caught.value).endswith(
        "); give a directory with the files of https://huggingface.co/datasets/lmms-lab/LVBench"
    )
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- options, own data


@pytest.mark.parametrize(
    ("question", "stem", "options"),
    [
        ("Why?\n(A) x\n(B) y", "Why?", ("x", "y")),
        ("Is (A) right?\n(A)x\n (B)  y\n(C)z\n", "Is (A) right?", ("x", "y", "z")),
        ("(A) is drawn\nWhy?\n(A) x\n(B) y", "(A) is drawn\nWhy?", ("x", "y")),
        ("Why?\n(A) x\n(C) y", "Why?\n(A) x\n(C) y", ()),
        ("Why?", "Why?", ()),
        ("Why?\n(A) x", "Why?\n(A) x", ()),
    ],
)
def test_options_within_a_question(question: str, stem: str, options: tuple[str, ...]) -> None:
    assert split_options(question) == (stem, options)


def test_labels_are_taken_off_if_every_option_has_its_own() -> None:
    assert without_labels(["A. x", "B. y"]) == ("x", "y")
    assert without_labels(["(A) x", "B) y"]) == ("x", "y")
    assert without_labels(["A. Lincoln", "J. Adams"]) == ("A. Lincoln", "J. Adams")
    assert without_labels(["B. x", "A. y"]) == ("B. x", "A. y")
    assert without_labels(["A.M.", "B.M."]) == ("A.M.", "B.M.")


def test_own_data_has_the_same_checks(tmp_path: Path) -> None:
    bench_data.video(tmp_path / "a.mp4")
    (tmp_path / "a.srt").write_text(bench_data.SRT, encoding="utf-8")
    rows = [
        {"video": "a.mp4", "question": "q", "options": ["x", "y"], "answer": "y", "id": "one", "subtitles": "a.srt"},
        {"video": "a.mp4", "question": "q", "options": ["x", "y"], "answer": "z", "topic": "t"},
        {"video": "b.mp4", "question": "q", "answer": "words", "subtitles": "b.srt"},
        {"video": "a.mp4", "question": "when", "type": "temporal", "answer": "later"},
        {"video": "a.mp4", "question": "q", "options": ["x", "y"]},
        {"video": "c" * 5000, "question": "q"},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    loaded = load_own(path)
    assert isinstance(loaded, Loaded)
    assert (loaded.name, loaded.source) == ("mine", str(path))
    assert [sample.answer for sample in loaded.samples] == ["B", None, "words", None, None, None]
    assert loaded.samples[0].metadata == {"bench": "mine", "subtitles": str(tmp_path / "a.srt")}
    assert loaded.samples[1].metadata == {"bench": "mine", "topic": "t", "gold_missing": "z"}
    assert loaded.missing == {str(tmp_path / "b.mp4"), str(tmp_path / ("c" * 5000))}
    assert loaded.counts() == {"gold": 2, "video": 2, "subtitles": 1}
    path.write_text(json.dumps({**rows[0], "subtitles": 3}))
    with pytest.raises(DataError, match="`subtitles` must be a path"):
        load_own(path)
