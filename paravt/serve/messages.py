"""What goes over the API, for its validation and its description. The pages' side of it is `web/src/schema.ts`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from typing_extensions import TypedDict

from paravt.answers import LETTERS
from paravt.report.schema import CropView, EpisodeView, Thumbnail
from paravt.serve.asks import Ask, State
from paravt.serve.videos import Video
from paravt.types import Dispatch

LONGEST = 8000
"""Characters of a question, and of an option."""
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=LONGEST)]


def is_text(text: str) -> bool:
    """Not with zero bytes or halves of characters, which JSON can hold and UTF-8 cannot."""
    return not any("\ud800" <= c <= "\udfff" or c == "\0" for c in text)


class AskRequest(BaseModel):
    """A question about a video."""

    model_config = ConfigDict(extra="forbid")

    video: str = Field(max_length=200, description="The id of a video: of `GET` or `POST /v1/videos`.")
    question: Text
    options: list[Text] = Field([], max_length=len(LETTERS), description="Of a multiple-choice question.")
    frame_budget: int = Field(64, ge=1, le=1024, description="The number of overview frames.")
    dispatch: Dispatch = Field(
        "parallel", description="All crops of a turn at once, one crop in each turn, or no crops."
    )

    @field_validator("question", "options")
    @classmethod
    def _text(cls, value: str | list[str]) -> str | list[str]:
        if not all(map(is_text, [value] if isinstance(value, str) else value)):
            raise ValueError("has characters that are no text")
        return value


class Accepted(BaseModel):
    id: str = Field(description="Of the ask: `GET /v1/ask/{id}`.")


class Problem(BaseModel):
    """What went wrong, in one line."""

    detail: str


class VideoView(BaseModel):
    id: str
    name: str
    duration: float = Field(description="Seconds.")
    width: int
    height: int
    url: str = Field(description="Where a player finds it; ranges are supported.")


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str
    queued: int
    running: int


class Queued(TypedDict):
    event: Literal["queued"]
    position: int


class Started(TypedDict):
    event: Literal["started"]


class Overview(TypedDict):
    event: Literal["overview"]
    duration: float
    frames: list[Thumbnail]


class TurnEvent(TypedDict):
    event: Literal["turn"]
    index: int
    text: str
    calls: int
    answer: str | None


class CropStartedEvent(TypedDict):
    event: Literal["crop_started"]
    turn: int
    index: int
    start: float
    end: float


class CropDoneEvent(TypedDict):
    event: Literal["crop_done"]
    crop: CropView


class Done(TypedDict):
    event: Literal["done"]
    episode: EpisodeView


class Failed(TypedDict):
    event: Literal["failed"]
    message: str


class Cancelled(TypedDict):
    event: Literal["cancelled"]


AskEvent: TypeAlias = (
    Queued | Started | Overview | TurnEvent | CropStartedEvent | CropDoneEvent | Done | Failed | Cancelled
)


class AskSummary(BaseModel):
    """An ask as the history lists it."""

    id: str
    state: State
    position: int | None = Field(description="In the queue, from 1; null unless it waits.")
    video: str = Field(description="The video's id.")
    name: str = Field(description="The video's name.")
    question: str
    options: list[str]
    frame_budget: int
    dispatch: Dispatch
    created: float = Field(description="Seconds since 1970.")
    seconds: float | None = Field(description="That it has run; null while it waits.")
    answer: str | None = Field(description="Null until there is one. An ask that is done may have none.")
    message: str | None = Field(description="Why it failed.")


class AskState(AskSummary):
    """An ask with all of its events so far; of `queued` the last. An episode is in `done`."""

    events: list[Annotated[AskEvent, Field(discriminator="event")]]


class Asked(BaseModel):
    """What the queue holds: a request about a video that was found."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    request: AskRequest
    name: str


def video_view(video: Video) -> VideoView:
    return VideoView(
        id=video.id,
        name=video.name,
        duration=video.info.duration,
        width=video.info.width,
        height=video.info.height,
        url=f"/v1/videos/{video.id}/file",
    )


def ask_summary(ask: Ask[Asked]) -> AskSummary:
    request = ask.request.request
    return AskSummary(
        id=ask.id,
        state=ask.state,
        position=ask.position,
        video=request.video,
        name=ask.request.name,
        question=request.question,
        options=request.options,
        frame_budget=request.frame_budget,
        dispatch=request.dispatch,
        created=ask.created,
        seconds=ask.seconds,
        answer=ask.answer,
        message=ask.message,
    )
