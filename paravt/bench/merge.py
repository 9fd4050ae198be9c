"""The shards of a run as one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paravt.bench.results import Bench, Key, Run, read_benches, read_run, recipe_text, sample_rows, write_about
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.provenance import claim_run

_APPENDED = ("rows.jsonl", "grades.jsonl")


def merge_runs(paths: Sequence[str | Path], out: Path) -> Run:
    """Write the rows of several runs of one configuration as one run, to a directory without one.

    Questions that several of them have are there once. Raises DataError if the runs differ in their configuration or
    in a question, RecipeError if `out` is in use or has another run, OSError if it cannot be written to.
    """
    runs = [read_run(path) for path in paths]
    first = runs[0]
    for run in runs[1:]:
        if run.config != first.config:
            raise DataError(f"{run.path}: of another configuration than {first.path}; runs are merged if they have one")
    benches: dict[str, Bench] = {}
    samples: dict[Key, dict[str, Any]] = {}
    for run in runs:
        for bench in read_benches(run.path).values():
            known = benches.get(bench.name, bench)
            benches[bench.name] = replace(known, faults=tuple(dict.fromkeys((*known.faults, *bench.faults))))
        for key, row in sample_rows(run.path):
            if samples.setdefault(key, row) != row:
                raise DataError(f"{run.path}: the question {key[1]} of {key[0]} is another one in {first.path}")
    with claim_run(out, recipe_text(first.recipe)):
        if (out / "rows.jsonl").exists():
            raise DataError(f"{out}: has rows already; merge into a new directory")
        write_about(out, benches.values(), samples.values())
        for name in _APPENDED:
            texts = [_whole_lines(run.path / name) for run in runs]
            if any(texts) or name == "rows.jsonl":
                write_whole(out / name, "".join(texts))
    return read_run(out)


def _whole_lines(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1]
