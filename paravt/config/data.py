"""What is trained on: the lab's own, questions about videos, and rows of published data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paravt.config.base import EpisodeRecipe, Positive, Strict, Threads

Share = Annotated[float, Field(ge=0)]
Families = dict[Literal["what", "both", "first", "count", "odd", "when"], Share]


class LabMixture(Strict):
    """Traces of the lab's scripted teacher; see `paravt.lab.teacher`."""

    kind: Literal["lab"] = "lab"
    kinds: dict[Literal["parallel", "direct", "sequential", "none", "crop", "look", "conclude"], Share]
    """Shares of the kinds of traces, relative to each other."""
    budgets: tuple[Positive, ...] = (4, 8, 16, 32, 64)
    """K, the frames of an overview, is drawn from these."""
    style: Literal["clean", "plain", "sloppy"] = "clean"
    """How well the teacher keeps the format."""
    families: Families | None = None
    """Shares of the families of questions, relative to each other; unset: the default mix."""
    choice: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of multiple choice among the questions that can have it."""
    crop_frames: tuple[Positive, ...] = (16,)
    """Frames of the windows in traces of kind crop."""
    look_frames: tuple[Annotated[int, Field(ge=1, le=128)], ...] = (4,)
    """Frames in traces of kind look."""
    questions: Positive = 1
    """Of a trace of kind direct, none or conclude, one turn each."""

    @model_validator(mode="after")
    def _something(self) -> LabMixture:
        families = [1.0] if self.families is None else [*self.families.values()]
        if sum(self.kinds.values()) <= 0 or sum(families) <= 0:
            raise ValueError("the shares of `kinds` and of `families` must not all be 0")
        if not (self.budgets and self.crop_frames and self.look_frames):
            raise ValueError("none of the lists must be empty")
        return self


class LabQuestions(Strict):
    """Questions about generated videos, read from memory."""

    kind: Literal["lab"] = "lab"
    videos: Positive = 20_000
    """Different ones; each has one question."""
    families: Families | None = None
    """Shares of the families of questions, relative to each other; unset: the default mix."""
    choice: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of multiple choice among the questions that can have it."""


class DifficultyFilter(Strict):
    """Leaves out questions that teach nothing: those that the policy solves at no K, and those that it solves at every
    K and every time. Questions that were not measured stay."""

    file: str
    """Pass rates, written by `paravt data difficulty`."""
    above: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Some K must have a pass rate above this."""
    below: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Some K must have a pass rate below this."""


class QuestionFile(Strict):
    """A JSONL file of samples; see `paravt.data.read_samples`."""

    kind: Literal["jsonl"]
    path: str
    """The file."""
    difficulty: DifficultyFilter | None = None
    """Which of the questions are left out as too hard or too easy; null: none."""


class QuestionRows(Strict):
    """Rows of published RL data, parquet or JSONL; see `paravt.data.read_question_rows`."""

    kind: Literal["rows"]
    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Read one after the other; `data/*.parquet` is fine."""
    root: str | None = None
    """Where relative paths of videos begin."""
    difficulty: DifficultyFilter | None = None
    """Which of the questions are left out as too hard or too easy; null: none."""


class WeightedFiles(Strict):
    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Read as one."""
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Its share of all rows that are drawn, as a ratio to the other weights."""


class Validation(Strict):
    """Rows that are not trained on; their loss is logged."""

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Read as one, always in the same order."""
    rows: Positive = 64
    """How many of those that can be used, the same every time; all, if there are fewer."""
    every: Positive = 100
    """Steps; and after the last one."""


class SampledEpisodes(Strict):
    """Episodes that the model plays while it is trained: format, calls and accuracy are logged as in `paravt rl`."""

    questions: Annotated[QuestionFile | QuestionRows, Field(discriminator="kind")]
    count: Positive = 16
    """Of questions, from the first one on; an episode each."""
    every: Positive = 100
    """Steps; and after the last one."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    """Of all sampling; 0 is greedy."""
    episode: EpisodeRecipe = EpisodeRecipe()


class MessageFiles(Strict):
    """Rows of published SFT data, parquet or JSONL; see `paravt.data.messages`. `data/*.parquet` is fine."""

    kind: Literal["messages"]
    files: tuple[str, ...] = ()
    """Read as one: every row once in a pass."""
    mixture: tuple[WeightedFiles, ...] = ()
    """Instead of `files`: each draw is from one of these, by weight."""
    root: str | None = None
    """Where relative paths of media begin (`longvt_source/...`)."""
    system: str | None = None
    """The system turn of rows that have none."""
    fps: Annotated[float, Field(gt=0)] = 1.0
    """Frames per second of a video, where its row says nothing else."""
    max_frames: Positive = 64
    """Of one video; where `fps` gives more, they are spread evenly."""
    max_pixels: Annotated[int, Field(ge=1024)] = 50_176
    """Of a frame or an image; the processor's own limit applies too."""
    max_tokens: Positive | None = None
    """Longer rows are skipped; unset: what the model can take."""
    workers: Threads = 2
    """Threads that read and decode."""
    prefetch: Positive = 2
    """Batches that are made ahead; they are in memory with all their frames."""
    validation: Validation | None = None
    episodes: SampledEpisodes | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> MessageFiles:
        if bool(self.files) == bool(self.mixture):
            raise ValueError("give `files` or `mixture`, one of the two")
        return self

    @property
    def sources(self) -> tuple[WeightedFiles, ...]:
        return self.mixture or (WeightedFiles(files=self.files),)
