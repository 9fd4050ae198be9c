"""Commands on data that are killed, stopped or run twice at once, as real processes.

Locked here: what the same command makes afterwards is what it makes if nobody disturbs it, and nothing else is left.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rows import good_rows, write_lines, write_parquet

from paravt.cli import main
from paravt.lab.corpus import write_corpus

_PATIENCE = 240
"""Seconds for a process to come as far as wanted; models are slow to import."""


def start(arguments: Sequence[object]) -> subprocess.Popen[str]:
    # Ctrl-C reaches it also where a shell started the tests in the background, and so told them to ignore it
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from paravt.cli import main; main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stopped(arguments: Sequence[object], midway: Callable[[], bool], how: signal.Signals) -> tuple[int, str]:
    """Run a command, and stop it as soon as it is midway; its exit code, and what it said."""
    process = start(arguments)
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline and not midway():
        time.sleep(0.002)
    process.send_signal(how)
    try:
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    return process.returncode, said


def lines(path: Path) -> list[str]:
    """The whole lines of a file that may be written at the moment."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


# ---------------------------------------------------------------------- materialize

COPIES = ("a.jsonl", "b.parquet", "c.jsonl")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that take a while."""
    path, rows = tmp_path_factory.mktemp("large"), good_rows()[:3]
    write_lines(path / "a.jsonl", rows * 8000)
    write_parquet(path / "b.parquet", rows * 8000, group=1000, as_text=True)
    write_lines(path / "c.jsonl", rows * 8000)
    return path


def test_killed_copies_are_finished(root: Path, large: Path, tmp_path: Path) -> None:
    def command(out: Path) -> list[object]:
        return ["data", "materialize", large, out, "--root", root]

    main_ends(command(tmp_path / "whole"))
    out = tmp_path / "killed"
    for name in COPIES:
        partial = out / f".{name}.partial"
        code, _ = stopped(command(out), lambda path=partial: path.exists() and path.stat().st_size > 0, signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert partial.exists()
        assert not (out / name).exists()
    main_ends(command(out))
    assert contents(out) == contents(tmp_path / "whole")


def test_a_stopped_copy_leaves_nothing(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # one that ends by itself leaves something, so it must not be done before the signal is there
    large = write_lines(tmp_path / "a.jsonl", good_rows()[:3] * 20_000)
    code, said = stopped(
        ["data", "materialize", large, out, "--root", root],
        lambda: (out / ".a.jsonl.partial").exists(),
        signal.SIGINT,
    )
    assert code != 0
    assert "Traceback" not in said
    assert not contents(out)


def test_two_copies_at_once(root: Path, large: Path, tmp_path: Path) -> None:
    command = ["data", "materialize", large / "a.jsonl", tmp_path / "out", "--root", root]
    both = [start(command) for _ in range(2)]
    said = [process.communicate(timeout=_PATIENCE)[1] for process in both]
    for process, error in zip(both, said, strict=True):
        assert process.returncode == 0 or error.strip().endswith("a.jsonl: another process is writing it")
    assert min(process.returncode for process in both) == 0
    main_ends(["data", "materialize", large / "a.jsonl", tmp_path / "alone", "--root", root])
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def main_ends(arguments: Sequence[object]) -> None:
    """Run a command in this process, without a fault."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0


# ---------------------------------------------------------------------- a teacher, a policy


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 3, 4)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock says."""
    return {**row, "cost": {name: value for name, value in row["cost"].items() if name != "seconds"}}


def test_killed_traces_are_finished(questions: Path, tmp_path: Path) -> None:
    def command(out: Path) -> list[object]:
        more = ["--attempts", "2", "--keep", "2", "--frames", "16", "--concurrency", "2", "--dispatch", "sequential"]
        return ["data", "traces", questions, "--out", out, "--lab", *more]

    whole, out = tmp_path / "whole", tmp_path / "killed"
    main_ends(command(whole))
    wanted = len(lines(whole / "attempts.jsonl"))
    code, _ = stopped(command(out), lambda: len(lines(out / "attempts.jsonl")) >= 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert 3 <= len(lines(out / "attempts.jsonl")) < wanted
    assert not (out / "traces.jsonl").exists()
    main_ends(command(out))
    made, alone = contents(out), contents(whole)
    assert made.keys() == alone.keys()
    assert lines(out / "traces.jsonl")
    for name in ("traces.jsonl", "reports.jsonl", "recipe.json"):
        assert made[name] == alone[name]
    first, second = ([plain(json.loads(line)) for line in lines(path / "attempts.jsonl")] for path in (whole, out))
    assert len(second) == wanted
    assert sorted(first, key=_place) == sorted(second, key=_place)
    summaries = [json.loads(files["summary.json"]) for files in (made, alone)]
    for summary in summaries:
        del summary["cost"]["seconds"], summary["cost_per_trace"]["seconds"]
    assert summaries[0] == summaries[1]


def _place(row: dict[str, Any]) -> tuple[str, int]:
    return row["id"], row["attempt"]


def test_killed_pass_rates_are_finished(questions: Path, tmp_path: Path) -> None:
    """They come in the order in which they are ready, whether somebody is killed or not."""

    def command(out: Path) -> list[object]:
        more = ["--frames", "4,8", "--samples", "2", "--concurrency", "4", "--max-turns", "2"]
        return ["data", "difficulty", questions, "--out", out, *more]

    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    main_ends(command(whole))
    wanted = len(lines(whole))
    assert wanted == 24
    code, _ = stopped(command(out), lambda: len(lines(out)) >= 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert 3 <= len(lines(out)) < wanted
    main_ends(command(out))
    assert sorted(lines(out)) == sorted(lines(whole))
