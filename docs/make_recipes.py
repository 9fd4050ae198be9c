"""Write docs/recipes.md from the recipes' own types and docstrings: `python docs/make_recipes.py`.

What a setting means stands at its definition and nowhere else; here are only the paper's values.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from paravt.config import EpisodeRecipe, RLRecipe, SFTRecipe
from paravt.episode_config import EpisodeConfig

TARGET = Path(__file__).parent / "recipes.md"

SAME_AS: dict[type, type] = {EpisodeRecipe: EpisodeConfig}
"""Sections whose settings are described at those of the same name in another class."""

# What the authors ran (their public configuration), by recipe and setting.
PAPER = {
    "sft": {
        "model.path": "Qwen3-VL-8B-Instruct",
        "model.dtype": "bfloat16",
        "weight_decay": "0.01",
        "checkpoint_every": "100",
        "stages.steps": "1500",
        "stages.batch_size": "32 (4 on each of 8 GPUs)",
        "stages.learning_rate": "2e-5",
        "stages.warmup_steps": "75 (0.05 of the steps)",
    },
    "rl": {
        "model.dtype": "bfloat16",
        "seed": "1",
        "rollout.prompts": "7",
        "rollout.group_size": "8",
        "rollout.temperature": "0.7",
        "rollout.max_concurrent": "64",
        "episode.frame_budget": "64",
        "episode.max_turns": "4 (3 with calls)",
        "episode.max_tokens": "2048",
        "episode.max_context_tokens": "32768",
        "episode.think_prefix": "true",
        "gating": "true",
        "reward.format_weight": "1.0",
        "reward.answer_suffix": "true",
        "reward.anchor_weight": "0.5",
        "std": "true",
        "loss.clip_low": "0.2",
        "loss.clip_high": "0.2",
        "loss.importance_cap": "5.0",
        "loss.kl_coef": "0.01 (k1, in the reward)",
        "optimizer.learning_rate": "2e-6",
        "optimizer.schedule": "constant",
        "optimizer.betas": "[0.9, 0.999]",
        "optimizer.eps": "1e-8",
        "optimizer.weight_decay": "0.01",
        "optimizer.clip_grad_norm": "1.0",
        "token_budget": "16384",
        "checkpoint_every": "5",
    },
}

INTRO = """\
<!-- Written by `python docs/make_recipes.py`; change the docstrings of the settings, not this file. -->
# Recipes

Every setting of a recipe. On the command line any of them is changed by `--set dotted.name=value` (items of lists by
their number: `stages.0.steps=10`); in a file, `base: other.yaml` takes over everything that is not changed. Times are
in seconds. The last column is what the paper's authors ran, where their configuration says it; recipes that follow
them are in [recipes/](../recipes).
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    """Dotted, from the recipe's top."""
    type: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    meaning: str
    settings: tuple[Setting, ...]


def sections(kind: type, path: str = "", title: str = "") -> Iterator[Section]:
    """The section of a configuration class, and those within it."""
    meanings = attribute_docs(kind)
    inner: list[tuple[str, type, str]] = []
    settings = []
    for name, (annotation, default) in class_fields(kind).items():
        dotted = f"{path}.{name}" if path else name
        found = list(section_types(annotation))
        for type_ in found:
            tag = kind_tag(type_) if len(found) > 1 else ""
            inner.append((dotted, type_, f"`{dotted}`" + (f" of kind `{tag}`" if tag else "")))
        meaning = meanings.get(name, "")
        if not meaning and found:
            meaning = "A section, below."
        if not meaning and name == "kind":
            meaning = "Which of the sections of this name it is."
        settings.append(Setting(dotted, type_text(annotation), default_text(default), meaning))
    yield Section(title, first_paragraph(kind), tuple(settings))
    for dotted, type_, heading in inner:
        yield from sections(type_, dotted, heading)


def class_fields(kind: type) -> dict[str, tuple[Any, Any]]:
    """By name: the annotation with its bounds, and the default (PydanticUndefined where there is none)."""
    hints = get_type_hints(kind, include_extras=True)
    if issubclass(kind, BaseModel):
        return {name: (hints[name], field.get_default(call_default_factory=True))
                for name, field in kind.model_fields.items()}  # fmt: skip
    out = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        out[field.name] = (hints[field.name], PydanticUndefined if default is dataclasses.MISSING else default)
    return out


def attribute_docs(kind: type) -> dict[str, str]:
    """The strings under the fields of a class and of the classes that it comes from."""
    docs: dict[str, str] = attribute_docs(SAME_AS[kind]) if kind in SAME_AS else {}
    for cls in reversed(kind.__mro__):
        if not (dataclasses.is_dataclass(cls) or (issubclass(cls, BaseModel) and cls is not BaseModel)):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(inspect.cleandoc(str(text.value.value)).split())
    return docs


def first_paragraph(kind: type) -> str:
    own = kind.__dict__.get("__doc__") or ""
    if own.startswith(f"{kind.__name__}("):  # a dataclass writes its signature where there is no docstring
        return ""
    return " ".join(inspect.cleandoc(own).partition("\n\n")[0].split())


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel))


def section_types(annotation: Any) -> Iterator[type]:
    if is_section(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from section_types(inner)


def kind_tag(kind: type) -> str:
    annotation = class_fields(kind).get("kind", (None, None))[0]
    return str(get_args(annotation)[0]) if get_origin(annotation) is Literal else ""


def type_text(annotation: Any) -> str:
    """As a user of YAML says it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [text for item in inner[1:] for text in bound_texts(item)]
        return " ".join([type_text(inner[0]), *bounds])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(item) for item in inner))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return f"list of {type_text(inner[0])}"
        return f"{len(inner)} x {type_text(inner[0])}"
    if origin in (dict, Mapping):
        return f"{type_text(inner[1])} for each of {type_text(inner[0])}"
    if is_section(annotation):
        return "section"
    names = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null"}
    return names.get(annotation) or str(getattr(annotation, "__name__", annotation))


def bound_texts(item: Any) -> Iterator[str]:
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if (value := getattr(item, name, None)) is not None:
            yield f"{sign} {value}"
    for part in getattr(item, "metadata", ()):  # of pydantic's Field(...)
        yield from bound_texts(part)


def default_text(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if is_section(type(default)):
        return "as below"
    return f"`{json.dumps(default)}`"


def recipe_sections() -> dict[str, list[Section]]:
    return {"sft": list(sections(SFTRecipe)), "rl": list(sections(RLRecipe))}


def render() -> str:
    titles = {"sft": "Supervised training: `paravt sft`", "rl": "Reinforcement learning: `paravt rl`"}
    lines = [INTRO]
    for recipe, found in recipe_sections().items():
        lines += [f"## {titles[recipe]}", ""]
        for section in found:
            if section.title:
                lines += [f"### {section.title}", ""]
            if section.meaning:
                lines += [section.meaning, ""]
            lines += ["| setting | type | default | meaning | paper |", "|---|---|---|---|---|"]
            for setting in section.settings:
                paper = PAPER[recipe].get(setting.name, "")
                cells = (f"`{setting.name}`", setting.type, setting.default, setting.meaning, paper)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{TARGET}\n")
