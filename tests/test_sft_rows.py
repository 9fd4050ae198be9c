"""Supervised training on rows of files.

Locked here: the update is that of the mean cross-entropy over what assistants said, however rows are packed and
accumulated; a run that is killed within a stage goes on to the same metrics and weights, bit by bit; adapters, a frozen
vision tower and stages that follow each other do what they say; bad files fail before a model is loaded.
"""

from __future__ import annotations

import json
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
from rich.console import Console
from rows import answered, good_rows, text, turn, video, write_lines, write_media, write_parquet
from test_models import FAMILIES, build
from test_sft import weights
from torch.nn.functional import cross_entropy

from paravt.ask import shipped_model
from paravt.config import QuestionRows, RLRecipe, SFTRecipe, load_recipe
from paravt.data.traces import Loaded, RowConfig, TraceBuilder
from paravt.errors import DataError, RecipeError
from paravt.lab.factory import train_sft
from paravt.learner import Learner
from paravt.models import QwenVL, load_model
from paravt.sft_rows import Corpus, supervised_step
from paravt.types import Trace
from paravt.video import FrameReader

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    write_media(path)
    write_parquet(path / "a.parquet", good_rows()[:3])
    bad = [{"messages": [turn("user", "q")]}, answered(video("none.mp4"), text("q"))]
    write_lines(path / "b.jsonl", [*good_rows(), *bad])
    write_lines(path / "held.jsonl", [good_rows()[0], bad[0], good_rows()[3]])
    return path


def stage(root: Path, **change: Any) -> dict[str, Any]:
    data = {
        "kind": "messages", "root": str(root),
        "mixture": [{"files": [f"{root}/a.parquet"]}, {"files": [f"{root}/b.jsonl"], "weight": 3}],
        "validation": {"files": [f"{root}/held.jsonl"], "rows": 2, "every": 2},
    }  # fmt: skip
    data |= change.pop("data", {})
    return {
        "name": "rows",
        "steps": 4,
        "batch_size": 3,
        "learning_rate": 1e-3,
        "warmup_steps": 1,
        "data": data,
        **change,
    }


def recipe(*stages: dict[str, Any], **change: Any) -> dict[str, Any]:
    model = {"kind": "pretrained", "path": str(shipped_model()), "dtype": "float32"}
    return {"model": model, "threads": 1, "checkpoint_every": 1, "stages": list(stages), **change}


