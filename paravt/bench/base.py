"""A benchmark, what loading one gives, and what may be wrong with it: values, so that a report can show them.

Nothing here decodes a video or asks a model: everything that can be found out before the first request is a `Fault`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paravt.answers import extract_window
from paravt.bench.files import Files, download_tables, find_tables
from paravt.bench.rows import BadRow, Item, Question, read_items
from paravt.data.skips import RowError
from paravt.errors import DataError, VideoError
from paravt.rewards import gold_letter
from paravt.subtitles import read_cues
from paravt.types import Sample

Metric = Literal["choice", "temporal"]
"""choice: accuracy of option letters (rows with free answers are counted apart); temporal: mIoU and R@IoU."""

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


@dataclass(frozen=True)
class Benchmark:
    """One split of one benchmark."""

    name: str
    """As on the command line."""
    title: str
    """As in tables."""
    hub_id: str
    split: str
    metric: Metric
    rows: int
    """As published."""
    videos: int | None
    """As published; None if that is not known."""
    tables: tuple[str, ...]
    """Patterns of the files with the rows, relative to the directory; the first that matches is read."""
    folder: str
    """Where the published layout has its videos; only to name those that are missing."""
    questions: Callable[[Item], list[Question]] = field(repr=False)
    """What a row asks; raises BadRow."""
    breakdown: tuple[str, ...] = ()
    """Keys of `Sample.metadata`. A value that is a list counts for each of its entries, and None for none."""
    macro: str | None = None
    """The key whose values' accuracies are averaged for the macro accuracy; None: the benchmark has none."""
    subtitles: bool = False
    """Whether the questions are asked with subtitles."""

    def load(
        self, source: str | Path | None = None, videos: str | Path | None = None, revision: str | None = None
    ) -> Loaded:
        """Read the benchmark from `source`, a directory in the published layout, or from the hub (None).

        `videos`: where the videos (and subtitles) are, if not below the source; nothing but tables is downloaded.
        `revision`: of the data set on the hub. Raises DataError if there are no rows to read, or the hub can't be
        asked; what is wrong with single rows or videos is in `Loaded.faults`.
        """
        if source is None:
            root, commit = download_tables(self.hub_id, revision, self.tables)
            name = f"{self.hub_id}@{commit}"
        else:
            root, name = Path(source), str(source)
        if videos is not None and not Path(videos).is_dir():
            raise DataError(f"{videos}: no such directory")
        tables = find_tables(root, self.tables)
        roots = [Path(videos)] if videos is not None else []
        resolver = _Resolver(self, roots[0] if roots else root, Files([*roots, root]))
        for table in tables:
            for item in read_items(table):
                resolver.add(table, item)
        return resolver.loaded(name)


class _Resolver:
    """From rows to samples: the gold answers as letters, names as files, ids that are unique."""

    def __init__(self, benchmark: Benchmark, root: Path, files: Files) -> None:
        self.benchmark, self.root, self.files = benchmark, root, files
        self.samples: dict[str, Sample] = {}
        self.faults: list[Fault] = []
        self.paths: dict[str, str] = {}
        self.heard: dict[tuple[str, float], str | None] = {}
        self.rows = 0

    def add(self, table: Path, item: Item | RowError) -> None:
        before = self.rows
        try:
            if isinstance(item, RowError):
                raise BadRow(str(item))
            asked = self.benchmark.questions(item)
        except BadRow as error:
            self.rows += 1
            where = f"row {item.number}" if isinstance(item, Item) else f"after row {before - 1}"
            self.fault("row", f"{table}: {where}", str(error))
            return
        for question in asked:
            self.rows += 1
            sample = self.resolve(question)
            self.samples[sample.id] = sample

    def fault(self, kind: FaultKind, where: str, message: str) -> None:
        self.faults.append(Fault(kind, where, message))

    def resolve(self, question: Question) -> Sample:
        id = self.unique(f"{self.benchmark.name}/{question.id}")
        metadata = {"bench": self.benchmark.name, **question.metadata}
        if self.benchmark.subtitles and question.subtitles is not None:
            path = self.find_subtitles(question.subtitles, question.subtitles_offset)
            if path is not None:
                metadata |= {"subtitles": path, "subtitles_offset": question.subtitles_offset}
        sample = Sample(id, self.find_video(question.video), question.text, question.options, question.gold,
                        question.type, metadata)  # fmt: skip
        checked, faults = check_gold(sample)
        self.faults += faults
        return checked

    def unique(self, id: str) -> str:
        found, count = id, 1
        while found in self.samples:
            count += 1
            found = f"{id}#{count}"
        if found != id:
            self.fault("duplicate", found, f"the id {id!r} occurs before")
        return found

    def find_video(self, name: str) -> str:
        """The path of a video; the published one if it isn't there, and a fault, once."""
        if name not in self.paths:
            path, reason = self.files.find(name, video=True)
            self.paths[name] = str(path or self.root / self.benchmark.folder / name)
            if path is None:
                self.fault("video", self.paths[name], reason)
        return self.paths[name]

    def find_subtitles(self, name: str, offset: float) -> str | None:
        """The path of subtitles that can be read; None and a fault, once, if there are none."""
        if (name, offset) not in self.heard:
            path, reason = self.files.find(name)
            try:
                if path is not None:
                    read_cues(str(path), offset)
            except VideoError as error:
                path, reason = None, error.reason
            if path is None:
                self.fault("subtitles", name, reason)
            self.heard[name, offset] = None if path is None else str(path)
        return self.heard[name, offset]

    def loaded(self, source: str) -> Loaded:
        if not self.samples:
            first = f"; the first: {self.faults[0].where}: {self.faults[0].message}" if self.faults else ""
            raise DataError(f"{source}: none of {self.rows} rows of {self.benchmark.title} can be used{first}")
        published = self.benchmark
        for have, want, what in (
            (self.rows, published.rows, "rows"),
            (len(self.paths), published.videos, "videos"),
        ):
            if want is not None and have != want:
                self.faults.insert(0, Fault("size", source, f"{have} {what} where {want} were published"))
        return Loaded(published.name, source, tuple(self.samples.values()), tuple(self.faults))


def check_gold(sample: Sample) -> tuple[Sample, list[Fault]]:
    """The sample with its answer as it is scored (a letter), or without one and with a fault if it is none of the
    options, or no window. What the data say is never replaced by a guess."""
    if sample.answer is None or sample.type == "open":
        return sample, []
    faults: list[Fault] = []
    gold = sample.answer.strip()
    if sample.type == "temporal":
        good, why = gold if extract_window(gold) is not None else None, "is no window of time"
    else:
        plain = [" ".join(option.casefold().split()) for option in sample.options]
        twice = sorted({option for option in plain if plain.count(option) > 1})
        if twice:
            faults.append(Fault("options", sample.id, f"several options are {twice[0][:60]!r}"))
        good, why = gold_letter(gold, sample.options), "is not exactly one of the options"
        named = [letter for letter, option in zip("ABCDEFGHIJ", plain, strict=False) if option == gold.casefold()]
        if good is not None and named and named != [good]:
            good, why = None, f"is a letter, and the text of option {' and '.join(named)}"
    if good is not None:
        return replace(sample, answer=good), faults
    metadata = {**sample.metadata, "gold_missing": gold}
    faults.append(Fault("gold", sample.id, f"the answer {gold[:60]!r} {why}"))
    return replace(sample, answer=None, metadata=metadata), faults
