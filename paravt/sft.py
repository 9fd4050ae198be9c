"""Supervised training: the loss is on the tokens that a policy would have sampled, and on nothing else.

A recipe is a list of stages, each on files of rows (`sft_rows`) or on the lab's traces (`sft_traces`).
"""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console

from paravt.config import MessageFiles, PretrainedModel, SFTRecipe, check_precision
from paravt.engines.base import stable_seed
from paravt.errors import RecipeError
from paravt.files import write_whole
from paravt.models import QwenVL, load_model
from paravt.provenance import claim_run
from paravt.ranks import Ranks
from paravt.sft_progress import StageProgress, open_bars
from paravt.sft_rows import Corpus, export_stage, train_on_rows
from paravt.sft_traces import train_on_traces
from paravt.types import Trace


def run_sft(
    recipe: SFTRecipe,
    out: Path,
    console: Console,
    new_model: Callable[[], QwenVL],
    lab_traces: Callable[[QwenVL, int], Iterator[Trace]],
    ranks: Ranks,
) -> None:
    """Train all stages of a recipe; each leaves a checkpoint in `out/<name>`, `out/last.txt` names the newest.

    `new_model` gives what the first stage starts from, `lab_traces` the endless data of stage number i, always the same
    for the same i. A run that was stopped goes on after its last finished stage, or within a stage on files from its
    newest checkpoint, on any number of processes; on as many as before, to the same weights as if it had not been
    stopped. All `ranks` call this, with the same arguments. Raises RecipeError if `out` holds a run of another recipe,
    or if this many processes cannot run this one; DataError if files cannot be read.
    """
    torch.set_num_threads(recipe.threads)
    for stage in recipe.stages:
        if ranks.size > 1 and not isinstance(stage.data, MessageFiles):
            raise RecipeError(f"stage {stage.name}: the lab's traces are trained on in one process; leave out --nproc")
    if isinstance(recipe.model, PretrainedModel):
        check_precision(recipe.model.dtype, adapters=recipe.lora is not None, processes=ranks.size)
    console = console if ranks.first else Console(quiet=True)
    model: QwenVL | None = None
    claimed = claim_run(out, recipe.model_dump_json(indent=1)) if ranks.first else nullcontext()
    with claimed, open_bars(console) as bars:
        # before a model is loaded: a wrong path should not take a minute to say so
        corpora = {
            s.name: Corpus(s.data, stable_seed(recipe.seed, s.name))
            for s in recipe.stages
            if isinstance(s.data, MessageFiles)
        }
        for number, stage in enumerate(recipe.stages):
            target, unfinished = out / stage.name, out / f"{stage.name}.partial"
            progress = StageProgress(bars, stage)
            if target.is_dir():
                progress.update(stage.steps)
            else:
                if model is None:
                    previous = out / recipe.stages[number - 1].name
                    model = new_model() if number == 0 else _reload(previous, recipe, ranks)
                if ranks.first:
                    shutil.rmtree(unfinished, ignore_errors=True)
                if stage.name in corpora:
                    learner = train_on_rows(model, stage, recipe, corpora[stage.name], out, progress, ranks)
                    export_stage(learner, unfinished)
                    model = None  # it is what the learner trains, layers with adapters; what was written is whole
                else:
                    metrics = out / f"{stage.name}.jsonl"
                    train_on_traces(model, stage, recipe, lab_traces(model, number), metrics, progress)
                    model.save(unfinished)
                if ranks.first:
                    unfinished.rename(target)
            if ranks.first:
                write_whole(out / "last.txt", stage.name + "\n")
                shutil.rmtree(out / "checkpoints" / stage.name, ignore_errors=True)
            ranks.exchange(None)  # nobody reads what is not written yet


def _reload(checkpoint: Path, recipe: SFTRecipe, ranks: Ranks) -> QwenVL:
    """A finished stage's model, where and as the recipe wants it."""
    if isinstance(recipe.model, PretrainedModel):
        return load_model(checkpoint, recipe.model.dtype, ranks.device(recipe.model.device))
    return load_model(checkpoint, "float32")


if __name__ == "__main__":  # `torchrun -m paravt.sft RECIPE --out DIR`
    sys.argv.insert(1, "sft")
    runpy.run_module("paravt", run_name="__main__")
