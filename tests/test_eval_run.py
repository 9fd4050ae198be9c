"""A benchmark run against a chat server with faults, as users run it: nothing is lost, nothing counts twice.

The process is a real one, and is really killed.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import DROPPED, Server
from conftest import CASES, LONG

ROWS = 1000
VIDEOS = (LONG, str(CASES / "video" / "base.mp4"), str(CASES / "video" / "three.mp4"))


class Answers(Server):
    """Answers question n with B; every 4th wrong, every 50th unparsable. `faults` come first, one for each request."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[int, list[Any]] = {}
        self.asked: Counter[int] = Counter()

    def default(self, body: dict[str, Any]) -> Any:
        text = json.dumps(body["messages"])
        number = int(re.findall(r"event (\d+)", text)[-1])
        self.asked[number] += 1
        if self.faults.get(number):
            return self.faults[number].pop(0)
        if number % 50 == 0:
            return "<answer>I cannot see it</answer>"
        return "<answer>C</answer>" if number % 4 == 0 else "<answer>B</answer>"


RIGHT = sum(n % 50 != 0 and n % 4 != 0 for n in range(ROWS))
UNPARSABLE = sum(n % 50 == 0 for n in range(ROWS))


@pytest.fixture
def answers() -> Iterator[Answers]:
    running = Answers()
    running.start()
    yield running
    running.stop()


def write_questions(path: Path, rows: int = ROWS) -> Path:
    lines = [
        {
            "id": f"q{n}", "video": VIDEOS[n % len(VIDEOS)], "question": f"What is event {n}?", "answer": "B",
            "options": ["a dog", "a cat", "a bird"], "kind": ("short", "long")[n % 2],
        }
        for n in range(rows)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "from paravt.cli import main; main()", "eval", *map(str, arguments)]


def paravt(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)


def run_arguments(data: Path, out: Path, *servers: Server) -> list[str | Path]:
    return [
        "--data", data, "--out", out, "--mode", "direct", "--frames", "1", "--concurrency", "16",
        *(part for server in servers for part in ("--server", server.url)),
    ]  # fmt: skip


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_thousand_rows_with_faults_a_kill_and_a_resume(tmp_path: Path, answers: Answers) -> None:
    """5 % of the rows meet a fault. 10 of them go on failing until the server is well again."""
    data, out = write_questions(tmp_path / "mine.jsonl"), tmp_path / "run"
    for number in range(0, ROWS, 20):
        answers.faults[number + 7] = [500] if number % 40 else [DROPPED]
    broken = range(3, ROWS, 100)
    for number in broken:
        answers.faults[number] = [400] * 3  # of three tries; a bad request is not sent again within one
    answers.delay = 0.005
    arguments = run_arguments(data, out, answers)
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    rows = out / "rows.jsonl"
    while not rows.exists() or rows.stat().st_size < 600_000:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with rows.open("ab") as file:
        file.write(b'{"bench": "mine", "config": "cut o')  # what a kill in the middle of a write leaves
    kept = {row["sample"]["id"] for row in lines_whole(rows)}
    assert 100 < len(kept) < ROWS
    before = Counter(answers.asked)

    done = paravt(*arguments)

    again = [n for n in range(ROWS) if f"q{n}" in kept and answers.asked[n] > before[n] and n not in broken]
    assert again == []  # what was there was not asked again
    seen = Counter(row["sample"]["id"] for row in lines(out))
    assert set(seen) == {f"q{n}" for n in range(ROWS)}
    assert all(count == 1 for id, count in seen.items() if int(id[1:]) not in broken)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    (block,) = summary["benches"][0]["blocks"]
    counts = block["counts"]
    assert sum(counts[kind] for kind in ("right", "wrong", "unparsable", "failed", "no_gold")) == counts["rows"] == ROWS
    assert counts["unparsable"] == UNPARSABLE
    first_failed = counts["failed"]
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr  # at most 1 % have failed

    done = paravt(*arguments, "--json")  # the server is well again: failed rows, and no others, are tried again
    assert done.returncode == 0, done.stderr
    (block,) = json.loads(done.stdout)[0]["benches"][0]["blocks"]
    assert first_failed <= len(broken)
    assert block["counts"] == {
        "rows": ROWS, "right": RIGHT, "wrong": ROWS - RIGHT - UNPARSABLE, "unparsable": UNPARSABLE, "failed": 0,
        "no_gold": 0,
    }  # fmt: skip
    assert block["accuracy"] == pytest.approx(RIGHT / ROWS)
    assert set(block["breakdowns"]) == {"kind"}

    before = Counter(answers.asked)
    text = rows.read_bytes()
    assert paravt(*arguments).returncode == 0
    assert (answers.asked, rows.read_bytes()) == (before, text)  # all is done: nobody is asked


def lines_whole(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
