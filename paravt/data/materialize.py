"""From the sentinel paths of published rows (`longvt_source/...`) to the files of this machine.

Every relative path becomes `file://` and its place below the root, whether the file is there or not: rows whose files
arrive later are right already. Doing it again changes nothing. Beside each copy stands `NAME.materialized.json`, what
it was made of and what was missing; a copy that is up to date is not made again, only its missing files are looked for.
A copy takes the place of an earlier one, or of its original, and of no other file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from paravt.data.addresses import COLUMNS, bare, is_file, is_question, map_addresses
from paravt.data.copies import KEEP, copy_rows, paired_files
from paravt.data.json_text import parse
from paravt.errors import DataError
from paravt.files import write_whole

_DEEP = ("longvt_source", "museg")
"""Sentinel directories whose parts were published one by one."""


@dataclass
class Materialized:
    """What became of one file."""

    source: Path
    target: Path
    rows: int = 0
    changed: int = 0
    """Rows."""
    unreadable: int = 0
    """Rows, copied as they are."""
    files: Counter[str] = field(default_factory=Counter)
    """Different files, by bucket."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Paths of files that are not there, by bucket."""
    remote: int = 0
    """Addresses on the network, left as they are."""
    outside: int = 0
    """Addresses that would leave the root, left as they are."""
    made: bool = True
    """False if the copy was there already."""


def materialize(given: str, out: Path, root: Path) -> list[Materialized]:
    """Copy a file, or those of a directory or a pattern, with local paths. Raises DataError, OSError.

    `given` and `out` can be the same.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such directory; it is where the media were extracted to")
    return [materialize_file(source, target, root.absolute()) for source, target in paired_files(given, out)]


def bucket(name: str) -> str:
    """The part of the published data that a path belongs to; the directory, for paths that are none of it."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or len(parts) < 2:
        return str(PurePosixPath(name).parent)
    return "/".join(parts[:2]) if parts[0] in _DEEP and len(parts) > 2 else parts[0]


def materialize_file(source: Path, target: Path, root: Path) -> Materialized:
    record = target.with_name(target.name + ".materialized.json")
    about = source.stat()
    made_of = {"source": str(source.absolute()), "size": about.st_size, "mtime_ns": about.st_mtime_ns,
               "root": str(root)}  # fmt: skip
    said = _said(record)
    if said is not None and _is_up_to_date(said, made_of, target):
        return _looked_again(said, source, target)
    same = target.exists() and target.samefile(source)
    earlier = said is not None and said["of"].get("source") == made_of["source"]
    found = _Found(root, source)
    done = found.done
    done.target = target
    done.rows = copy_rows(source, target, COLUMNS, found.change, keep=not same and not earlier)
    written = {key: value for key, value in vars(done).items() if key not in ("source", "target", "made")}
    size = target.stat().st_size if target.exists() else 0
    write_whole(record, json.dumps({"of": made_of, "written": size, **written}, indent=1) + "\n")
    return done


def _said(record: Path) -> dict[str, Any] | None:
    """What a record says; None if there is none that can be read."""
    try:
        said = parse(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and isinstance(said.get("of"), dict) else None


def _is_up_to_date(said: Mapping[str, Any], made_of: Mapping[str, Any], target: Path) -> bool:
    """Whether a copy is still what it was made of."""
    try:
        return bool(said["of"] == made_of and target.stat().st_size == said["written"])
    except (OSError, KeyError):
        return False


def _looked_again(said: Mapping[str, Any], source: Path, target: Path) -> Materialized:
    missing = {name: left for name, paths in said["missing"].items()
               if (left := [path for path in paths if not os.path.isfile(path)])}  # fmt: skip
    return Materialized(
        source, target, said["rows"], said["changed"], said["unreadable"], Counter(said["files"]), missing,
        said["remote"], said["outside"], made=False,
    )  # fmt: skip


class _Found:
    """The files that the rows of one file name."""

    def __init__(self, root: Path, source: Path) -> None:
        self.root, self.done = root, Materialized(source, source)
        self.places: dict[tuple[str, bool], str] = {}

    def change(self, number: int, row: dict[str, Any] | None) -> dict[str, Any]:
        if row is None:
            self.done.unreadable += 1
            return KEEP
        own = is_question(row)
        changed = map_addresses(row, lambda address: self.place(address, own))
        if changed == row:
            return KEEP
        self.done.changed += 1
        return changed

    def place(self, address: str, own: bool) -> str:
        if not is_file(address):
            self.done.remote += not address.startswith("data:")
            return address
        if (address, own) not in self.places:
            self.places[address, own] = self.look(address, own)
        return self.places[address, own]

    def look(self, address: str, own: bool) -> str:
        name = bare(address)
        if ".." in PurePosixPath(name).parts and not own:
            self.done.outside += 1
            return address
        bases = (self.root, self.done.source.parent.absolute()) if own else (self.root,)
        tried = [os.path.join(base, spelled) for base in bases for spelled in dict.fromkeys((name, unquote(name)))]
        there = next((path for path in tried if os.path.isfile(path)), None)
        part = bucket(name)
        self.done.files[part] += 1
        if there is None:
            self.done.missing.setdefault(part, []).append(tried[0])
        place = there or tried[0]
        return place if own or address.startswith("/") else f"file://{place}"
