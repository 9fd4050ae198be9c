"""Supervised training in several processes.

Locked here: a run of one process that goes on in two, which are killed, and goes on in one again, has the metrics of
one that was never stopped, within float error: the same rows in every step, also where some cannot be used or have no
image, the same loss of held-out rows, the same episodes; two processes share the rows and have the same batches; what
several processes cannot do is one line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rows import answered, good_rows, text, turn, video, write_lines, write_media
from test_models import build
from test_rl_ranks import ENVIRONMENT, children
from test_sft import weights
from test_sft_rows import QUIET, metrics, recipe, stage

from paravt.ask import shipped_model
from paravt.checkpoint import save_checkpoint
from paravt.config import MessageFiles, SFTRecipe
from paravt.errors import DataError, RecipeError
from paravt.lab.factory import train_sft
from paravt.learner import Learner
from paravt.provenance import lock_directory
from paravt.ranks import Ranks
from paravt.sft import run_sft
from paravt.sft_batches import Batch, Batches
from paravt.sft_rows import Corpus
from paravt.video import FrameReader

STEPS = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    write_media(path)
    bad = [{"messages": [turn("user", "q")]}, answered(video("none.mp4"), text("q"))]
    write_lines(path / "a.jsonl", [*good_rows(), *bad])
    write_lines(path / "held.jsonl", [good_rows()[3], bad[0], good_rows()[0], good_rows()[3]])
    question = {"video": f"{path}/museg/charades/b.mp4", "question": "What?", "answer": "grey"}
    write_lines(path / "q.jsonl", [question, question | {"question": "Why?"}, question | {"question": "When?"}])
    return path


@pytest.fixture(scope="module")
def tree(root: Path) -> dict[str, Any]:
    episodes = {"questions": {"kind": "jsonl", "path": f"{root}/q.jsonl"}, "every": 3,
                "episode": {"frame_budget": 2, "max_turns": 1, "max_tokens": 8}}  # fmt: skip
    data = {"mixture": [], "files": [f"{root}/a.jsonl"], "episodes": episodes}
    rows = stage(root, steps=STEPS, batch_size=3, learning_rate=1e-4, data=data)
    return recipe(rows)


def kill_after(step: int, line: list[str], out: Path) -> None:
    """Start a run and kill all its processes when it has made a checkpoint."""
    with (out / "log.txt").open("w") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env=ENVIRONMENT)
        deadline = time.monotonic() + 500
        while process.poll() is None and time.monotonic() < deadline:
            if (out / "checkpoints" / "rows" / f"step-{step:06d}" / "run.json").exists():
                break
            time.sleep(0.01)
        for each in (*children(process.pid), process.pid):
            os.kill(each, signal.SIGKILL)
        process.wait()
    while time.monotonic() < deadline:  # its children are nobody's now
        try:
            return lock_directory(out).close()
        except RecipeError:
            time.sleep(0.01)


def test_a_run_goes_on_in_two_processes_and_in_one_again(tree: dict[str, Any], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"

    def copied(directory: Path, learner: Learner, *rest: Any) -> None:  # those of a finished stage are removed
        made = save_checkpoint(directory, learner, *rest)
        if learner.steps == 1:
            shutil.copytree(made, out / made.relative_to(whole))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paravt.sft_rows.save_checkpoint", copied)
        train_sft(SFTRecipe.model_validate(tree), whole, QUIET)
    expected = metrics(whole)
    for name in ("recipe.json", "rows.jsonl"):
        shutil.copy(whole / name, out)

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "paravt", "sft", str(path), "--out", str(out), "--nproc", "2"]
    kill_after(4, command, out)
    log = (out / "log.txt").read_text()
    assert "rows: step 2 of 8: loss " in log, log
    assert "step 1 of" not in log
    assert log.count("step 2 of 8") == 1, "one process talks"
    assert log.count("skipped") <= 2, "one process talks of each reason once"
    assert not (out / "rows").exists(), "it was killed in time"
    before = metrics(out)
    assert len(before) >= 4

    train_sft(SFTRecipe.model_validate(tree), out, QUIET)
    after = metrics(out)
    assert after[:4] == before[:4]
    assert len(after) == STEPS
    for one, other in zip(expected, after, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name not in ("microbatches", "packed_tokens"):  # dummy rows count
                close = value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
                assert other[name] == close, (one["step"], name)
    assert {"validation/loss", "episodes/f_strict", "skipped/media_missing"} <= set().union(*after)
    start = weights(Path(shipped_model()))
    updates = [
        torch.cat([(end[name] - start[name]).flatten() for name in start])
        for end in (weights(whole / "rows"), weights(out / "rows"))
    ]
    assert (updates[0] - updates[1]).norm() < 0.05 * updates[0].norm()


class Pair(Ranks):
    """One of two processes that are threads."""

    def __init__(self, rank: int, told: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._told, self._barrier = rank, 2, told, barrier

    def exchange(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait(60)
        out = list(self._told)
        self._barrier.wait(60)
        return out


def take(root: Path, files: str, ranks: Ranks, counts: list[int], draws: int | None = None) -> list[Batch]:
    model = build("qwen3_vl")
    data = MessageFiles(kind="messages", files=(f"{root}/{files}",), root=str(root))
    corpus, reader = Corpus(data, 5), FrameReader(workers=1)
    batches = Batches(corpus.stream(), corpus.builder(model, reader), ranks, workers=2, ahead=3)
    try:
        return [batches.take(count, draws) for count in counts]
    finally:
        batches.close()
        reader.close()


def in_two(root: Path, files: str, counts: list[int]) -> list[list[Batch]]:
    told, barrier, found = [None, None], threading.Barrier(2), {}
    threads = [
        threading.Thread(target=lambda r=rank: found.update({r: take(root, files, Pair(r, told, barrier), counts)}))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def test_the_rows_of_a_batch_are_dealt(root: Path) -> None:
    counts = [3, 1, 4, 7]
    alone = take(root, "a.jsonl", Ranks(), counts)
    pair = in_two(root, "a.jsonl", counts)
    for one, *both in zip(alone, *pair, strict=True):
        for batch in both:
            assert (batch.rows, batch.tokens) == (one.rows, one.tokens)
            assert batch.to_dict() == one.to_dict()
        texts = [sorted(trace.text for batch in group for trace in batch.mine) for group in ([one], both)]
        assert texts[0] == texts[1]
    assert [batch.rows for batch in alone] == counts
    assert sum(alone[-1].skipped.values()) >= 4
    assert all(any(batch.mine for batch in batches) for batches in pair), "both have rows"


def test_a_pass_over_held_out_rows_ends(root: Path) -> None:
    (batch,) = take(root, "held.jsonl", Ranks(), [10], draws=4)
    assert (batch.rows, dict(batch.skipped)) == (3, {"no_answer": 1})
    bad = write_lines(root / "bad.jsonl", [answered(video("none.mp4"), text("q"))] * 3)
    with pytest.raises(DataError, match="no row can be used: 3 media_missing"):
        take(root, bad.name, Ranks(), [1])


def test_what_several_processes_cannot_do_is_one_line(tmp_path: Path) -> None:
    lab = {"stages": [{"name": "a", "steps": 1, "learning_rate": 1, "data": {"kinds": {"crop": 1}}}]}
    pair = Pair(0, [], threading.Barrier(1))
    with pytest.raises(RecipeError, match="stage a: the lab's traces are trained on in one process") as caught:
        run_sft(SFTRecipe.model_validate(lab), tmp_path, QUIET, lambda: build("qwen3_vl"), lambda *_: iter(()), pair)
    assert "\n" not in str(caught.value)
    assert json.dumps(list(tmp_path.iterdir())) == "[]"
