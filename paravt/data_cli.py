"""`paravt data`: rows of training data on the command line, from published files and from files of one's own."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paravt import data_play_cli
from paravt.options import MOST_FRAMES, finite
from paravt.terminal import printable, say

if TYPE_CHECKING:
    from paravt.chat import TokenChat
    from paravt.data.traces import RowConfig

app = typer.Typer(no_args_is_help=True, help="Rows of training data: from published files to training.")
app.command()(data_play_cli.traces)
app.command()(data_play_cli.difficulty)

_Files = Annotated[list[str], typer.Argument(help="Parquet or JSONL files, or patterns.", show_default=False)]
_Root = Annotated[Path | None, typer.Option(help="Where relative paths of media begin.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Model = Annotated[
    str | None, typer.Option(help="A checkpoint whose tokenizer and template are used: a directory or a hub id.")
]
_Frames = Annotated[int, typer.Option(min=1, max=MOST_FRAMES, help="K, the overview frames of a question.")]
_Fps = Annotated[
    float, typer.Option(min=0.001, callback=finite, help="Frames per second of a video whose row says nothing else.")
]
_MaxFrames = Annotated[int, typer.Option(min=1, help="Of one video of a conversation.")]
_MaxPixels = Annotated[int, typer.Option(min=1024, help="Of a frame or an image.")]
_System = Annotated[str | None, typer.Option(help="The system turn of conversations that have none.")]


@app.command()
def materialize(
    given: Annotated[str, typer.Argument(metavar="IN", help="A file, a directory or a pattern.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file or a directory; may be IN.", show_default=False)],
    root: Annotated[Path, typer.Option(help="Where the media were extracted to.")],
    as_json: _Json = False,
) -> None:
    """Turn the sentinel paths of published rows (longvt_source/...) into paths of this machine.

    Doing it again changes nothing: files that are done are kept, and missing media are looked for anew.
    """
    from paravt.data.materialize import materialize as copy_files
    from paravt.data_terminal import show_materialized

    files = copy_files(given, out, root)
    if as_json:
        for file in files:
            sys.stdout.write(json.dumps(vars(file), default=str) + "\n")
    else:
        show_materialized(_console(), files)


@app.command(epilog="Exit codes: 0 no faults, 1 some rows have faults, 2 usage, 4 the model, 6 a file has no good row.")
def check(
    files: _Files,
    root: _Root = None,
    model: _Model = None,
    frames: _Frames = 64,
    decode: Annotated[
        bool, typer.Option(help="Decode every image, and the first and last overview frame of every video.")
    ] = True,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads. Default: the number of cores.")] = None,
    faults: Annotated[Path | None, typer.Option(help="Write a line of JSON for every fault to this file.")] = None,
    fps: _Fps = 1.0,
    max_frames: _MaxFrames = 64,
    max_pixels: _MaxPixels = 50_176,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="More are a fault. Default: the model's limit.")] = None,
    system: _System = None,
    as_json: _Json = False,
) -> None:
    """Which rows can be trained on, and what is wrong with the others.

    Media are looked at, reference answers compared with the options, windows with durations, ids and rows that occur
    twice are found. With --model tokens are counted, frame by frame as training has them.
    """
    from paravt.data.check import Fault, check_files, require_usable
    from paravt.data.copies import whole_file
    from paravt.data.tables import find_files
    from paravt.data_terminal import show_checks

    if max_tokens is not None and model is None:
        raise typer.BadParameter("--max-tokens needs --model, whose tokens they are")
    paths = find_files(files)
    if faults is not None and faults.exists() and any(faults.samefile(path) for path in paths if path.exists()):
        raise typer.BadParameter(f"--faults {faults}: is one of the files that are looked at")
    config = _config(root, system, fps, max_frames, max_pixels, max_tokens)
    console = Console(stderr=True)
    with ExitStack() as stack:
        report: IO[str] | None = None
        if faults is not None:  # before anything is looked at: it may take hours
            report = stack.enter_context(stack.enter_context(whole_file(faults)).open("w", encoding="utf-8"))
        status = stack.enter_context(console.status("looking at rows"))
        found = looked = 0

        def on_fault(fault: Fault) -> None:
            nonlocal found
            found += 1
            if report is not None:
                report.write(json.dumps(asdict(fault)) + "\n")

        def on_row() -> None:
            nonlocal looked
            looked += 1
            if looked % 100 == 0:
                status.update(f"{looked} rows")

        chat = None if model is None else _chat(model)
        checks = check_files(
            files, config, frames=frames, workers=workers, decode=decode, chat=chat, on_fault=on_fault, on_row=on_row
        )  # fmt: skip
    if as_json:
        for one in checks:
            sys.stdout.write(json.dumps(one.to_dict()) + "\n")
    else:
        show_checks(_console(), checks)
    require_usable(checks)
    if found:
        raise typer.Exit(1)


@app.command()
def stats(files: _Files, root: _Root = None, as_json: _Json = False) -> None:
    """What is in files of rows: turns, calls, answers, media. No media are opened."""
    from paravt.data.stats import file_stats
    from paravt.data_terminal import show_stats

    found = file_stats(files, root)
    if as_json:
        for one in found:
            sys.stdout.write(json.dumps(one.to_dict()) + "\n")
    else:
        show_stats(_console(), found)


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="A parquet or JSONL file.", show_default=False)],
    row: Annotated[str, typer.Argument(help="Its number, from 0, or its id.")] = "0",
    root: _Root = None,
    model: _Model = None,
    frames: _Frames = 64,
    fps: _Fps = 1.0,
    max_frames: _MaxFrames = 64,
    max_pixels: _MaxPixels = 50_176,
    system: _System = None,
    as_json: _Json = False,
) -> None:
    """One row, token by token as the model will see it: what is learned is green, or between ⟦ and ⟧.

    A question is shown as its episode begins.
    """
    from paravt.data.show import show_row
    from paravt.data.tables import find_files, open_groups
    from paravt.data.traces import TraceBuilder
    from paravt.data_terminal import show_shown
    from paravt.video import FrameReader

    for path in find_files([file]):
        open_groups(path)  # before a model is loaded: a wrong path should not take a minute to say so
    if model is None:
        from paravt.ask import shipped_model

        say("rendered for the small model of the package; --model renders for another one")
    chat = _chat(model or str(shipped_model()))
    config = _config(root, system, fps, max_frames, max_pixels)
    reader = FrameReader(workers=1)
    try:
        shown = show_row(file, row, TraceBuilder(chat, reader, config), frames)
    finally:
        reader.close()
    if as_json:
        images = [{"time": frame.time, "size": list(frame.pixels.shape[1::-1])} for frame in shown.trace.images]
        values = {"name": shown.name, "ids": shown.trace.ids, "learned": shown.trace.loss_mask, "images": images}
        text = [{"text": piece.text, "learned": piece.learned} for piece in shown.pieces]
        sys.stdout.write(json.dumps({**values, "pieces": text}) + "\n")
    else:
        show_shown(_console(), shown)


@app.command()
def split(
    files: _Files,
    out: Annotated[Path, typer.Option(help="The directory: train/ and validation/ are written in it.")],
    validation: Annotated[float, typer.Option(min=0, max=1, help="Share of the rows to validate on, at most.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Another one, another choice.")] = 0,
    root: _Root = None,
) -> None:
    """Rows to train on and rows to validate on, with no video and no image in both."""
    from paravt.data.split import split_files

    if not 0 < validation < 1:
        raise typer.BadParameter("--validation must be between 0 and 1")
    done = split_files(files, out, validation, seed, root)
    for part, count in done.rows.items():
        typer.echo(printable(f"{out / part}: {count} rows with {done.media[part]} videos and images"))


def _config(
    root: Path | None, system: str | None, fps: float, max_frames: int, max_pixels: int, max_tokens: int | None = None
) -> RowConfig:
    from paravt.data.traces import RowConfig

    return RowConfig(root, system, fps, max_frames, max_pixels, max_tokens)


def _console() -> Console:
    """Of results; a file has no width."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _chat(model: str) -> TokenChat:
    from paravt.models.rendering import load_chat

    return load_chat(model)
