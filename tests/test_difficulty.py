"""Questions by difficulty.

Locked here: a question stays if some budget can solve it and some budget can fail it; what was not measured stays;
a measurement is of a question and not of its id; failed episodes are in no pass rate.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rows import write_lines

from paravt.cli import main
from paravt.config import RLRecipe
from paravt.data.difficulty import fingerprint, pass_rates, read_difficulty, sift
from paravt.errors import DataError
from paravt.questions import read_questions
from paravt.types import Sample

SAMPLES = [Sample(name, "v.mp4", f"question {name}", answer="x") for name in "abcde"]


def line(sample: Sample, frames: int, passed: int, samples: int = 4, **change: Any) -> dict[str, Any]:
    row = {"id": sample.id, "sample": fingerprint(sample), "frames": frames, "samples": samples, "passed": passed,
           "accuracy": passed / samples if samples else None, "failed": 4 - samples, "policy": {}}  # fmt: skip
    return row | change


def measured(directory: Path) -> Path:
    hard, easy, once, failed, _ = SAMPLES
    return write_lines(directory / "d.jsonl", [
        line(hard, 4, 0), line(hard, 64, 0), line(easy, 4, 4), line(easy, 64, 4),
        line(once, 4, 0), line(once, 64, 4), line(failed, 4, 0, samples=0), line(failed, 64, 2),
    ])  # fmt: skip


def test_what_no_budget_can_solve_or_fail_is_left_out(tmp_path: Path) -> None:
    rates = pass_rates(read_difficulty(measured(tmp_path)))
    kept, counts = sift(SAMPLES, rates)
    assert [sample.id for sample in kept] == ["c", "d", "e"]
    assert counts == {"unsolved": 1, "always solved": 1, "unmeasured": 1, "kept": 3}
    assert rates["d", fingerprint(SAMPLES[3])] == {64: 0.5}, "nothing could be scored at K = 4"
    assert [s.id for s in sift(SAMPLES, rates, above=0.5)[0]] == ["c", "e"]
    other = [replace(sample, answer="y") for sample in SAMPLES]
    assert sift(other, rates)[1]["unmeasured"] == 5


def test_a_recipe_leaves_them_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": s.id, "video": "v.mp4", "question": s.question, "answer": "x"} for s in SAMPLES]
    path = write_lines(tmp_path / "q.jsonl", rows)

    def recipe(file: Path, **more: Any) -> Any:
        data = {"kind": "jsonl", "path": str(path), "difficulty": {"file": str(file), **more}}
        return RLRecipe.model_validate({"model": {"kind": "pretrained", "path": "m"}, "data": data}).data

    with caplog.at_level(logging.WARNING):
        assert [sample.id for sample in read_questions(recipe(measured(tmp_path)))] == ["c", "d", "e"]
    assert "1 unsolved" in caplog.text
    with pytest.raises(DataError, match="has measured none of the 5"):
        read_questions(recipe(write_lines(tmp_path / "o.jsonl", [line(Sample("z", "v", "q"), 4, 1)])))
    every = write_lines(tmp_path / "e.jsonl", [line(sample, 4, 4) for sample in SAMPLES])
    with pytest.raises(DataError, match="leaves no question"):
        read_questions(recipe(every))


ODD = ({"id": []}, {"sample": {}}, {"frames": "4"}, {"samples": float("nan")}, {"passed": True})


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", '{"id": 1}', json.dumps(line(SAMPLES[0], 4, 9))]
    + [json.dumps(line(SAMPLES[0], 4, 1) | change) for change in ODD],
)
def test_a_bad_line_is_named_and_a_cut_off_one_is_not_read(tmp_path: Path, bad: str) -> None:
    path = write_lines(tmp_path / "d.jsonl", [line(SAMPLES[0], 4, 1), bad])
    with pytest.raises(DataError, match=r"d.jsonl:2: not a measurement"):
        read_difficulty(path)
    path.write_text(path.read_text()[:-1])
    assert len(read_difficulty(path)) == 1


@pytest.mark.parametrize("frames", ["", "4,x", "0", "4,4", "4,,8", "²"])
def test_budgets_that_are_none_are_one_line(frames: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "difficulty", "none.jsonl", "--frames", frames])
    assert ended.value.code == 2
    assert "numbers from 1 to 65536, separated by commas" in " ".join(capsys.readouterr().err.replace("│", " ").split())
