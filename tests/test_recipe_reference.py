"""docs/recipes.md says what the recipes' own types and docstrings say."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

DOCS = Path(__file__).parents[1] / "docs"


@dataclasses.dataclass(frozen=True)
class Inner:
    on: bool = True
    """Is it on?"""
    pair: tuple[float, float] = (0.9, 0.999)


class Outer(BaseModel):
    """Of the whole.

    And more that the reference leaves out.
    """

    number: Annotated[int, Field(gt=0)]
    """How many."""
    choice: Literal["a", "b"] = "a"
    """Two lines
    are one."""
    rate: Annotated[float, Field(ge=0, le=1)] | None = None
    names: tuple[str, ...] = ()
    shares: dict[Literal["x", "y"], float] = {"x": 1.0}
    inner: Inner = Inner()


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_recipes", DOCS / "make_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(reference: ModuleType) -> None:
    written = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert written == reference.render(), "run: python docs/make_recipes.py"


def test_types_bounds_defaults_and_docstrings_are_found(reference: ModuleType) -> None:
    (top, inner) = reference.sections(Outer)
    assert (top.title, top.meaning, inner.title, inner.meaning) == ("", "Of the whole.", "`inner`", "")
    assert [dataclasses.astuple(setting) for setting in (*top.settings, *inner.settings)] == [
        ("number", "integer > 0", "required", "How many."),
        ("choice", "`a`, `b`", '`"a"`', "Two lines are one."),
        ("rate", "number >= 0 <= 1 or null", "`null`", ""),
        ("names", "list of text", "`[]`", ""),
        ("shares", "number for each of `x`, `y`", '`{"x": 1.0}`', ""),
        ("inner", "section", "as below", "A section, below."),
        ("inner.on", "true, false", "`true`", "Is it on?"),
        ("inner.pair", "2 x number", "`[0.9, 0.999]`", ""),
    ]


def test_every_setting_has_a_meaning(reference: ModuleType) -> None:
    settings = [s for sections in reference.recipe_sections().values() for part in sections for s in part.settings]
    assert len(settings) > 100
    assert [setting.name for setting in settings if not setting.meaning] == []


def test_the_papers_values_are_of_settings_that_exist(reference: ModuleType) -> None:
    for recipe, sections in reference.recipe_sections().items():
        names = {setting.name for section in sections for setting in section.settings}
        assert reference.PAPER[recipe].keys() <= names
