"""What loading a benchmark gives, and what may be wrong with it: values, so that a report can show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paravt.types import Sample

FaultKind = Literal[
    "size",  # fewer rows or videos than were published: a download that was cut off
    "row",  # a row that cannot be used; it gives no sample
    "gold",  # the right answer is none of the options; the sample has no answer and cannot be scored
    "options",  # two options with the same text; the sample is used as it is
    "duplicate",  # an id that occurs before; the sample has an id of its own
    "subtitles",  # a file of subtitles that is not there or cannot be read; the sample is asked without
    "video",  # a video that is not there; one fault for each video, not for each question
]


@dataclass(frozen=True)
class Fault:
    """Something about the data that the reader of a result has to know."""

    kind: FaultKind
    where: str
    """A sample's id, a file and a row, or a video's path."""
    message: str


@dataclass(frozen=True)
class Loaded:
    """The questions of a benchmark, or of a user's own file."""

    name: str
    """The benchmark's name, or the file's without suffix."""
    source: str
    """Where it was read: a directory, or a hub id and its revision."""
    samples: tuple[Sample, ...]
    """In the order of the file, ids unique; a sample whose video is missing is among them. `metadata` has "bench" (this
    `name`), the keys that `Benchmark.breakdown` lists, "gold_missing" (what the row gives, where `answer` is None for
    a fault "gold"), and "subtitles" where there are some (see `paravt.subtitles`)."""
    faults: tuple[Fault, ...] = ()

    @property
    def missing(self) -> frozenset[str]:
        """Paths (`Sample.video`) of the videos that are not there."""
        return frozenset(fault.where for fault in self.faults if fault.kind == "video")

    @property
    def playable(self) -> tuple[Sample, ...]:
        """The samples whose video is there."""
        missing = self.missing
        return tuple(sample for sample in self.samples if sample.video not in missing)

    def counts(self) -> Counter[FaultKind]:
        return Counter(fault.kind for fault in self.faults)


@dataclass(frozen=True)
class MissingRow:
    """A line of the table of missing videos: one folder of one benchmark."""

    bench: str
    folder: str
    videos: int
    missing: int
    questions: int
    """That cannot be asked."""


@dataclass(frozen=True)
class MissingVideos:
    """What is missing before anything is asked. Empty `rows`: nothing is."""

    rows: tuple[MissingRow, ...]
    """Folders in which something is missing."""
    videos: tuple[tuple[str, str, str], ...]
    """(bench, path, reason) of each missing video."""

    def __bool__(self) -> bool:
        return bool(self.videos)


def missing_videos(loaded: Sequence[Loaded]) -> MissingVideos:
    """The missing videos of several benchmarks, by folder."""
    rows: list[MissingRow] = []
    videos: list[tuple[str, str, str]] = []
    for one in loaded:
        missing = one.missing
        videos += [(one.name, fault.where, fault.message) for fault in one.faults if fault.kind == "video"]
        paths = dict.fromkeys(sample.video for sample in one.samples)
        there = Counter(str(Path(path).parent) for path in paths)
        gone = Counter(str(Path(path).parent) for path in paths if path in missing)
        questions = Counter(str(Path(sample.video).parent) for sample in one.samples if sample.video in missing)
        rows += [
            MissingRow(one.name, folder, there[folder], gone[folder], questions[folder]) for folder in sorted(gone)
        ]
    return MissingVideos(tuple(rows), tuple(videos))
