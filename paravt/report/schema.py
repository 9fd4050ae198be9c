"""The contract between Python and the pages, as the pages' `web/src/schema.ts` has it: JSON values, nothing else.

Times are seconds of the video. All text is data: whoever shows it shows it as text.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict  # those of Python 3.10 cannot be validated

PieceKind = Literal["sampled", "forced", "context"]
RunKind = Literal["rl", "sft", "evaluation", "episodes"]
Cell = str | float | None


class Thumbnail(TypedDict):
    time: float
    picture: str | None
    """A data URI, or in a file `#NAME/KEY`: entry KEY of the pictures NAME. None where the frame could not be had."""
    why: NotRequired[str]


class PieceView(TypedDict):
    text: str
    kind: PieceKind
    images: int
    tokens: int
    spelled: list[str] | None
    logprobs: list[float] | None
    advantages: list[float] | None


class TurnView(TypedDict):
    index: int
    strict: bool
    failure: str | None
    text: str
    pieces: list[PieceView]


class CropView(TypedDict):
    turn: int
    index: int
    status: str
    start: float | None
    end: float | None
    call: str
    report: str | None
    error: str | None
    missing: list[str]
    frames: list[Thumbnail]
    pieces: list[PieceView]
    seconds: float
    sampled_tokens: int


class RewardView(TypedDict):
    value: float | None
    explanation: str


class ErrorView(TypedDict):
    kind: str
    where: str
    message: str
    scored: bool


class EpisodeView(TypedDict):
    id: str
    question: str
    options: list[str]
    truth: str | None
    video: str
    video_url: str | None
    duration: float
    frame_budget: int
    dispatch: str
    answer: str | None
    forced: bool
    end: str
    overview: list[Thumbnail]
    turns: list[TurnView]
    crops: list[CropView]
    rewards: dict[str, RewardView]
    errors: list[ErrorView]
    timings: dict[str, float]
    prompt_tokens: int
    sampled_tokens: int


class EpisodeRow(TypedDict):
    id: str
    chunk: str
    step: int | None
    group: str
    sample: str
    question: str
    frame_budget: int
    dispatch: str
    calls: int
    turns: int
    answer: str | None
    truth: str | None
    rewards: dict[str, float | None]
    advantage: float | None
    failures: list[str]
    end: str
    errors: int
    seconds: float


class TableRow(TypedDict):
    cells: list[Cell]
    link: NotRequired[list[str]]
    """The ids of episodes."""


class Table(TypedDict):
    title: str
    columns: list[str]
    rows: list[TableRow]


class Metrics(TypedDict):
    step: list[int]
    values: dict[str, list[float | None]]


class Run(TypedDict):
    id: str
    name: str
    group: str
    kind: RunKind
    seed: int | None
    made: dict[str, str]
    recipe: str | None
    warnings: list[str]
    metrics: Metrics | None
    tables: list[Table]
    episodes: list[EpisodeRow]


class Report(TypedDict):
    format: Literal[1]
    title: str
    notes: list[str]
    runs: list[Run]
    live: bool


Chunk = dict[str, EpisodeView]
"""Episodes by id."""
PictureShard = dict[str, str]
"""Data URIs by key: pictures that many episodes show are in a file once."""
