"""Where a benchmark's files are: tables by their published names, videos by name wherever they were unpacked."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from paravt.errors import DataError

log = logging.getLogger(__name__)

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz")
_LFS = b"version https://git-lfs"
ENDPOINT = constants.ENDPOINT


def find_tables(root: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first pattern that matches any. Raises DataError, with the patterns, if none does."""
    if not root.is_dir():
        raise DataError(f"{root}: no such directory")
    for pattern in patterns:
        found = sorted(path for path in root.glob(pattern) if path.is_file())
        if found:
            return found
    raise DataError(f"{root}: none of the published files is here: {', '.join(patterns)}")


def download_tables(hub_id: str, revision: str | None, patterns: Sequence[str]) -> tuple[Path, str]:
    """The tables of a data set on the hub, in the hub's cache: their directory, and the commit they are of.

    Videos are not downloaded. Raises DataError in one line if the hub can't be asked and the cache has no copy, if
    there is no such data set, or if its terms must be accepted first.
    """
    log.warning("%s: asking the hub at %s", hub_id, ENDPOINT)
    page = f"https://huggingface.co/datasets/{hub_id}"
    try:
        found = snapshot_download(
            hub_id, repo_type="dataset", revision=revision, allow_patterns=list(patterns), endpoint=ENDPOINT
        )
    except GatedRepoError as error:
        raise DataError(f"{hub_id}: accept its terms at {page} and set HF_TOKEN, or give a directory") from error
    except RepositoryNotFoundError as error:
        raise DataError(f"{hub_id}: no such data set on the hub (a private one needs HF_TOKEN)") from error
    except (LocalEntryNotFoundError, httpx2.HTTPError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        raise DataError(
            f"{hub_id}: the hub cannot be asked ({reason}); give a directory with the files of {page}"
        ) from error
    return Path(found), Path(found).name


class Files:
    """The files below some directories, by name. Hidden directories are left out, linked ones are followed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._named: dict[str, list[Path]] = defaultdict(list)
        self._stems: dict[str, list[Path]] = defaultdict(list)
        self.archives = 0
        seen: set[str] = set()
        for root in roots:
            for folder, subfolders, names in os.walk(root, followlinks=True):
                real = os.path.realpath(folder)
                subfolders[:] = [] if real in seen else sorted(name for name in subfolders if not name.startswith("."))
                if real in seen:
                    continue
                seen.add(real)
                for name in sorted(names):
                    path = Path(folder, name)
                    self._named[name].append(path)
                    if path.suffix.lower() in VIDEO_SUFFIXES:
                        self._stems[path.stem].append(path)
                    self.archives += name.lower().endswith(_ARCHIVES) or ".tar.part" in name.lower()

    def find(self, name: str, video: bool = False) -> tuple[Path | None, str]:
        """The file whose path ends with `name` (`x.mp4`, or `folder/x.mp4`), or None and why there is none.

        Of a video any of the usual suffixes will do. Only files below the roots are ever found.
        """
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
            return None, "not a relative name"
        found = self._ending(self._named.get(parts[-1], []), parts)
        if not found and video:
            stem = PurePosixPath(parts[-1])
            stem_name = stem.stem if stem.suffix.lower() in VIDEO_SUFFIXES else stem.name
            found = self._ending(self._stems.get(stem_name, []), parts)
        if not found:
            return None, "no such file" + (f" ({self.archives} archives here are to be unpacked)" * bool(self.archives))
        if len({_size(path) for path in found}) > 1:
            return None, f"{len(found)} different files with this name, such as {found[0]} and {found[1]}"
        problem = file_problem(found[0])
        return (None, problem) if problem else (found[0], "")

    def _ending(self, paths: Sequence[Path], parts: Sequence[str]) -> list[Path]:
        folders = tuple(parts[:-1])
        return [path for path in paths if not folders or path.parts[-len(folders) - 1 : -1] == folders]


def _size(path: Path) -> int:
    """-1 for a link to nothing."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return -1


def file_problem(path: Path) -> str:
    """Why a file can't be what it should be, looking at it from outside; "" if nothing speaks against it."""
    size = _size(path)
    if size < 0:
        return f"{path} is a link to nothing" if os.path.islink(path) else "no such file"
    if not path.is_file():
        return f"{path} is not a file"
    if size == 0:
        return f"{path} is empty"
    if size < 1024:
        try:
            with path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    return f"{path} is a pointer of Git LFS, not the file"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
    return ""
