"""The ask page's API. Every error is `{"detail": "one line"}`.

`GET /openapi.json` describes it; docs/serve.md shows it by example.
"""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

from paravt import __version__
from paravt.agent import EpisodeConfig
from paravt.engines.base import Engine
from paravt.report.page import asset, policy, render
from paravt.serve.asks import Ask, Asks, Logged, QueueFull
from paravt.serve.messages import (
    Accepted,
    Asked,
    AskRequest,
    AskState,
    AskSummary,
    Health,
    Problem,
    VideoView,
    ask_summary,
    video_view,
)
from paravt.serve.player import Player
from paravt.serve.security import Access, Application, Guard, Receive, Scope, Send
from paravt.serve.uploads import receive_video, whole_number
from paravt.serve.videos import MEDIA_TYPES, Library, Video, shown_name
from paravt.video import FrameReader

_MOST_BODY = 4 << 20
"""Bytes of a request that is no upload: more than the longest question, however it is written."""
_MOST_PROBLEMS, _LONGEST_NAME = 5, 60
"""That are told of a request that is wrong, and characters of the name of a field."""
_QUIET = 15.0
"""Seconds without an event after which a stream is kept alive."""
_UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The events of the ask from its first on, or from the one after `Last-Event-ID` on, and the rest"
        " as they happen. The name of an event is the `event` of `AskState.events`, its data are the other fields as"
        " JSON. The stream ends after `done`, `failed` or `cancelled`; comments keep it alive.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "It is over, and `Last-Event-ID` was its last event."},
}


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Problem} for code in codes}


def create_app(
    engine: Engine,
    library: Library,
    access: Access,
    *,
    config: EpisodeConfig | None = None,
    concurrency: int = 1,
    max_queue: int = 64,
    max_upload_bytes: int = 2048 << 20,
    keep: int = 100,
    keep_size: int = 256 << 20,
) -> FastAPI:
    """The application; `app.state.asks` is its queue. The engine is closed with it.

    `config` has what a request does not say (turns, tokens, temperature, seed). `concurrency` asks run at a time,
    `max_queue` wait, and of those that ended `keep` are kept, or fewer: with at most `keep_size` characters of events.
    """
    reader = FrameReader()
    player = Player(engine, reader, library, config or EpisodeConfig())
    asks: Asks[Asked] = Asks(player.play, concurrency=concurrency, max_queue=max_queue, keep=keep, keep_size=keep_size)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asks.close()
        await engine.close()
        await asyncio.to_thread(reader.close)

    app = FastAPI(
        title="ParaVT",
        version=__version__,
        summary="Questions about long videos",
        lifespan=lifespan,
        docs_url=None,  # they come from elsewhere, and the page's policy forbids that
        redoc_url=None,
        responses=_problems(401, 403),
    )
    app.add_middleware(_Bodies)
    app.add_middleware(Guard, access)
    app.state.asks = asks

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": _in_words(error)}, 422)

    async def known_video(id: str) -> Video:
        video = await asyncio.to_thread(library.find, id)
        if video is None:
            raise HTTPException(404, "there is no such video")
        return video

    async def known_ask(id: str) -> Ask[Asked]:
        ask = asks.get(id)
        if ask is None:
            raise HTTPException(404, "there is no such question (any more)")
        return ask

    KnownAsk = Annotated[Ask[Asked], Depends(known_ask)]

    async def last_seen(ask: KnownAsk, last_event_id: Annotated[str, Header()] = "") -> int:
        seen = whole_number(last_event_id)
        if ask.over and ask.log[-1].number <= seen:
            raise HTTPException(204)  # tells an EventSource not to come again
        return seen

    KnownVideo = Annotated[Video, Depends(known_video)]

    script, style = asset("ask.js"), asset("ask.css")
    page = render("ParaVT: ask", {}, script, style, served=True)
    allowed = policy(script, style, served=True) + "; frame-ancestors 'none'"

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": allowed})

    # ------------------------------------------------------------------ videos

    @app.get("/v1/videos", tags=["videos"], summary="The videos there are")
    def list_videos() -> list[VideoView]:
        return [video_view(video) for video in library.all()]

    @app.post(
        "/v1/videos",
        status_code=201,
        tags=["videos"],
        summary="Upload a video",
        openapi_extra=_UPLOAD_BODY,
        responses=_problems(400, 413, 422, 507),
    )
    async def upload_video(request: Request) -> VideoView:
        return video_view(await receive_video(request, library, max_upload_bytes))

    @app.delete(
        "/v1/videos/{id}", status_code=204, tags=["videos"], summary="Remove an upload", responses=_problems(404, 409)
    )
    async def delete_video(video: KnownVideo) -> Response:
        if not video.uploaded:
            raise HTTPException(403, "only uploads can be removed")
        if any(ask.request.request.video == video.id and not ask.over for ask in asks.newest()):
            raise HTTPException(409, "a question about it waits or runs; cancel it first")
        await asyncio.to_thread(library.delete, video)
        return Response(status_code=204)

    @app.get(
        "/v1/videos/{id}/file",
        tags=["videos"],
        summary="The video itself, for a player",
        response_class=FileResponse,
        responses={200: {"content": {"video/*": {}}}, 206: {"content": {"video/*": {}}}, **_problems(404, 416)},
    )
    def video_file(video: KnownVideo) -> FileResponse:
        # Whatever the file's name says, it is never a page.
        return FileResponse(video.path, media_type=MEDIA_TYPES.get(video.path.suffix.lower(), "video/mp4"))

    # ------------------------------------------------------------------ asks

    @app.post(
        "/v1/ask",
        status_code=202,
        tags=["asks"],
        summary="Ask a question",
        response_model=Accepted,
        responses={
            200: {"model": AskState, "description": "With `wait=true`: when it is over."},
            **_problems(404, 422),
            429: {
                "model": Problem,
                "description": "The queue is full.",
                "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
            },
        },
    )
    async def ask_question(request: Request, question: AskRequest, wait: bool = False) -> Response:
        video = await known_video(question.video)
        try:
            ask = asks.submit(Asked(request=question, name=video.name))
        except QueueFull as full:
            raise HTTPException(429, str(full), {"Retry-After": str(full.retry_after)}) from None
        if not wait:
            return JSONResponse({"id": ask.id}, 202, {"Location": f"/v1/ask/{ask.id}"})
        if not await _ends_before(ask, request):
            await asks.cancel(ask)
        return _state(ask)

    @app.get("/v1/ask/{id}", tags=["asks"], summary="An ask and its events so far", responses=_state_problems(404))
    async def get_ask(ask: KnownAsk) -> Response:
        return _state(ask)

    @app.get(
        "/v1/ask/{id}/events",
        tags=["asks"],
        summary="Follow an ask: server-sent events",
        response_class=StreamingResponse,
        responses={**_EVENTS, **_problems(404)},
    )
    async def follow_ask(ask: KnownAsk, seen: Annotated[int, Depends(last_seen)]) -> StreamingResponse:
        unbuffered = {"X-Accel-Buffering": "no"}  # by a proxy in between
        return StreamingResponse(_stream(ask, seen), media_type="text/event-stream", headers=unbuffered)

    @app.delete("/v1/ask/{id}", tags=["asks"], summary="Cancel an ask", responses=_problems(404))
    async def cancel_ask(ask: KnownAsk) -> AskSummary:
        """Returns when nothing of it runs any more. One that is over stays as it is."""
        await asks.cancel(ask)
        return ask_summary(ask)

    @app.get("/v1/asks", tags=["asks"], summary="The history, newest first")
    async def list_asks() -> list[AskSummary]:
        return [ask_summary(ask) for ask in asks.newest()]

    @app.get("/healthz", tags=["server"], summary="Is the server there, and how busy is it?")
    async def health() -> Health:
        return Health(version=__version__, queued=asks.waiting, running=asks.running)

    return app


