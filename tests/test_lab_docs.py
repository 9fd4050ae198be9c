"""docs/lab.md says what the summary of the run says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_lab", DOCS / "make_lab.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def summary() -> Any:
    return json.loads((DOCS / "lab" / "summary.json").read_text())


def test_the_page_has_every_table_and_each_is_that_of_the_summary(maker: ModuleType, summary: Any) -> None:
    page = (DOCS / "lab.md").read_text()
    assert all(f"<!-- {name} -->" in page for name in maker.TABLES)
    assert maker.written(page, summary) == page  # if not: python docs/make_lab.py


def test_another_number_is_another_page(maker: ModuleType, summary: Any) -> None:
    page = (DOCS / "lab.md").read_text()
    changed = json.loads(json.dumps(summary))
    changed["rows"]["full"]["means"]["f_strict"]["mean"] += 0.01
    assert maker.written(page, changed) != page


def test_means_are_those_of_the_seeds(summary: Any) -> None:
    for row in summary["rows"].values():
        for column, found in row["means"].items():
            values = [numbers[column] for numbers in row["by_seed"].values() if column in numbers]
            assert found["seeds"] == len(values)
            assert found["mean"] == pytest.approx(sum(values) / len(values))
