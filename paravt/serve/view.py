"""`paravt view`: the report's pages, live while a run goes on.

A browser asks by names that this process made: of chunks, and of videos (which are opaque). No path ever comes from a
request, and a video is checked again, links followed, before it is sent.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import FileResponse

from paravt import __version__
from paravt.errors import DataError
from paravt.report.library import Library, Place
from paravt.report.page import asset, policy, render
from paravt.report.reading import Notes, real_file, to_json
from paravt.report.videos import PictureBook, VideoFinder, check_directories
from paravt.serve.security import Guard, listen
from paravt.serve.videos import MEDIA_TYPES, Probes

_FRESH = 2.0
"""Seconds for which a list is sent again as it is; or longer, if it took long to make."""
_MOST_PICTURES = 20_000
"""That are kept in memory: a few hundred megabytes at most."""


class View:
    """The state behind the pages: what was read of the runs, and which videos were shown."""

    def __init__(
        self, paths: Sequence[Path], videos: Sequence[Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises DataError for a path that holds no run, or a directory of videos that is none."""
        self._roots = check_directories(videos)
        self.library = Library(paths)
        self._finder = VideoFinder(self._roots)
        self._book = PictureBook(self._finder)
        self._probes = Probes()
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}
        self._videos: dict[str, tuple[Path, Sequence[Path]]] = {}
        self._key = secrets.token_bytes(16)
        self._report, self._until = b"", 0.0

    def report(self) -> bytes:
        with self._lock:
            began = self._clock()
            if began >= self._until:
                self._report = to_json(self.library.report(Notes(), live=True))
                self._places = dict(self.library.places())
                ended = self._clock()
                self._until = ended + max(_FRESH, 4 * (ended - began))
            return self._report

    def chunk(self, name: str) -> bytes | None:
        """None if the list has no such chunk."""
        if not self._places:
            self.report()
        with self._lock:
            place = self._places.get(name)
            if place is None:
                return None
            found, _ = self.library.chunk(place, self._book, video_url=self._video)
            if len(self._book.pictures) > _MOST_PICTURES:
                self._book.forget(list(self._book.pictures))
            return to_json(found)

    def video(self, id: str) -> Path | None:
        """The file of a video that was shown; None if there is none, or if it may be opened no more."""
        path, allowed = self._videos.get(id, (None, ()))
        found = None if path is None else real_file(path, allowed)
        return None if found is None or self._probes(found) is None else found

    def _video(self, place: Place, video: str) -> str | None:
        """Where the page finds the video of an episode."""
        own, base = place.source.roots, place.file.spec.path.parent
        path, _ = self._finder.find(video, own, base)
        if path is None or self._probes(path) is None:  # a run may call any file of its directories a video
            return None
        id = hashlib.blake2b(str(path).encode("utf-8", "surrogateescape"), digest_size=12, key=self._key).hexdigest()
        self._videos[id] = path, tuple(self._roots or own)
        return f"videos/{id}"

    def close(self) -> None:
        self._book.close()


def create_app(view: View) -> FastAPI:
    app = FastAPI(title="ParaVT", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    script, style = asset("report.js"), asset("report.css")
    page = render(view.library.title, {}, script, style, served=True)
    allowed = policy(script, style, served=True) + "; frame-ancestors 'none'"

    @app.get("/")
    def index() -> Response:
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": allowed})

    @app.get("/data/report.json")
    def report() -> Response:
        try:
            return Response(view.report(), media_type="application/json")
        except DataError as error:  # the run is gone, or not back yet
            raise HTTPException(503, str(error)) from None

    @app.get("/data/chunks/{name}.json")
    def chunk(name: str) -> Response:
        found = view.chunk(name)
        if found is None:
            raise HTTPException(404, "there is no such chunk")
        return Response(found, media_type="application/json")

    @app.get("/videos/{id}")
    def video(id: str) -> FileResponse:
        path = view.video(id)
        if path is None:
            raise HTTPException(404, "there is no such video")
        # whatever else a run names as its video is sent as nothing that a browser shows
        return FileResponse(path, media_type=MEDIA_TYPES.get(path.suffix.lower(), "application/octet-stream"))

    return app


def view_runs(paths: Sequence[Path], videos: Sequence[Path], host: str, port: int) -> None:
    """Serve until Ctrl-C. Raises DataError for what cannot be shown, and for an address that cannot be listened at."""
    view = View(paths, videos)
    listening = listen(host, port)
    app = Guard(create_app(view), listening.access)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    typer.echo(listening.url)
    try:
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening.socket])
    finally:
        listening.socket.close()
        view.close()
