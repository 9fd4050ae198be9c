"""`paravt eval` and its commands, and `paravt.evaluate`, on small data sets in every published layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_data
import pytest
from chat_server import Server
from conftest import CASES

import paravt
from paravt.bench.benchmarks import PAPER
from paravt.bench.published import COLUMNS, PUBLISHED
from paravt.cli import main

LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "videomme": bench_data.videomme,
    "longvideobench": bench_data.longvideobench,
    "lvbench": bench_data.lvbench,
    "mlvu": bench_data.mlvu,
    "mmvu": bench_data.mmvu,
    "charades": bench_data.charades,
}


def run(*arguments: object) -> int:
    """The exit code of `paravt eval ...`."""
    try:
        main(["eval", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def own(path: Path, rows: int = 4, video: str = "base.mp4") -> Path:
    lines = [
        {"id": n, "video": str(CASES / "video" / video), "question": f"q{n}?", "options": ["a", "b"], "answer": "B"}
        for n in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_published_table_has_the_papers_columns() -> None:
    assert tuple(COLUMNS) == PAPER
    assert {len(row) for row in PUBLISHED.values()} == {7}
    ours, base = PUBLISHED["ParaVT-8B"], PUBLISHED["Qwen3-VL-8B (tool)"]
    gains = [100 * (a / b - 1) for a, b in zip(ours, base, strict=True) if a is not None and b is not None]
    assert sum(gains) / 7 == pytest.approx(7.87, abs=0.01)  # "+7.9 % on average", as published


def test_every_benchmark_of_the_paper_in_one_command(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    sources: list[str] = []
    for name, write in LAYOUTS.items():
        sources += ["--source", f"{name}={write(tmp_path / name)}"]
    sources += ["--source", f"videomme_subtitles={tmp_path / 'videomme'}"]
    out = tmp_path / "run"
    server.default = lambda body: "<answer>B, or 2 - 5 seconds</answer>"  # type: ignore[method-assign]
    arguments = ("--bench", ",".join(PAPER), *sources, "--server", server.url, "--mode", "direct", "--frames", 2)
    assert run(*arguments, "--out", out, "--skip-missing") == 0
    capsys.readouterr()
    assert run("rescore", out, "--json") == 0
    (summary,) = json.loads(capsys.readouterr().out)
    assert [bench["name"] for bench in summary["benches"]] == list(PAPER)
    blocks = {(bench["name"], block["type"]): block for bench in summary["benches"] for block in bench["blocks"]}
    assert ("mmvu", "choice") in blocks  # apart from
    assert ("mmvu", "open") in blocks
    assert blocks["charades", "temporal"]["recalls"].keys() == {"R@0.3", "R@0.5", "R@0.7"}
    assert blocks["mlvu", "choice"]["macro"] is not None
    assert set(blocks["videomme_subtitles", "choice"]["breakdowns"]) >= {"duration"}  # with subtitles as without
    assert all(block["counts"]["failed"] == 0 and block["counts"]["rows"] for block in blocks.values())
    assert len(server.requests) == summary_rows(summary)
    assert run("report", out) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(heading in page for heading in COLUMNS.values())
    assert page.count("(published)") == len(PUBLISHED)


def summary_rows(summary: dict[str, Any]) -> int:
    return sum(block["counts"]["rows"] for bench in summary["benches"] for block in bench["blocks"])


def test_too_many_failed_rows_are_said_and_exit_with_1(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four rows gets no answer: more than 2 %, less than 30 %. A later run makes up for it."""
    data = own(tmp_path / "mine.jsonl")
    arguments = ("--data", data, "--out", tmp_path / "run", "--server", server.url, "--mode", "direct", "--frames", 1,
                 "--concurrency", 1, "--tries", 1)  # fmt: skip
    server.answers = [400]
    assert run(*arguments) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 4 rows failed, more than 2 %" in message
    assert "told to fail with 400" in message
    server.answers = [400]
    assert run(*arguments, "--max-failed", 0.3) == 0
    assert run(*arguments) == 0
    assert len(server.requests) == 6  # four rows, and one of them three times
    assert run(*arguments, "--max-tokens", 5) == 2
    assert "max_tokens: 1024, now 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "--bench LIST or --data FILE"),
        (("--bench", "nope"), 6, "nope: no such benchmark; there are videomme,"),
        (("--bench", "lab", "--mode", "nope"), 2, "nope: no such mode; there are agentic,"),
        (("--bench", "lab", "--frames", "4,x"), 2, "numbers from 1"),
        (("--bench", "lab", "--shard", "5/4"), 2, "shard 5/4: the first is 1/4"),
        (("--bench", "lab,mlvu"), 6, "its videos are no files; evaluate it alone"),
        (("--bench", "lab", "--judge", "http://localhost"), 2, "belong together"),
        (("--bench", "lab", "--prompt", "nope=README.md"), 2, "no prompt 'nope'"),
        (("--data", "{gone}"), 6, "1 videos are missing, the first: "),
        (("rescore", "."), 6, "no run of an evaluation"),
    ],
)
def test_wrong_use_is_one_line_before_anything_is_loaded(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = own(tmp_path / "gone.jsonl", video="gone.mp4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paravt.evaluation.open_places", None)  # nothing gets as far as this
    (tmp_path / "README.md").write_text("text", encoding="utf-8")
    if "mlvu" in str(arguments):
        bench_data.mlvu(tmp_path / "mlvu")
        arguments += ("--source", "mlvu")
    assert run(*(argument.replace("{gone}", str(gone)) for argument in arguments)) == code
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said


def test_the_shipped_checkpoint_on_its_own_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In memory, without a server: parallel against sequential, from one command to the report."""
    out = tmp_path / "lab"
    assert run("--bench", "lab", "--limit", 3, "--mode", "agentic,sequential", "--frames", 4, "--out", out) == 0
    assert run("compare", out / "agentic-K4", out / "sequential-K4", "--json") == 0
    text = capsys.readouterr().out
    (found,) = json.loads(text[text.index("[") :])
    assert (found["pairs"], found["failed"]) == (3, 0)
    assert run("report", out) == 0
    assert "Sequential divided by parallel" in (out / "report.md").read_text(encoding="utf-8")


def test_evaluate_in_python(tmp_path: Path, server: Server) -> None:
    data = own(tmp_path / "mlvu.jsonl")
    summary = paravt.evaluate(data, tmp_path / "run", mode="direct", frames=1, servers=[server.url], max_tokens=9)
    (bench,) = summary.benches
    assert bench.name == "mlvu.jsonl"  # not to be taken for the benchmark
    assert bench.blocks[0].accuracy == 1.0
    assert server.requests[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--bench", "mlvu", "--source", "mvlu=here"), 6, "mvlu=here: mvlu is not evaluated"),
        (("--bench", "mlvu", "--videos", "charades=here"), 6, "charades=here: charades is not evaluated"),
        (("--bench", "mlvu", "--source", "a", "--source", "b"), 2, "two directories for all benchmarks: a and b"),
        (("--bench", "mlvu", "--source", "mlvu=a=b"), 6, "a=b: no such directory"),
        (("--bench", "lab", "--mode", ","), 2, "names no mode"),
        (("--bench", "lab", "--prompt", "crop=a=b"), 2, "a=b: cannot be read"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--out", tmp_path / "run") == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
