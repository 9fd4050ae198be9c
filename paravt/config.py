"""Recipes: what a run is made of, validated before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paravt.errors import RecipeError

Positive = Annotated[int, Field(gt=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModel(Strict):
    """A freshly initialised tiny model; see `paravt.lab.tiny.TinyShape`."""

    kind: Literal["tiny"] = "tiny"
    hidden: Positive = 128
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 2
    feed_forward: Positive = 256


class PretrainedModel(Strict):
    """A checkpoint directory or a hub id."""

    kind: Literal["pretrained"]
    path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"


class LabMixture(Strict):
    """Traces of the lab's scripted teacher: shares of their kinds, and the frame budgets of their overviews."""

    kinds: dict[Literal["parallel", "sequential", "none", "crop"], Annotated[float, Field(ge=0)]]
    budgets: tuple[Positive, ...] = (4, 8, 16, 32, 64)
    crop_frames: tuple[Positive, ...] = (16,)

    @model_validator(mode="after")
    def _something(self) -> LabMixture:
        if sum(self.kinds.values()) <= 0 or not self.budgets or not self.crop_frames:
            raise ValueError(
                "the shares of `kinds` must not all be 0, and `budgets` and `crop_frames` must not be empty"
            )
        return self


class Stage(Strict):
    """A stretch of training on one mixture, with its own warm-up and cosine decay."""

    name: str
    steps: Positive
    batch_size: Positive = 32
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    data: LabMixture


class SFTRecipe(Strict):
    """Supervised training on traces. The loss is the mean over sampled tokens."""

    model: Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")] = TinyModel()
    seed: int = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    threads: Positive = 2
    log_every: Positive = 20
    checkpoint_every: Positive = 200
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct(self) -> SFTRecipe:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("stages need distinct names")
        return self


def load_sft_recipe(path: str | Path, overrides: list[str] | None = None) -> SFTRecipe:
    """Read a YAML recipe; `overrides` are `dotted.key=value` (list items by index: `stages.0.steps=10`).

    Raises RecipeError, one line that names the file and the key.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, such as `stages:`")
    for override in overrides or []:
        _override(tree, override)
    try:
        return SFTRecipe.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise RecipeError(f"{path}: {where}: {first['msg']}") from error


def _override(tree: object, override: str) -> None:
    path, equals, text = override.partition("=")
    *parents, last = path.split(".")
    if not equals or not last:
        raise RecipeError(f"{override}: an override looks like key.key=value")
    node = tree
    try:
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})  # type: ignore[attr-defined]
        value = yaml.safe_load(text)
        if isinstance(node, list):
            node[int(last)] = value
        elif isinstance(node, dict):
            node[last] = value
        else:
            raise RecipeError(f"{override}: {'.'.join(parents)} has no keys")
    except (ValueError, IndexError, AttributeError, yaml.YAMLError) as error:
        raise RecipeError(f"{override}: {error}") from error
