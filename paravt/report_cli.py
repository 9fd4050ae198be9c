"""`paravt report`, `paravt view`, `paravt plot`: see what happened in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from paravt.options import need_serve
from paravt.terminal import say

Runs = Annotated[
    list[Path],
    typer.Argument(
        help="Directories of runs, of evaluations or of a suite, directories with runs in them, or files of episodes.",
        show_default=False,
        metavar="RUN...",
    ),
]
Videos = Annotated[
    list[Path] | None,
    typer.Option(
        help="A directory in which videos may be opened for pictures; repeat it for each. Default: those of the runs'"
        " own data.",
        metavar="DIR",
    ),
]


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    max_mb: Annotated[float, typer.Option(min=0.1, help="The most megabytes of the file.")] = 40.0,
    videos: Videos = None,
) -> None:
    """Write one HTML file about runs: curves, tables, episodes with their frames. It opens offline, anywhere."""
    from paravt.report.write import write_report

    if out.is_dir():
        raise typer.BadParameter(f"--out: {out} is a directory; give the name of a file")
    notes = write_report(runs, out, max_mb=max_mb, videos=videos or (), console=Console(stderr=True))
    for note in notes:
        say(note)
    typer.echo(out)


def view(
    runs: Runs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 0,
    host: Annotated[
        str, typer.Option(help="Where to listen. Elsewhere than on this machine alone, a token is needed.")
    ] = "127.0.0.1",
    videos: Videos = None,
) -> None:
    """Serve the same pages, live while a run goes on. Needs the extra `serve`."""
    need_serve("fastapi", "uvicorn")
    from paravt.serve.view import view_runs

    view_runs(runs, videos or (), host, port)


def plot(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The directory to write. Default: `plots` in the first run's.")
    ] = None,
    smooth: Annotated[int, typer.Option(min=1, help="Steps that a value is the mean of.")] = 5,
    band: Annotated[
        Literal["95", "range"],
        typer.Option(help="Over seeds: the 95 % interval of the mean, or the range from the lowest to the highest."),
    ] = "95",
) -> None:
    """Draw the curves of runs as PNGs; seeds of one recipe are a line with a band."""
    from paravt.report.plots import plot_runs

    for file in plot_runs(runs, out, width=smooth, spread=band):
        typer.echo(file)


def add_commands(app: typer.Typer) -> None:
    for command in (report, view, plot):
        app.command()(command)
