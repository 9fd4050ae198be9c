"""docs/lab.md and README.md say what the summary of the run says."""

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


def test_the_pages_have_every_table_and_each_is_that_of_the_summary(maker: ModuleType, summary: Any) -> None:
    pages = [page.read_text() for page in maker.PAGES]
    assert all(f"<!-- {name} -->" in "".join(pages) for name in maker.TABLES)
    for page in pages:
        assert maker.written(page, summary) == page  # if not: python docs/make_lab.py


def test_another_number_is_another_page(maker: ModuleType, summary: Any) -> None:
    changed = json.loads(json.dumps(summary))
    changed["rows"]["full"]["means"]["f_strict"]["mean"] += 0.01
    for page in maker.PAGES:
        assert maker.written(page.read_text(), changed) != page.read_text()


def test_means_are_those_of_the_seeds(summary: Any) -> None:
    for row in summary["rows"].values():
        for column, found in row["means"].items():
            values = [numbers[column] for numbers in row["by_seed"].values() if column in numbers]
            assert found["seeds"] == len(values)
            assert found["mean"] == pytest.approx(sum(values) / len(values))
