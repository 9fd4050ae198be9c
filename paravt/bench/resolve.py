"""From what rows ask to samples, and what is wrong with them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from paravt.answers import LETTERS, extract_window
from paravt.bench.files import Files
from paravt.bench.loaded import Fault, FaultKind
from paravt.bench.rows import Question
from paravt.errors import VideoError
from paravt.rewards import gold_letter
from paravt.subtitles import read_cues
from paravt.types import Sample


class Resolver:
    """From rows to samples: the gold answers as letters, names as files, ids that are unique."""

    def __init__(self, bench: str, files: Files, folder: Path, subtitles: bool) -> None:
        """`folder` is where missing videos would be; `subtitles`: whether questions are asked with them."""
        self.bench, self.files, self.folder, self.subtitles = bench, files, folder, subtitles
        self.samples: dict[str, Sample] = {}
        self.faults: list[Fault] = []
        self.videos: dict[str, str] = {}
        self.heard: dict[tuple[str, float], str | None] = {}

    def fault(self, kind: FaultKind, where: str, message: str) -> None:
        self.faults.append(Fault(kind, where, message))

    def find_videos(self, names: Sequence[str]) -> None:
        """The paths of all videos. One that is missing would be beside those that were published with it, or, if all
        of these are missing, where the published layout has it."""
        found = {name: self.files.find(name, video=True) for name in dict.fromkeys(names)}
        beside = {str(PurePosixPath(name).parent): path.parent for name, (path, _) in found.items() if path is not None}
        for name, (path, reason) in found.items():
            inside = PurePosixPath(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))
            folder = beside.get(str(PurePosixPath(name).parent), self.folder / inside.parent)
            self.videos[name] = str(path or folder / inside.name)
            if path is None:
                self.fault("video", self.videos[name], reason)

    def add(self, question: Question) -> None:
        """One question, the videos of all having been looked for."""
        id = self.unique(f"{self.bench}/{question.id}")
        metadata = {"bench": self.bench, **question.metadata}
        if self.subtitles and question.subtitles is not None:
            path = self.find_subtitles(question.subtitles, question.subtitles_offset)
            if path is not None:
                metadata |= {"subtitles": path, "subtitles_offset": question.subtitles_offset}
        sample = Sample(
            id=id,
            video=self.videos[question.video],
            question=question.text,
            options=question.options,
            answer=question.gold,
            type=question.type,
            metadata=metadata,
        )
        self.samples[id], faults = check_gold(sample, question.gold_may_be_text)
        self.faults += faults

    def unique(self, id: str) -> str:
        found, count = id, 1
        while found in self.samples:
            count += 1
            found = f"{id}#{count}"
        if found != id:
            self.fault("duplicate", found, f"the id {id!r} occurs before")
        return found

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


def check_gold(sample: Sample, may_be_text: bool = True) -> tuple[Sample, list[Fault]]:
    """The sample with its answer as it is scored (a letter), or without one and with a fault if it is none of the
    options, or no window. What the data say is never replaced by a guess.

    `may_be_text`: the answer can be the text of an option, so that one that is a letter and the text of another option
    is ambiguous."""
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
        named = [letter for letter, option in zip(LETTERS, plain, strict=False) if option == gold.casefold()]
        if may_be_text and good is not None and named and named != [good]:
            good, why = None, f"is a letter, and the text of option {' and '.join(named)}"
    if good is not None:
        return replace(sample, answer=good), faults
    metadata = {**sample.metadata, "gold_missing": gold}
    faults.append(Fault("gold", sample.id, f"the answer {gold[:60]!r} {why}"))
    return replace(sample, answer=None, metadata=metadata), faults
