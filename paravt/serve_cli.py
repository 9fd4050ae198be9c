"""`paravt serve` and `paravt mcp`: questions over HTTP and over the Model Context Protocol."""

from __future__ import annotations

import re
import signal
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paravt.errors import DataError
from paravt.model_names import check_name
from paravt.options import check_model, check_served, need_serve
from paravt.terminal import say

if TYPE_CHECKING:
    from paravt.agent import EpisodeConfig
    from paravt.engines.base import Engine

_Model = Annotated[
    str | None,
    typer.Option(help="A Qwen-VL checkpoint: a directory or a hub id. Default: the small one in the package."),
]
_Server = Annotated[str | None, typer.Option(help="An OpenAI-compatible server instead, http://host:port.")]
_ServedModel = Annotated[str | None, typer.Option(help="The model's name on that server.")]
_Concurrency = Annotated[int | None, typer.Option(min=1, help="Questions at a time. Default: 1, or 8 with --server.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
_Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16, float16")]
_MaxTurns = Annotated[int, typer.Option(min=1, help="Assistant turns before an answer is asked for.")]
_MaxTokens = Annotated[int, typer.Option(min=1, help="Of one turn.")]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)")


def add_commands(app: typer.Typer) -> None:
    app.command(epilog="Stop it with Ctrl-C.")(serve)
    app.command("mcp")(serve_mcp)


def serve(
    model: _Model = None,
    server: _Server = None,
    served_model: _ServedModel = None,
    videos: Annotated[
        list[Path] | None, typer.Option(help="A directory whose videos may be asked about; repeat it for each.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. Others than this machine need the token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 8765,
    max_queue: Annotated[int, typer.Option(min=1, help="Questions that may wait.")] = 64,
    concurrency: _Concurrency = None,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="Of one video.")] = 2048,
    max_seconds: Annotated[str, typer.Option(help="Of an uploaded video: 90, 30m, 4h ...")] = "4h",
    uploads: Annotated[
        Path | None, typer.Option(help="Where uploads are kept. Default: a directory that is removed at the end.")
    ] = None,
    max_turns: _MaxTurns = 8,
    max_tokens: _MaxTokens = 1024,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """A page to ask questions on, and the API behind it."""
    need_serve("fastapi", "uvicorn", "python_multipart")
    _check(model, server, served_model)
    longest = _seconds(max_seconds)
    from paravt.serve.api import create_app
    from paravt.serve.security import listen
    from paravt.serve.server import AskServer
    from paravt.serve.videos import Library

    # Whatever stops it, what it wrote is removed; uvicorn has handlers of its own while it runs, and passes on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        if uploads is None:
            uploads = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paravt-uploads-")))
        else:
            _make_directory(uploads)
        library = Library(videos or [], uploads, max_seconds=longest)
        listening = listen(host, port)
        stack.callback(listening.socket.close)
        engine, config = _open(model, server, served_model, device, dtype, max_turns, max_tokens)
        app = create_app(
            engine,
            library,
            listening.access,
            config=config,
            concurrency=concurrency or (8 if server else 1),
            max_queue=max_queue,
            max_upload_bytes=max_upload_mb << 20,
        )
        AskServer(app, lambda: typer.echo(listening.url)).run(sockets=[listening.socket])


def serve_mcp(
    root: Annotated[Path, typer.Option(help="The directory whose videos may be asked about.", show_default=False)],
    model: _Model = None,
    server: _Server = None,
    served_model: _ServedModel = None,
    concurrency: _Concurrency = None,
    max_turns: _MaxTurns = 8,
    max_tokens: _MaxTokens = 1024,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """Tools for any client of the Model Context Protocol, over standard input and output.

    `list_videos` and `ask_video` know the videos below the root, by their names there, and nothing else.
    """
    need_serve("mcp")
    _check(model, server, served_model)
    from paravt.serve.mcp_server import build_server
    from paravt.serve.videos import open_root

    root = open_root(root)
    engine, config = _open(model, server, served_model, device, dtype, max_turns, max_tokens)
    # The thread that waits for the client's next line cannot be interrupted: without this Ctrl-C would wait for it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    build_server(engine, root, config=config, concurrency=concurrency or (8 if server else 1)).run("stdio")


def _open(
    model: str | None,
    server: str | None,
    served_model: str | None,
    device: str,
    dtype: str,
    max_turns: int,
    max_tokens: int,
) -> tuple[Engine, EpisodeConfig]:
    from paravt.agent import EpisodeConfig
    from paravt.ask import LAB_MAX_TOKENS, open_engine

    small = model is None and server is None
    if small:
        say(
            "this is the small model of the package: it knows videos made by `paravt lab video`, open questions and up"
            " to 64 frames; for real videos give --model or --server"
        )
    engine = open_engine(model, server=server, served_model=served_model, device=device, dtype=dtype)
    return engine, EpisodeConfig(max_turns=max_turns, max_tokens=LAB_MAX_TOKENS if small else max_tokens)


def _check(model: str | None, server: str | None, served_model: str | None) -> None:
    check_model(model, server)
    check_served(served_model, server)
    if model is not None:  # before anything is imported, made or bound
        check_name(model)


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"--max-seconds: {text!r} is no duration; write 90, 30m or 4h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be made: {error.strerror or error}") from error
