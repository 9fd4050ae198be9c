"""The videos that may be asked about: files below allowed directories, and uploads.

Each has an opaque id. A file is looked for by id alone, and checked again each time: it must be a regular file whose
real path is inside its directory, so that neither `..` nor a symbolic link leads out of it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import unicodedata
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from threading import Lock

from paravt.errors import DataError, VideoError
from paravt.report.reading import real_file
from paravt.terminal import clock
from paravt.video import VideoInfo, open_video
from paravt.video.source import file_identity

MEDIA_TYPES = {
    ".3gp": "video/3gpp", ".avi": "video/x-msvideo", ".flv": "video/x-flv", ".m2ts": "video/mp2t", ".m4v": "video/mp4",
    ".mkv": "video/x-matroska", ".mov": "video/quicktime", ".mp4": "video/mp4", ".mpeg": "video/mpeg",
    ".mpg": "video/mpeg", ".mts": "video/mp2t", ".ogv": "video/ogg", ".ts": "video/mp2t", ".vob": "video/mpeg",
    ".webm": "video/webm", ".wmv": "video/x-ms-wmv",
}  # fmt: skip
"""Of the files that are listed below a directory, by their suffix."""
MOST_LISTED = 2000
"""Files of a directory that are looked at for the list."""
_ID = re.compile(r"[0-9a-f]{32}")
_PART = ".part-"
_BAD_IN_NAMES = re.compile(r'[\\/:*?"<>|%#]')


@dataclass(frozen=True)
class Video:
    id: str
    name: str
    """How it is shown: its path below its directory, or the name it was uploaded with."""
    path: Path
    """The real path: no part of it is a symbolic link."""
    info: VideoInfo
    uploaded: bool


@dataclass(frozen=True)
class _Entry:
    base: Path
    relative: str
    uploaded: bool


def open_root(directory: Path) -> Path:
    """The real path of an allowed directory. Raises DataError if it is none."""
    try:
        root = directory.resolve(strict=True)
    except (OSError, RuntimeError):
        root = directory
    if not root.is_dir():
        raise DataError(f"{directory}: not a directory")
    return root


def inside(root: Path, relative: str) -> Path | None:
    """The real path of the regular file `relative` below `root` (itself a real path); None if there is none, or if
    it is somewhere else."""
    return real_file(root / relative, [root])


def video_files(root: Path) -> Iterator[str]:
    """Relative paths of the files that may be videos, in order. Hidden files and linked directories are left out."""
    for directory, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in MEDIA_TYPES:
                yield os.path.relpath(os.path.join(directory, name), root)


def safe_name(name: str) -> str:
    """A file's name that can be shown, stored and put into a prompt: no directories, no control characters."""
    base = unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode()).replace("\\", "/").rpartition("/")[2]
    kept = "".join(c if c.isprintable() else "_" for c in base)
    kept = " ".join(_BAD_IN_NAMES.sub("_", kept).split()).strip(". ")
    stem, suffix = os.path.splitext(kept)
    short = stem[:60].encode()[:200].decode(errors="ignore")  # a file system counts bytes
    return (short + suffix[:10]) or "video"


