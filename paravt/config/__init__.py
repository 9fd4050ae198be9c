"""Recipes: what a run is made of, validated before anything is loaded."""

from paravt.config.base import (
    EpisodeRecipe,
    Positive,
    PretrainedModel,
    Strict,
    TinyModel,
    check_precision,
    load_recipe,
)
from paravt.config.data import (
    DifficultyFilter,
    LabMixture,
    LabQuestions,
    MessageFiles,
    QuestionFile,
    QuestionRows,
    SampledEpisodes,
    Validation,
    WeightedFiles,
)
from paravt.config.engine import LocalEngineRecipe, VLLMEngineRecipe
from paravt.config.rl import JudgeRecipe, RLRecipe, RolloutRecipe
from paravt.config.sft import SFTRecipe, Stage

__all__ = [
    "DifficultyFilter",
    "EpisodeRecipe",
    "JudgeRecipe",
    "LabMixture",
    "LabQuestions",
    "LocalEngineRecipe",
    "MessageFiles",
    "Positive",
    "PretrainedModel",
    "QuestionFile",
    "QuestionRows",
    "RLRecipe",
    "RolloutRecipe",
    "SFTRecipe",
    "SampledEpisodes",
    "Stage",
    "Strict",
    "TinyModel",
    "VLLMEngineRecipe",
    "Validation",
    "WeightedFiles",
    "check_precision",
    "load_recipe",
]
