"""Episodes as JSON. Frames are written as references (time, key), never as pixels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from paravt.errors import DataError
from paravt.files import write_whole
from paravt.types import (
    BadToolCall,
    Crop,
    Episode,
    EpisodeError,
    Frame,
    Sample,
    Score,
    Segment,
    ToolCall,
    Trace,
    Turn,
    Usage,
    Window,
)

FORMAT = 1
_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)


def episode_to_dict(episode: Episode) -> dict[str, Any]:
    """Everything of an episode as JSON values; `format` counts up when the layout changes."""
    return {"format": FORMAT, **_plain(episode)}


def save_episode(episode: Episode, path: str | Path) -> None:
    """Write one episode as a JSON file; the file is there whole or not at all. Raises DataError if it cannot be."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is not a regular file")
    text = json.dumps(episode_to_dict(episode), ensure_ascii=True, indent=1) + "\n"
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def save_episodes(
    episodes: Iterable[tuple[str, Episode]], path: Path, credit: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Write episodes as JSONL, each with the name of its group, and with its `credit` (`paravt.credit`) if there is
    any. The directory is made. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    rows = (
        {"group": group, **({} if paid is None else {"credit": paid}), **episode_to_dict(episode)}
        for (group, episode), paid in zip(episodes, chain(credit, repeat(None)), strict=False)
    )
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def load_episodes(path: Path) -> list[Episode]:
    """The episodes of a JSONL file, in order. Raises DataError, with the line's number, for what is no episode."""
    out = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    out.append(episode_from_dict(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(f"{path}:{number}: not an episode: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return out


def episode_from_dict(row: Mapping[str, Any]) -> Episode:
    """What `episode_to_dict` wrote. Frames have their times and keys, and no pixels."""
    if row.get("format") != FORMAT:
        raise ValueError(f"format {row.get('format')}, expected {FORMAT}")
    fields = {f.name: row[f.name] for f in dataclasses.fields(Episode)}
    sample = row["sample"]
    return Episode(
        **fields
        | {
            "sample": Sample(**{**sample, "options": tuple(sample["options"])}),
            "main": _trace(row["main"]),
            "turns": tuple(Turn(**{**turn, "calls": tuple(map(_call, turn["calls"]))}) for turn in row["turns"]),
            "crops": tuple(map(_crop, row["crops"])),
            "overview_times": tuple(row["overview_times"]),
            "rewards": {name: Score(**score) for name, score in row["rewards"].items()},
            "errors": tuple(EpisodeError(**error) for error in row["errors"]),
        }
    )


def _trace(row: Mapping[str, Any]) -> Trace:
    return Trace(**{**row, "segments": tuple(map(_segment, row["segments"]))})


def _segment(row: Mapping[str, Any]) -> Segment:
    changed: dict[str, Any] = {
        "ids": tuple(row["ids"]),
        "logprobs": None if row["logprobs"] is None else tuple(row["logprobs"]),
        "images": tuple(Frame(image["time"], _NO_PIXELS, image["key"]) for image in row["images"]),
        "usage": Usage(**row["usage"]) if row["usage"] else None,
    }
    return Segment(**{**row, **changed})


def _crop(row: Mapping[str, Any]) -> Crop:
    changed: dict[str, Any] = {
        "call": _call(row["call"]),
        "window": Window(**row["window"]) if row["window"] else None,
        "trace": _trace(row["trace"]) if row["trace"] else None,
        "frame_times": tuple(row["frame_times"]),
        "missing": tuple(row["missing"]),
    }
    return Crop(**{**row, **changed})


def _call(row: Mapping[str, Any]) -> ToolCall | BadToolCall:
    values = {name: value for name, value in row.items() if name != "kind"}
    return ToolCall(**values) if row["kind"] == "call" else BadToolCall(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Frame):
        return {"time": value.time, "key": value.key}
    if isinstance(value, (ToolCall, BadToolCall)):
        kind = "call" if isinstance(value, ToolCall) else "bad"
        return {"kind": kind, **{f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
