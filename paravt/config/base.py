"""What all recipes are made of: strict sections, the model, what an episode is given; and reading one from a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paravt.errors import RecipeError

Positive = Annotated[int, Field(gt=0)]
Threads = Annotated[int, Field(gt=0, le=1024)]
"""Many more cannot be started, and end the process where nobody can say why."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModel(Strict):
    """A freshly initialised tiny model; see `paravt.lab.tiny.TinyShape`."""

    kind: Literal["tiny"] = "tiny"
    hidden: Positive = 128
    """Width of the text model."""
    layers: Positive = 3
    """Of the text model."""
    heads: Positive = 4
    """Of queries."""
    kv_heads: Positive = 2
    """Of keys and values."""
    feed_forward: Positive = 256
    """Width inside a layer's feed-forward part."""

    @model_validator(mode="after")
    def _divisible(self) -> TinyModel:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("hidden must be a multiple of 2 x heads, and heads one of kv_heads")
        return self


class PretrainedModel(Strict):
    """A checkpoint directory or a hub id."""

    kind: Literal["pretrained"]
    path: str
    """The directory, or `owner/name` on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto: as they are saved."""
    device: str = "cpu"
    """cpu, cuda, cuda:1 ..."""


def check_precision(dtype: str, *, adapters: bool, processes: int | None = None) -> None:
    """All weights are trained in float32, or by several processes, whose shards are; adapters always are.

    In 16 bits an update of usual size is smaller than half of a weight's last digit, and lost. `processes`: None where
    there is no choice of them. Raises RecipeError.
    """
    if adapters or dtype not in ("bfloat16", "float16") or (processes or 1) > 1:
        return
    several = "" if processes is None else "needs several processes (--nproc), which keep float32 master weights; "
    raise RecipeError(
        f"model.dtype {dtype} without adapters {several or 'would lose most updates; '}set model.dtype: float32 or lora"
    )


class EpisodeRecipe(Strict):
    """See `paravt.agent.EpisodeConfig`. There is no forced answer and no time-out in training, unless one is set."""

    frame_budget: Positive = 64
    """K without gating."""
    dispatch: Literal["parallel", "sequential", "none"] = "parallel"
    evidence: Literal["report", "frames", "both"] = "report"
    max_turns: Positive = 4
    max_parallel: Positive = 8
    max_tokens: Positive = 1024
    max_report_tokens: Positive = 256
    max_context_tokens: Positive = 32_768
    max_frames: Positive = 1024
    call_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds for the frames of a turn's calls, for each report, and for each turn; null waits for ever."""
    think_prefix: bool = False
    force_answer: bool = False


R = TypeVar("R", bound=BaseModel)


def load_recipe(kind: type[R], path: str | Path, overrides: Sequence[str] = ()) -> R:
    """Read a YAML recipe; `overrides` are `dotted.key=value` (list items by index: `stages.0.steps=10`).

    A recipe with `base: other.yaml` (relative to it) changes that one, mapping by mapping. Raises RecipeError, one
    line that names the file and the key.
    """
    tree = _read(Path(path))
    for override in overrides:
        _override(tree, override)
    odd = next(_odd(tree, {}), None)
    if odd is not None:
        raise RecipeError(f"{path}: {odd}")
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        message = (
            "there is no such setting"
            if first["type"] == "extra_forbidden"
            else first["msg"].removeprefix("Value error, ")
        )
        raise RecipeError(f"{path}: {where}: {message}") from error


def _odd(node: object, seen: dict[int, bool], where: str = "") -> Iterator[str]:
    """What nothing can be trained with: numbers that are not finite, by their keys, and what contains itself.

    An alias of YAML is one object in several places: it is looked at once. `seen` has True for what is being looked at.
    """
    if isinstance(node, float) and not math.isfinite(node):
        yield f"{where}: must be a finite number"
    if not isinstance(node, (dict, list)):
        return
    if id(node) in seen:
        if seen[id(node)]:
            yield "a part of it contains itself"
        return
    seen[id(node)] = True
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _odd(value, seen, f"{where}.{key}" if where else str(key))
    seen[id(node)] = False


def _read(path: Path, inner: frozenset[Path] = frozenset()) -> dict[str, Any]:
    try:
        if path.resolve() in inner:
            raise RecipeError(f"{path}: is its own base")
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys")
    base = tree.pop("base", None)
    return tree if base is None else _merge(_read(path.parent / str(base), inner | {path.resolve()}), tree)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(base[key], value) for key, value in change.items()
            if isinstance(value, dict) and isinstance(base.get(key), dict)}  # fmt: skip
    return {**base, **change, **both}


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
