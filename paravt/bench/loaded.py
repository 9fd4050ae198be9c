"""What loading a benchmark gives, and what may be wrong with it: values, so that a report can show them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
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
    samples: tuple[Sample, ...] = ()
    """In the order of the file, ids unique; a sample whose video is missing is among them. `metadata` has "bench" (this
    `name`), the keys that `Benchmark.breakdown` lists, "gold_missing" (what the row gives, where `answer` is None for
    a fault "gold"), and "subtitles" where there are some (see `paravt.subtitles`)."""
    faults: tuple[Fault, ...] = ()
    title: str = ""
    """As in tables."""
    breakdown: tuple[str, ...] | None = None
    """Keys of metadata that scores are broken down by; None: all that sort the samples into a few kinds."""
    macro: str | None = None
    """The key whose values' accuracies are averaged for the macro accuracy; None: there is none."""
    whole: int | None = None
    """How many questions all shards have together."""

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

    def part(self, shard: Shard | None = None, limit: int | None = None) -> Loaded:
        """Of the first `limit` questions those of a shard, and what is wrong with these."""
        part, samples = shard or Shard(), self.samples[:limit]
        places = {video: place for place, video in enumerate(dict.fromkeys(sample.video for sample in samples))}
        mine = tuple(sample for sample in samples if places[sample.video] % part.of == part.number - 1)
        videos = {sample.video for sample in mine}
        faults = tuple(fault for fault in self.faults if fault.kind != "video" or fault.where in videos)
        return replace(self, samples=mine, faults=faults, whole=len(samples))

    def missing_folders(self) -> list[MissingFolder]:
        """Folders in which something is missing."""
        missing = self.missing
        paths = dict.fromkeys(sample.video for sample in self.samples)
        there = Counter(str(Path(path).parent) for path in paths)
        gone = Counter(str(Path(path).parent) for path in paths if path in missing)
        questions = Counter(str(Path(sample.video).parent) for sample in self.samples if sample.video in missing)
        return [MissingFolder(folder, there[folder], gone[folder], questions[folder]) for folder in sorted(gone)]


@dataclass(frozen=True)
class Shard:
    """Part `number` of `of`, counted from 1. Questions about one video are in one part."""

    number: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ValueError(f"shard {self.number}/{self.of}: the first is 1/{self.of}, the last {self.of}/{self.of}")


@dataclass(frozen=True)
class MissingFolder:
    """A folder of a benchmark with missing videos."""

    folder: str
    videos: int
    missing: int
    questions: int
    """That cannot be asked."""