def train(tree: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    train_sft(SFTRecipe.model_validate(tree), out, QUIET)
    return metrics(out, tree["stages"][-1]["name"])


def metrics(out: Path, name: str = "rows") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------- the update


def fresh(family: str) -> QwenVL:
    """A tiny model with random weights, in float64."""
    model = build(family)
    model.module.double()
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def lesson(request: pytest.FixtureRequest, root: Path) -> tuple[str, list[Trace], float, dict[str, torch.Tensor]]:
    """A family, rows as traces, and their loss and its gradient."""
    model = fresh(request.param)
    builder = TraceBuilder(model.chat, FrameReader(workers=1), RowConfig(root=root))
    traces = [builder.build(row) for row in good_rows()]
    return request.param, traces, *reference(model, traces)


def reference(model: QwenVL, traces: list[Trace]) -> tuple[float, dict[str, torch.Tensor]]:
    """The Hugging Face model row by row, with its own positions; tokens that are never sampled left out."""
    summed, count = torch.zeros((), dtype=torch.float64), 0
    for trace in traces:
        ids = torch.tensor([trace.ids])
        inputs: dict[str, torch.Tensor] = {}
        if trace.images:
            inputs["pixel_values"], inputs["image_grid_thw"] = model.pixel_inputs(trace.images)
        logits = model.module(
            input_ids=ids, mm_token_type_ids=(ids == model.chat.image_id).int(), **inputs
        ).logits[0, :-1].index_fill(-1, torch.tensor(model.banned_ids), -torch.inf)  # fmt: skip
        sampled = torch.tensor(trace.loss_mask)[1:]
        summed = summed + cross_entropy(logits[sampled], ids[0, 1:][sampled], reduction="sum")
        count += int(sampled.sum())
    loss = summed / count
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("changes", "microbatches"),
    [
        ({}, 1),
        ({"token_budget": 270}, 3),
        ({"packing": False}, 1),
        ({"packing": False, "token_budget": 700, "activation_checkpointing": True}, 2),
    ],
    ids=["one pack", "packs", "padded", "buckets"],
)
def test_the_update_is_that_of_the_mean_cross_entropy_of_each_row_alone(
    root: Path,
    lesson: tuple[str, list[Trace], float, dict[str, torch.Tensor]],
    changes: dict[str, Any],
    microbatches: int,
) -> None:
    """Loss and gradient of every parameter, packed or padded, with images of several sizes in prompts and replies.

    In float64, but for norms, which the models take in float32.
    """
    family, traces, loss, expected = lesson
    tree = recipe(stage(root), clip_grad_norm=1e9, **{"token_budget": 100_000, **changes})
    whole = SFTRecipe.model_validate(tree)
    model = fresh(family)
    learner = Learner(model, whole.learner_config(whole.stages[0]))
    found: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        found.update({name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None})

    learner.optimizer.register_step_pre_hook(keep)
    tokens = sum(sum(trace.loss_mask) for trace in traces)
    step = supervised_step(learner, traces, tokens)
    assert step.microbatches == microbatches
    assert step.token_means["mismatch"] == pytest.approx(loss, abs=1e-12)
    assert step.token_means["tokens"] == tokens
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    fed = sum(max(at for at, said in enumerate(trace.loss_mask) if said) for trace in traces)
    assert (step.packed_tokens == fed) == whole.packing, "nothing is padded in a pack"


def test_it_learns(root: Path, tmp_path: Path) -> None:
    rows = train(recipe(stage(root, steps=20, batch_size=8, learning_rate=3e-3), checkpoint_every=50), tmp_path / "run")
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    assert rows[-1]["validation/loss"] < 0.3 * rows[1]["validation/loss"]
    assert rows[0]["learning_rate"] == pytest.approx(3e-3)
    assert rows[-1]["learning_rate"] == pytest.approx(3e-4)


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sft") / "whole"
    train(recipe(stage(root, steps=6)), out)
    return out


def test_a_run_leaves_what_it_should(whole: Path) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4, 6]
    assert set(rows[-1]) >= {"loss", "tokens", "grad_norm", "learning_rate", "entropy"}
    assert any(name.startswith("skipped/") for name in rows[-1])
    timings = [json.loads(line) for line in (whole / "rows.timings.jsonl").read_text().splitlines()]
    assert all(0 <= row["data_wait_share"] <= 1 for row in timings)
    assert (whole / "last.txt").read_text() == "rows\n"
    assert not (whole / "checkpoints" / "rows").exists()
    start = weights(Path(shipped_model()))
    assert any(not torch.equal(value, start[name]) for name, value in weights(whole / "rows").items())


def test_episodes_are_played_while_it_is_trained(root: Path, tmp_path: Path) -> None:
    """Their numbers depend on the model alone, and playing them changes nothing that is trained."""
    question = {"video": f"{root}/museg/charades/b.mp4", "question": "What?", "answer": "grey"}
    path = write_lines(tmp_path / "q.jsonl", [question, question | {"question": "Why?"}])
    episodes = {"questions": {"kind": "jsonl", "path": str(path)}, "every": 2,
                "episode": {"frame_budget": 2, "max_turns": 1, "max_tokens": 16}}  # fmt: skip
    plain = train(recipe(stage(root, steps=2)), tmp_path / "plain")
    first, second = (train(recipe(stage(root, steps=2, data={"episodes": episodes})), tmp_path / n) for n in "ab")
    assert first == second
    assert first[1]["episodes/episodes"] == 2
    assert {"episodes/f_strict", "episodes/kappa", "episodes/reward/accuracy"} <= set(first[1])
    assert [{k: v for k, v in row.items() if not k.startswith("episodes/")} for row in first] == plain