def _state_problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": AskState}, **_problems(*codes)}


def _state(ask: Ask[Asked]) -> Response:
    """An `AskState`. Its events are kept as JSON, and go out as they are."""
    events = ",".join(map(_event, ask.log))
    head = ask_summary(ask).model_dump_json()
    return Response(f'{head[:-1]},"events":[{events}]}}', media_type="application/json")


async def _stream(ask: Ask[Asked], seen: int) -> AsyncIterator[str]:
    async for entry in ask.follow(seen, quiet=_QUIET):
        yield f"event: {entry.name}\nid: {entry.number}\ndata: {entry.data}\n\n" if entry else ": still here\n\n"


def _event(entry: Logged) -> str:
    return f'{{"event":"{entry.name}"' + (f",{entry.data[1:]}" if entry.data != "{}" else "}")


async def _ends_before(ask: Ask[Asked], request: Request) -> bool:
    """Whether an ask ends while its client still waits."""
    end = asyncio.ensure_future(ask.wait())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([end, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
        gone.cancel()
    return ask.over


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _in_words(error: RequestValidationError) -> str:
    """What is wrong with a request, in one line: never what it said, which may be long, as may the names of fields."""
    lines = []
    for problem in error.errors()[:_MOST_PROBLEMS]:
        where = shown_name(".".join(str(part) for part in problem["loc"][1:])[:_LONGEST_NAME])
        lines.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    return "; ".join(lines)


class _Bodies:
    """In front of everything but uploads, which have a limit of their own: no body fills the memory."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = _MOST_BODY

        async def counted() -> MutableMapping[str, Any]:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the request is too large; at most {_MOST_BODY >> 20} MB are taken")
            return message

        upload = scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", "/v1/videos")
        await self._app(scope, receive if upload else counted, send)