class Probes:
    """Facts about files: each is opened once, and again only when it changed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._facts: OrderedDict[str, VideoInfo | None] = OrderedDict()

    def __call__(self, path: Path) -> VideoInfo | None:
        """None if it is no video. Blocks."""
        try:
            identity = file_identity(str(path))
        except VideoError:
            return None
        with self._lock:
            if identity in self._facts:
                self._facts.move_to_end(identity)
                return self._facts[identity]
        info = _open(path)
        with self._lock:
            self._facts[identity] = info
            while len(self._facts) > 2 * MOST_LISTED:
                self._facts.popitem(last=False)
        return info


class Library:
    """Thread-safe; methods that read files block. `uploads` is a directory of this library's own."""

    def __init__(self, roots: Sequence[Path], uploads: Path, *, max_seconds: float = 4 * 3600) -> None:
        self.roots = tuple(open_root(root) for root in roots)
        self.uploads = open_root(uploads)
        self.max_seconds = max_seconds
        self._lock = Lock()
        self._below: dict[str, _Entry] = {}
        self._listed = False
        self._probes = Probes()
        for part in self.uploads.glob(f"{_PART}*"):  # of a server that was killed
            shutil.rmtree(part, ignore_errors=True)

    # ------------------------------------------------------------------ finding

    def all(self) -> list[Video]:
        """All videos there are now, uploads first, the newest of them first. Files that are no videos are left out."""
        below: dict[str, _Entry] = {}
        for root in self.roots:
            for relative in islice(video_files(root), MOST_LISTED):
                name = os.fsencode(f"{root}\0{relative}")
                below[blake2b(name, digest_size=16).hexdigest()] = _Entry(root, relative, False)
        with self._lock:
            self._below, self._listed = below, True
        found = (self._video(id, entry) for id, entry in [*self._uploads(), *below.items()])
        return [video for video in found if video is not None]

    def find(self, id: str) -> Video | None:
        """The video of an id if it is there, and where it should be."""
        if not self._listed:
            self.all()
        with self._lock:
            entry = self._below.get(id)
        entry = entry or self._upload(id)
        return None if entry is None else self._video(id, entry)

    def _uploads(self) -> list[tuple[str, _Entry]]:
        try:
            ids = [path.name for path in sorted(self.uploads.iterdir(), key=_age)]
        except OSError:  # who cleans up temporary files has been here
            return []
        return [(id, entry) for id in ids if (entry := self._upload(id)) is not None]

    def _upload(self, id: str) -> _Entry | None:
        directory = self.uploads / id
        if not _ID.fullmatch(id) or directory.is_symlink() or not directory.is_dir():
            return None
        try:
            name = next((name for name in sorted(os.listdir(directory)) if not name.startswith(".")), None)
        except OSError:  # it is being removed
            return None
        return None if name is None else _Entry(self.uploads, f"{id}/{name}", True)

    def _video(self, id: str, entry: _Entry) -> Video | None:
        path = inside(entry.base, entry.relative)
        info = None if path is None else self._probes(path)
        if path is None or info is None:
            return None
        name = os.path.basename(entry.relative) if entry.uploaded else entry.relative
        return Video(id, shown_name(name), path, info, entry.uploaded)

    # ------------------------------------------------------------------ uploads

    def begin(self, name: str) -> tuple[str, Path]:
        """(new id, the file to write): in a directory that nobody is shown before `keep`."""
        id = secrets.token_hex(16)
        part = self.uploads / f"{_PART}{id}"
        part.mkdir(mode=0o700)
        return id, part / safe_name(name)

    def keep(self, id: str, path: Path) -> Video:
        """What was written becomes a video. Raises VideoError (its path is the name alone) if it is none or too
        long; the caller drops it then."""
        try:
            info = open_video(str(path))
        except VideoError as error:
            raise VideoError(path.name, error.reason) from None
        if info.duration > self.max_seconds:
            raise VideoError(path.name, f"{clock(info.duration)} long; at most {clock(self.max_seconds)} is taken")
        path.parent.rename(self.uploads / id)
        video = self.find(id)
        if video is None:
            raise VideoError(path.name, "is gone")
        return video

    def drop(self, id: str) -> None:
        """Remove what `begin` began, if it was not kept."""
        shutil.rmtree(self.uploads / f"{_PART}{id}", ignore_errors=True)

    def delete(self, video: Video) -> None:
        """Remove an upload. Raises ValueError for any other video."""
        if not video.uploaded or not _ID.fullmatch(video.id):
            raise ValueError(f"{video.id} is no upload")
        shutil.rmtree(self.uploads / video.id, ignore_errors=True)


def _open(path: Path) -> VideoInfo | None:
    try:
        return open_video(str(path))
    except VideoError:
        return None


def _age(path: Path) -> int:
    """A key that puts new files first; one that is gone meanwhile is old."""
    try:
        return -path.stat().st_mtime_ns
    except OSError:
        return 0


def shown_name(name: str) -> str:
    """A file's name as text: undecodable bytes and control characters are replaced."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
