"""A user's own questions (`--data my.jsonl`) as what a benchmark gives, with the same checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paravt.bench.files import file_problem
from paravt.bench.loaded import Fault, Loaded
from paravt.bench.resolve import check_gold
from paravt.data import read_samples
from paravt.errors import DataError, VideoError
from paravt.subtitles import read_cues
from paravt.types import Sample


def load_own(path: str | Path) -> Loaded:
    """Read a file of samples (see `paravt.data.read_samples`); `Loaded.name` is the file's name without suffix.

    A sample may have `subtitles`, a file beside its video (.srt), relative to the file of samples. Raises DataError
    for a line that is no sample.
    """
    path = Path(path)
    faults: list[Fault] = []
    samples: list[Sample] = []
    seen: set[str] = set()
    for read in read_samples(path):
        sample, problems = _with_subtitles(read, path)
        sample, wrong = check_gold(sample)
        faults += problems + wrong
        samples.append(replace(sample, metadata={**sample.metadata, "bench": path.stem}))
        if sample.video not in seen:
            seen.add(sample.video)
            problem = file_problem(Path(sample.video))
            if problem:
                faults.append(Fault("video", sample.video, problem))
    return Loaded(path.stem, str(path), tuple(samples), tuple(faults), title=path.stem)


def _with_subtitles(sample: Sample, path: Path) -> tuple[Sample, list[Fault]]:
    """The sample with the path of its subtitles, or without them and a fault."""
    metadata = dict(sample.metadata)
    name, offset = metadata.pop("subtitles", None), metadata.get("subtitles_offset", 0)
    if name is None:
        return sample, []
    if not isinstance(name, str) or isinstance(offset, bool) or not isinstance(offset, (int, float)):
        raise DataError(f"{path}: sample {sample.id}: `subtitles` must be a path, and `subtitles_offset` seconds")
    file = str(path.parent / name)
    try:
        read_cues(file, float(offset))
    except VideoError as error:
        return replace(sample, metadata=metadata), [Fault("subtitles", sample.id, str(error))]
    return replace(sample, metadata={**metadata, "subtitles": file}), []
