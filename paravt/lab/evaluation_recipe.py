"""How a checkpoint is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paravt.config import EpisodeRecipe, Positive, PretrainedModel, Strict


class Faults(Strict):
    """Some of an episode's calls get a bad report: another than the truth, or none because the sub-agent failed."""

    calls: Annotated[int, Field(ge=0)]
    """How many of the first calls of an episode, whichever they are about."""
    kind: Literal["wrong", "failed"] = "wrong"


class Evaluation(Strict):
    """How a checkpoint is measured: every question at every K."""

    questions: Positive = 64
    budgets: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4, 8, 16, 32, 64)
    dispatch: Literal["parallel", "sequential", "none"] = "parallel"
    temperature: Annotated[float, Field(ge=0)] = 0.7
    """That of training by default, as in the paper: greedy decoding hides a fragile format."""
    max_turns: Positive | None = None
    """None: that of the row's recipe. Sequential dispatch needs a turn for each window."""
    faults: Faults | None = None
    max_concurrent: Positive = 128


class EvaluationRecipe(Strict):
    """One evaluation of one checkpoint: what its run directory holds as `recipe.json`."""

    model: PretrainedModel
    seed: int
    """Of the questions and of the sampling: the same for all checkpoints of a seed."""
    episode: EpisodeRecipe
    evaluation: Evaluation
