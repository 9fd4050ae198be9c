"""The lab's task as a benchmark: questions that no training has seen, about videos that need no files."""

from __future__ import annotations

from dataclasses import replace

from paravt.bench.loaded import Loaded
from paravt.lab.evaluate import lab_questions

_SEED = 0


def load_lab(count: int) -> Loaded:
    """The first `count` questions, each about a video of its own: always the same ones."""
    samples = lab_questions(_SEED, count)
    named = (replace(sample, metadata={**sample.metadata, "bench": "lab"}) for sample in samples)
    return Loaded("lab", f"generated, seed {_SEED}", tuple(named))
