"""Episodes as JSON. Frames are written as references (time, key), never as pixels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paravt.errors import DataError
from paravt.files import write_whole
from paravt.types import BadToolCall, Episode, Frame, ToolCall

FORMAT = 1


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


def save_episodes(episodes: Iterable[tuple[str, Episode]], path: Path) -> None:
    """Write episodes as JSONL, each with the name of its group. The directory is made. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    rows = (json.dumps({"group": group, **episode_to_dict(episode)}) for group, episode in episodes)
    write_whole(path, "".join(f"{row}\n" for row in rows))


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
