"""What training in the lab starts from and learns from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console

from paravt.config import LabMixture, PretrainedModel, QuestionFile, QuestionRows, RLRecipe, SFTRecipe
from paravt.engines.base import stable_seed
from paravt.lab.questions import FAMILIES, question, true_reports
from paravt.lab.teacher import Kind, Mixture, phrases, traces
from paravt.lab.tiny import DEFAULT_SHAPE, TinyShape, build_model, build_processor, train_tokenizer
from paravt.lab.world import WorldReader
from paravt.models import QwenVL, load_model
from paravt.questions import read_questions
from paravt.ranks import Ranks
from paravt.rl import run_rl
from paravt.run_engine import Hosts
from paravt.sft import run_sft
from paravt.types import Trace
from paravt.video import FrameReader, FrameSource


def new_model(shape: TinyShape = DEFAULT_SHAPE, seed: int = 0) -> QwenVL:
    """A tiny model with freshly initialised weights; its tokenizer fits the lab's world, whatever the seed."""
    plain = train_tokenizer(["a"])
    draft = QwenVL(build_model(plain, shape), build_processor(plain, shape)).chat
    kinds: dict[Kind, float] = {"parallel": 1, "sequential": 1, "none": 1, "crop": 1, "look": 1}
    corpus = [trace.text for trace in islice(traces(draft, Mixture(kinds, budgets=(4,)), seed=0), 300)]
    tokenizer = train_tokenizer(corpus, phrases(draft))
    return QwenVL(build_model(tokenizer, shape, seed), build_processor(tokenizer, shape))


def train_sft(recipe: SFTRecipe, out: Path, console: Console) -> None:
    """Run a recipe of supervised training, in each of the processes that torchrun started; see `run_sft`."""

    def start() -> QwenVL:
        if isinstance(recipe.model, PretrainedModel):
            return load_model(recipe.model.path, recipe.model.dtype, ranks.device(recipe.model.device))
        return new_model(TinyShape(**recipe.model.model_dump(exclude={"kind"})), recipe.seed)

    def stage_traces(model: QwenVL, number: int) -> Iterator[Trace]:
        data = recipe.stages[number].data
        assert isinstance(data, LabMixture)
        mixture = Mixture(**data.model_dump(exclude={"kind"}))
        return traces(model.chat, mixture, stable_seed(recipe.seed, number))

    with Ranks() as ranks:
        run_sft(recipe, out, console, start, stage_traces, ranks)


def train_rl(
    recipe: RLRecipe,
    out: Path,
    console: Console,
    resume: str = "auto",
    reader: FrameSource | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Run a recipe of reinforcement learning, in each of the processes that torchrun or Ray started; see `run_rl`.

    Files are read by `reader`, or by this process; the lab's worlds are drawn by it in either case.
    """
    with Ranks() as ranks:
        if isinstance(recipe.data, QuestionFile | QuestionRows):
            samples, files = read_questions(recipe.data), reader or FrameReader()
            run_rl(recipe, out, console, samples, files, ranks, resume=resume, hosts=hosts)
        else:
            families, choice = recipe.data.families or FAMILIES, recipe.data.choice
            samples = [
                question(f"rl-{number}", 0, families=families, choice=choice).sample
                for number in range(recipe.data.videos)
            ]
            run_rl(recipe, out, console, samples, WorldReader(), ranks, true_reports, resume, hosts)
