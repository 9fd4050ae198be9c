"""What a suite is made of: one data file names models, rows and measurements, and says beforehand what is expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paravt.config import LabMixture, Positive, SFTRecipe, Strict, load_recipe
from paravt.errors import RecipeError
from paravt.lab.evaluation_recipe import Evaluation

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class ModelRecipe(Strict):
    """A model made by supervised training on the lab's traces."""

    recipe: str
    """A file, relative to the suite's."""
    start: Name | None = None
    """The model that its first stage starts from; None: what the recipe says."""
    set: tuple[str, ...] = ()


class Published(Strict):
    """What the paper reports for a row, at 8 B parameters and on its own benchmarks."""

    f: float | None = None
    kappa: float | None = None
    videomme: float | None = None
    lvbench: float | None = None
    mlvu: float | None = None


class RowRecipe(Strict):
    """A line of the tables: a model as it is, or a run of reinforcement learning; and how it is evaluated.

    Rows that train the same way share the run.
    """

    section: Name = "main"
    title: str = ""
    """In the report; "": its name."""
    model: Name | None = None
    recipe: str | None = None
    start: Name | None = None
    """The model that the run starts from; None: the suite's `start`."""
    set: tuple[str, ...] = ()
    seeds: Positive | None = None
    """At most so many, whatever the suite's number is."""
    evaluation: dict[str, object] = Field(default_factory=dict)
    """Changes to the suite's evaluation."""
    published: Published | None = None

    @model_validator(mode="after")
    def _one_of(self) -> RowRecipe:
        if (self.model is None) == (self.recipe is None):
            raise ValueError("give `model` (no training) or `recipe` (reinforcement learning), not both")
        if self.model is not None and (self.start is not None or self.set):
            raise ValueError("`start` and `set` are for rows with a `recipe`")
        return self


class Criterion(Strict):
    """Something declared before the runs: a column of a row within bounds, or above another row's or column."""

    name: str
    column: str
    at_least: float | None = None
    at_most: float | None = None
    above: Name | None = None
    """Another row, whose 95 % interval must not overlap."""
    than: str | None = None
    """Another column of the same row, which this one must be `by` or more above."""
    by: float = 0.0

    @model_validator(mode="after")
    def _says_something(self) -> Criterion:
        if self.at_least is None and self.at_most is None and self.above is None and self.than is None:
            raise ValueError("give at_least, at_most, above or than")
        return self


class Target(Criterion):
    row: Name


class Dose(Strict):
    """One amount of supervised training: its own row, and the row of plain reinforcement learning from it."""

    start: Name
    vanilla: Name


class Contrast(Strict):
    """The same recipe with both tool priors."""

    strong: Name
    weak: Name


class Mode(Strict):
    """A size of the suite."""

    seeds: Positive
    rows: tuple[Name, ...] | None = None
    """None: all."""
    set: tuple[str, ...] = ()
    """Changes to every recipe of reinforcement learning."""
    evaluation: dict[str, object] = Field(default_factory=dict)


class Section(Strict):
    title: str
    also: tuple[Name, ...] = ()
    """Rows of other sections, shown for comparison."""


class SuiteRecipe(Strict):
    models: dict[Name, ModelRecipe]
    start: Name
    """The model that rows start from."""
    reference: str
    """The recipe whose `episode` models without reinforcement learning are evaluated with."""
    evaluation: Evaluation = Evaluation()
    sections: dict[Name, Section]
    """Of the report, in order."""
    rows: dict[Name, RowRecipe]
    doses: dict[str, Dose] = Field(default_factory=dict)
    contrasts: dict[str, Contrast] = Field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    """Of a start from which plain reinforcement learning is expected to collapse; every dose is held against them."""
    targets: tuple[Target, ...] = ()
    """What is hoped for."""
    samples: tuple[Name, ...] = ()
    """Rows whose episodes are shown side by side."""
    modes: dict[Literal["quick", "standard", "full"], Mode]

    @model_validator(mode="after")
    def _names_exist(self) -> SuiteRecipe:
        def check(names: Iterable[str | None], known: Container[str], where: str) -> None:
            for name in names:
                if name is not None and name not in known:
                    raise ValueError(f"{where}: there is no {name!r}")

        check([self.start, *(row.model for row in self.rows.values()), *(row.start for row in self.rows.values()),
               *(model.start for model in self.models.values())], self.models, "models")  # fmt: skip
        check([row.section for row in self.rows.values()], self.sections, "sections")
        named = [name for dose in self.doses.values() for name in (dose.start, dose.vanilla)]
        named += [name for pair in self.contrasts.values() for name in (pair.strong, pair.weak)]
        named += [target.row for target in self.targets]
        named += [one.above for one in (*self.targets, *self.criteria) if one.above is not None]
        named += [name for section in self.sections.values() for name in section.also]
        named += [*self.samples, *(name for mode in self.modes.values() for name in mode.rows or ())]
        check(named, self.rows, "rows")
        titles = Counter(row.title or name for name, row in self.rows.items())
        twice = [title for title, count in titles.items() if count > 1]
        if twice:
            raise ValueError(f"rows: two have the title {twice[0]!r}")
        for name in self.models:
            self._starts(name)
        return self

    def _starts(self, name: str) -> None:
        seen: list[str] = []
        at: str | None = name
        while at is not None:
            if at in seen:
                raise ValueError(f"models: {name!r} starts from itself")
            seen.append(at)
            at = self.models[at].start


def load_model_recipe(made: ModelRecipe, suite: Path, changes: Sequence[str]) -> SFTRecipe:
    """How a model of the suite in a file is made. Raises RecipeError, for stages on files too: a stage of a suite is
    named by its recipe and its code, and neither says what is in the files."""
    path = suite.parent / made.recipe
    recipe = load_recipe(SFTRecipe, path, changes)
    for stage in recipe.stages:
        if not isinstance(stage.data, LabMixture):
            raise RecipeError(
                f"{path}: stage {stage.name!r} is on files; models of a suite learn from the lab's traces"
            )
    return recipe


def recipes_directory() -> Path:
    """Where the recipes are: inside an installed package, beside it in a checkout. Raises RecipeError."""
    package = Path(__file__).parents[1]
    for directory in (package / "recipes", package.parent / "recipes"):
        if (directory / "lab" / "suite.yaml").is_file():
            return directory
    raise RecipeError(f"{package / 'recipes'}: the recipes are not there; give --suite FILE")


def load_suite(path: Path | None = None) -> tuple[SuiteRecipe, Path]:
    """The suite in a file (default: the one of the package), and the file. Raises RecipeError."""
    path = path or recipes_directory() / "lab" / "suite.yaml"
    return load_recipe(SuiteRecipe, path), path