def test_killed_within_a_stage_and_started_again_it_ends_the_same(root: Path, whole: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "killed", tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(stage(root, steps=6))))
    command = [sys.executable, "-c", "from paravt.cli import main; main()", "sft", str(path), "--out", str(out)]
    for wanted in (1, 3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if (out / "rows.jsonl").exists() and len((out / "rows.jsonl").read_text().splitlines()) >= wanted:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "rows").exists()  # it was killed in time
    assert list((out / "checkpoints" / "rows").glob("step-*/run.json"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(whole)
    first, second = weights(whole / "rows"), weights(out / "rows")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_adapters_and_a_frozen_tower_over_two_stages(root: Path, tmp_path: Path) -> None:
    tree = recipe(stage(root, steps=2), stage(root, name="more", steps=2), lora={"rank": 2, "alpha": 4})
    train(tree, tmp_path / "lora")
    start, first, second = (weights(p) for p in (Path(shipped_model()), tmp_path / "lora/rows", tmp_path / "lora/more"))
    for before, after in ((start, first), (first, second)):
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed
        assert all("language_model" in name for name in changed)
    assert (tmp_path / "lora/more/adapters/adapter_config.json").exists()

    train(recipe(stage(root, steps=2), freeze_vision=True, activation_checkpointing=True), tmp_path / "frozen")
    after = weights(tmp_path / "frozen/rows")
    same = {name for name in start if torch.equal(start[name], after[name])}
    assert {name for name in start if ".visual." in name} <= same
    assert not any("language_model.layers" in name and "proj" in name for name in same)


def test_a_frozen_run_is_resumed(root: Path, tmp_path: Path) -> None:
    tree = recipe(stage(root, steps=3), freeze_vision=True, lora={"rank": 2, "alpha": 4})
    rows = train(tree, tmp_path / "whole")
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 3], "every second one, and the last one"
    out = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paravt.sft.export_stage", _stop)
        with pytest.raises(KeyboardInterrupt):
            train(tree, out)
    newest = max((out / "checkpoints" / "rows").glob("step-*"))
    assert newest.name == "step-000002"
    asked: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paravt.sft_rows.check_room", lambda out, checkpoints, *rest: asked.append(checkpoints))
        assert train(tree, out) == rows
    assert asked == [newest.parent], "room is asked for what is not there yet"
    a, b = weights(tmp_path / "whole" / "rows"), weights(out / "rows")
    assert all(torch.equal(a[name], b[name]) for name in a)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def test_lab_and_rows_in_one_recipe(root: Path, tmp_path: Path) -> None:
    lab = {"name": "lab", "steps": 2, "batch_size": 2, "learning_rate": 1e-3, "data": {"kinds": {"crop": 1}}}
    tree = recipe(lab, stage(root, steps=2), lab | {"name": "again"})
    train(tree, tmp_path / "run")
    a, b, c = (weights(tmp_path / "run" / name) for name in ("lab", "rows", "again"))
    assert any(not torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(b[name], c[name]) for name in a)


def test_validation_renders_with_a_tokenizer_of_its_own(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are rendered ahead on another thread meanwhile, and a tokenizer is not for two threads."""
    made: list[TraceBuilder] = []
    threads: dict[int, set[int]] = {}
    builder, render = Corpus.builder, TraceBuilder.render

    def watched(self: TraceBuilder, loaded: Loaded) -> Trace:
        threads.setdefault(id(self.chat.tokenizer), set()).add(threading.get_ident())
        return render(self, loaded)

    def kept(*arguments: Any) -> TraceBuilder:
        made.append(builder(*arguments))  # so that no id is given twice
        return made[-1]

    monkeypatch.setattr(Corpus, "builder", kept)
    monkeypatch.setattr(TraceBuilder, "render", watched)
    train(recipe(stage(root, steps=2)), tmp_path / "run")
    assert len(set().union(*threads.values())) == 2
    assert all(len(names) == 1 for names in threads.values())


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"files": ["x.parquet"]}, "give `files` or `mixture`"),
        ({"mixture": []}, "give `files` or `mixture`"),
        ({"mixture": [{"files": ["a"], "weight": 0}]}, "greater than 0"),
        ({"mixture": [{"files": ["a"], "weight": 1e308}]}, "less than or equal to"),
        ({"workers": 100_000}, "less than or equal to 1024"),
        ({"kind": "dance"}, "`kind` must be `messages`"),
        ({"colour": 1}, "there is no such setting"),
    ],
)
def test_bad_recipes(root: Path, tmp_path: Path, data: dict[str, Any], message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe(stage(root, data=data))))
    with pytest.raises(RecipeError, match=message):
        load_recipe(SFTRecipe, path)


def test_all_weights_are_not_trained_in_16_bits(root: Path, tmp_path: Path) -> None:
    """An update would be lost: refused where the recipe says so, and where the checkpoint does."""
    lab = {"name": "lab", "steps": 2, "batch_size": 2, "learning_rate": 1e-3, "data": {"kinds": {"crop": 1}}}
    path, lost = tmp_path / "r.yaml", "model.dtype bfloat16 without adapters "
    pretrained = {"kind": "pretrained", "path": str(shipped_model()), "dtype": "bfloat16"}
    lora = {"lora": {"rank": 2, "alpha": 4}}
    path.write_text(yaml.safe_dump(recipe(lab, stage(root), model=pretrained, **lora)))
    with pytest.raises(RecipeError, match=lost + "would lose most updates; set model.dtype") as caught:
        load_recipe(SFTRecipe, path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=lost + r"needs several processes \(--nproc\)"):
        train(recipe(stage(root), model=pretrained), tmp_path / "run")
    assert not (tmp_path / "run").exists()

    load_model(shipped_model(), "bfloat16").save(tmp_path / "half")
    model = {"kind": "pretrained", "path": str(tmp_path / "half")}
    for number, trained in enumerate((stage(root), lab)):
        with pytest.raises(RecipeError, match=lost):
            train(recipe(trained, model=model), tmp_path / f"run{number}")
    train(recipe(stage(root, steps=2), model=model, **lora), tmp_path / "adapted")
    start, after = weights(tmp_path / "half"), weights(tmp_path / "adapted" / "rows")
    assert any(not torch.equal(start[name], after[name]) for name in start)


def test_rows_of_questions_in_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "rl.yaml"
    path.write_text("{model: {kind: pretrained, path: m}, data: {kind: rows, files: [a.parquet], root: d}}")
    assert load_recipe(RLRecipe, path).data == QuestionRows(kind="rows", files=("a.parquet",), root="d")


def test_settings_of_files_need_files(tmp_path: Path) -> None:
    lab = {"name": "lab", "steps": 2, "learning_rate": 1e-3, "data": {"kinds": {"crop": 1}}}
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe(lab, freeze_vision=True)))
    with pytest.raises(RecipeError, match="are for stages on files"):
        load_recipe(SFTRecipe, path)


def test_files_are_opened_before_a_model(root: Path, tmp_path: Path) -> None:
    nowhere = {"kind": "pretrained", "path": "./nowhere"}
    with pytest.raises(DataError, match=r"none.parquet: no such file"):
        train(
            recipe(stage(root, data={"mixture": [{"files": [f"{root}/none.parquet"]}]}), model=nowhere), tmp_path / "a"
        )
    with pytest.raises(DataError, match=r"gone: no such directory; it is the `root` of the media"):
        train(recipe(stage(root, data={"root": f"{root}/gone"}), model=nowhere), tmp_path / "b")


def test_a_corpus_without_a_usable_row_ends_in_one_line(root: Path, tmp_path: Path) -> None:
    change = {"root": str(tmp_path), "mixture": [], "files": [f"{root}/a.parquet"], "validation": None}
    with pytest.raises(DataError, match="no row can be used: 3 media_missing"):
        train(recipe(stage(root, data=change)), tmp_path / "run")
