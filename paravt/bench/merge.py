"""The shards of a run as one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paravt.bench.loaded import Fault, Loaded
from paravt.bench.results import Run, read_run, recipe_text, write_benches
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.provenance import claim_run

_APPENDED = ("grades.jsonl", "rows.jsonl")
"""Rows come last: where they are, everything is."""
_SHARDS = "shards"
"""Where the fault is that one is missing."""


def merge_runs(paths: Sequence[str | Path], out: Path) -> Run:
    """Write the rows of several runs of one configuration as one run, to a directory without one.

    Questions that several of them have are there once. That a shard is missing is a fault of kind "size". Raises
    DataError if the runs differ in their configuration or in a question, RecipeError if `out` is in use or has another
    run, OSError if it cannot be written to.
    """
    runs = [read_run(path) for path in paths]
    first = runs[0]
    for run in runs[1:]:
        if run.config != first.config:
            raise DataError(f"{run.path}: of another configuration than {first.path}; runs are merged if they have one")
    benches: dict[str, Loaded] = {}
    for run in runs:
        for bench in run.benches.values():
            known = benches.setdefault(bench.name, bench)
            samples = {sample.id: sample for sample in known.samples}
            for sample in bench.samples:
                if samples.setdefault(sample.id, sample) != sample:
                    raise DataError(f"{run.path}: the question {sample.id} of {bench.name} is not that of other parts")
            faults = tuple(dict.fromkeys((*known.faults, *bench.faults)))
            whole = max(known.whole or 0, bench.whole or 0) or None
            benches[bench.name] = replace(known, samples=tuple(samples.values()), faults=faults, whole=whole)
    with claim_run(out, recipe_text(first.recipe)):
        if (out / "rows.jsonl").exists():
            raise DataError(f"{out}: has rows already; merge into a new directory")
        write_benches(out, map(_whole, benches.values()))
        for name in _APPENDED:
            texts = [_whole_lines(run.path / name) for run in runs]
            if any(texts) or name == "rows.jsonl":
                write_whole(out / name, "".join(texts))
    return read_run(out)


def _whole(bench: Loaded) -> Loaded:
    """A benchmark with a fault if it has fewer questions than all of its shards."""
    faults = tuple(fault for fault in bench.faults if fault.where != _SHARDS)
    if bench.whole is not None and len(bench.samples) < bench.whole:
        missing = Fault("size", _SHARDS, f"{len(bench.samples)} of {bench.whole} questions: a shard is missing")
        faults = (missing, *faults)
    return replace(bench, faults=faults)


def missing_shards(run: Run) -> list[str]:
    """What a merged run says about shards that it lacks, a line for each benchmark."""
    return [
        f"{bench.name}: {fault.message}"
        for bench in run.benches.values()
        for fault in bench.faults
        if fault.where == _SHARDS
    ]


def _whole_lines(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1]
