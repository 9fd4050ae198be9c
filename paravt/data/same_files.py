"""Files that are the same under several names: copies, hard links."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b

_READ = 1 << 16
"""Bytes at the beginning and at the end. Whole videos would take hours, and no two of one size begin and end alike."""


def copies_of_files(names: Iterable[str]) -> list[list[str]]:
    """The names of each file that has more than one, in order. Only files of equal size are opened; what is not there,
    or cannot be read, is left out."""
    sizes: dict[int, list[str]] = defaultdict(list)
    for name in names:
        if (size := _size(name)) is not None:
            sizes[size].append(name)
    same: dict[tuple[int, bytes], list[str]] = defaultdict(list)
    for size, alike in sizes.items():
        for name in alike if len(alike) > 1 else ():
            if (content := _ends(name, size)) is not None:
                same[size, content].append(name)
    return [found for found in same.values() if len(found) > 1]


def _size(name: str) -> int | None:
    try:
        about = os.stat(name)
    except (OSError, ValueError):  # a NUL in it
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) and about.st_size else None


def _ends(name: str, size: int) -> bytes | None:
    try:
        with open(name, "rb") as file:
            begins = file.read(_READ)
            file.seek(max(0, size - _READ))
            return blake2b(begins + file.read(_READ), digest_size=16).digest()
    except OSError:
        return None
