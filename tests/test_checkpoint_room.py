"""A disk that fills while a checkpoint is written: one clear error, and what was there before is as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from disk import full_disk
from test_learner import configure, fresh_model

from paravt.checkpoint import check_room, choose_checkpoint, complete_checkpoints, load_checkpoint, save_checkpoint
from paravt.errors import DataError, RecipeError
from paravt.learner import Learner
from paravt.models import load_model


def trained() -> Learner:
    """A learner whose optimizer has moments, so that its state is larger than the model."""
    learner = Learner(fresh_model(), configure())
    for parameter in learner.model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    return learner


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    learner = trained()
    learner.steps = 1
    first = save_checkpoint(tmp_path, learner, {"cursor": 1}, keep=2)
    model = (first / "model" / "model.safetensors").stat().st_size
    learner.steps = 2
    for room in (100, model // 2, model + 1000):  # its first small file, its weights, its state
        said = r"step-000002: cannot be written: .*File too large"
        with full_disk(room), pytest.raises(DataError, match=said) as caught:
            save_checkpoint(tmp_path, learner, {"cursor": 2}, keep=2)
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert choose_checkpoint(tmp_path, "auto") == first
    assert load_checkpoint(first, trained()) == {"step": 1, "cursor": 1}
    save_checkpoint(tmp_path, learner, {"cursor": 2}, keep=2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001", "step-000002"]


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    model = fresh_model()
    with full_disk(10_000), pytest.raises(DataError, match=r"out: cannot be written: .*; make room"):
        model.save(tmp_path / "out")
    model.save(tmp_path / "out")
    load_model(tmp_path / "out", "float32")


def test_room_is_asked_for_what_is_still_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fitted when it began fits when it goes on: its checkpoints are on the disk already."""
    learner = trained()
    size = 4 * sum(p.numel() * p.element_size() for p in learner.scorer.parameters())
    learner.steps = 1

    def free(room: float) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=int(room * size))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    free(2.5)
    with pytest.raises(RecipeError, match="3 more checkpoints need"):
        check_room(tmp_path, tmp_path / "checkpoints", learner, keep=2)
    free(3.5)
    check_room(tmp_path, tmp_path / "checkpoints", learner, keep=2)
    save_checkpoint(tmp_path / "checkpoints", learner, {}, keep=2)
    free(2.5)
    check_room(tmp_path, tmp_path / "checkpoints", learner, keep=2)


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step-000009.partial" / "model").mkdir(parents=True)
    learner = trained()
    for step in (1, 2, 3):
        learner.steps = step
        save_checkpoint(tmp_path, learner, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", "{"), ("run.json", "[]"), ("run.json", "{}"), ("state/.metadata", ""), ("state/.metadata", None)],
)
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, name: str, text: str | None) -> None:
    learner = trained()
    learner.steps = 1
    path = save_checkpoint(tmp_path, learner, {}, keep=2)
    (path / name).unlink()
    if text is not None:
        (path / name).write_text(text)
    with pytest.raises(DataError, match=r"step-000001: cannot be read: .*; remove it to go on") as caught:
        load_checkpoint(path, trained())
    assert "\n" not in str(caught.value)


def test_a_checkpoint_before_the_first_update_changes_nothing(tmp_path: Path) -> None:
    """Adam's bias correction begins with the first update, whether or not something was saved before it."""

    def update(learner: Learner) -> dict[str, torch.Tensor]:
        for parameter in learner.model.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner.optimizer.step()
        return {name: value.clone() for name, value in learner.model.module.state_dict().items()}

    plain, saved, loaded = (Learner(fresh_model(), configure()) for _ in range(3))
    path = save_checkpoint(tmp_path, saved, {}, keep=2)
    load_checkpoint(path, loaded)
    wanted = update(plain)
    for learner in (saved, loaded):
        found = update(learner)
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())
