"""From what rows ask to samples, and what is wrong with them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paravt.answers import extract_window
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

    def add(self, questions: Sequence[Question]) -> None:
        for question in questions:
            sample = self.resolve(question)
            self.samples[sample.id] = sample

    def fault(self, kind: FaultKind, where: str, message: str) -> None:
        self.faults.append(Fault(kind, where, message))

    def resolve(self, question: Question) -> Sample:
        id = self.unique(f"{self.bench}/{question.id}")
        metadata = {"bench": self.bench, **question.metadata}
        if self.subtitles and question.subtitles is not None:
            path = self.find_subtitles(question.subtitles, question.subtitles_offset)
            if path is not None:
                metadata |= {"subtitles": path, "subtitles_offset": question.subtitles_offset}
        sample = Sample(id, self.find_video(question.video), question.text, question.options, question.gold,
                        question.type, metadata)  # fmt: skip
        checked, faults = check_gold(sample, question.gold_may_be_text)
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
        if name not in self.videos:
            path, reason = self.files.find(name, video=True)
            self.videos[name] = str(path or self.folder / name)
            if path is None:
                self.fault("video", self.videos[name], reason)
        return self.videos[name]

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
        named = [letter for letter, option in zip("ABCDEFGHIJ", plain, strict=False) if option == gold.casefold()]
        if may_be_text and good is not None and named and named != [good]:
            good, why = None, f"is a letter, and the text of option {' and '.join(named)}"
    if good is not None:
        return replace(sample, answer=good), faults
    metadata = {**sample.metadata, "gold_missing": gold}
    faults.append(Fault("gold", sample.id, f"the answer {gold[:60]!r} {why}"))
    return replace(sample, answer=None, metadata=metadata), faults
