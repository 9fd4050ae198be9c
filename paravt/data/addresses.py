"""The addresses of media in rows of any published layout: found, and changed, without knowing what else a row has.

`messages` and `prompt` are turns whose parts have addresses, `videos` and `images` lists of them (or of objects with
one); each may be a JSON text. `video` is that of our own files of questions. Whatever is none of this is left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from paravt.data.json_text import parse, write

COLUMNS = ("messages", "prompt", "videos", "images", "video", "image")
"""Of rows, that can hold addresses."""
_PARTS = ("image_url", "video_url", "image", "video")
_LISTS = ("videos", "images")
_ELSEWHERE = ("tool_calls", "tools", "arguments", "text")
"""What models write and read: a `video` there is no file of the row."""
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def map_addresses(row: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The row with every address changed. A JSON text in which nothing changes stays the very same text."""
    return {key: _column(key, value, change) if key in COLUMNS else value for key, value in row.items()}


def find_addresses(row: Mapping[str, Any]) -> list[str]:
    """All addresses of a row, in order."""
    found: list[str] = []

    def note(address: str) -> str:
        found.append(address)
        return address

    map_addresses(row, note)
    return found


def _column(name: str, value: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return _walk(value, name, change)
    try:
        found = parse(value)
    except ValueError:
        return value  # whoever reads it will say so
    changed = _walk(found, name, change)
    return value if changed == found else write(changed)


def _walk(value: Any, name: str, change: Callable[[str], str]) -> Any:
    """`name` is the key under which the value stands, that of its list if it stands in one."""
    if isinstance(value, str):
        return change(value) if value and (name in _PARTS or name in _LISTS) else value
    if isinstance(value, list):
        return [_walk(item, name, change) for item in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, item in value.items():
        inside = name if key in ("url", "path") and (name in _PARTS or name in _LISTS) else key
        out[key] = item if key in _ELSEWHERE else _walk(item, str(inside), change)
    return out


def bare(address: str) -> str:
    """Without `file://`, which published rows can have twice."""
    while address.startswith("file://"):
        address = address.removeprefix("file://")
    return address


def is_remote(address: str) -> bool:
    """On the network. A colon alone does not say so: files have such names, too."""
    return _REMOTE.match(bare(address)) is not None


def is_file(address: str) -> bool:
    """False for what is in the row itself (`data:`) and for what is on the network."""
    return not address.startswith("data:") and not is_remote(address)


def identity(address: str, base: str | os.PathLike[str] | None) -> str:
    """One name for one file, however rows spell it; what is no file is its own. `base`: where relative paths begin.

    As `local_path` finds it: as it stands there, or else without its percent signs.
    """
    if not is_file(address):
        return address
    place, decoded = (os.path.join(base or "", spelled) for spelled in (bare(address), unquote(bare(address))))
    try:
        return os.path.realpath(place if place == decoded or os.path.isfile(place) else decoded)
    except ValueError:  # a NUL in it, or half of a character: no file has such a name
        return place


def is_question(row: Mapping[str, Any]) -> bool:
    """Of our own files: its relative paths begin at the file."""
    return isinstance(row.get("video"), str) and isinstance(row.get("question"), str)


def base_of(row: Mapping[str, Any], path: Path, root: Path | None) -> Path | None:
    return path.parent if is_question(row) else root
