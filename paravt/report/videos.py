"""The pictures of saved episodes: decoded again, small, from videos that the user allows to be opened.

A saved episode names its video, and its frames by their times; both are data that may have come from anywhere. A
video is opened only where the name, links followed, is a regular file in one of the allowed directories. The lab's
pictures are made from their keys, which are parsed strictly, and open nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paravt.errors import DataError, VideoError
from paravt.lab import world
from paravt.report.pictures import CROP_WIDTH, OVERVIEW_WIDTH, Picture, data_uri
from paravt.report.reading import real_file
from paravt.types import Episode, Frame
from paravt.video import FrameReader
from paravt.video.source import file_identity

LAB = "lab"
"""The name of the pictures that all lab videos share."""
_LAB_KEY = re.compile(r"lab:([a-z]{1,20}):([A-Za-z]{1,20}):(\d{1,3})")
_CACHE = 64 << 20
_MOST_TAILS = 6
"""Parts of a path that are looked for below an allowed directory."""


@dataclass(frozen=True)
class Detail:
    """The most pictures of one list; the others are left out, those that stay are evenly spaced."""

    overview: int
    crop: int


FULL, SOME, NONE = Detail(64, 16), Detail(16, 4), Detail(0, 0)
LEFT_OUT = "left out to keep the file small"


def check_directories(paths: Iterable[Path]) -> list[Path]:
    """Those that `--videos` gives. Raises DataError for what is none."""
    found = list(paths)
    for path in found:
        if not path.is_dir():
            raise DataError(f"--videos {path}: is no directory")
    return found


@dataclass
class VideoFinder:
    """Where the video of an episode is, if it may be opened."""

    roots: Sequence[Path]
    _known: dict[tuple[str, str], tuple[Path | None, str]] = field(default_factory=dict)

    def find(self, name: str, own: Sequence[Path], base: Path) -> tuple[Path | None, str]:
        """The file, or None and why. Allowed are the directories that the user gave, or else `own`, those of the run;
        a relative name begins at `base` or at an allowed directory."""
        allowed = tuple(self.roots or own)
        key = (name, "\0".join(map(str, (*allowed, base))))
        if key not in self._known:
            self._known[key] = self._look(name, allowed, base)
        return self._known[key]

    def _look(self, name: str, allowed: Sequence[Path], base: Path) -> tuple[Path | None, str]:
        if not name or "\0" in name:
            return None, "the episode names no video"
        given = Path(name)
        candidates = [given if given.is_absolute() else base / given]
        tails = [part for part in given.parts if part not in ("/", "..", ".")][-_MOST_TAILS:]
        # moved: what stands below an allowed directory as it stood where the episode was played
        candidates += [root.joinpath(*tails[n:]) for root in allowed for n in range(len(tails))]
        for candidate in candidates:
            found = real_file(candidate, allowed)
            if found is not None:
                return found, ""
        if not allowed:
            return None, "no directory of videos is known: give one with --videos"
        return None, "its video is in none of the allowed directories: give its directory with --videos"


@dataclass(frozen=True)
class Shot:
    """A picture to be had: of the pictures `shard` (a video, or all of the lab's) the one called `key`."""

    shard: str
    key: str


class PictureBook:
    """Makes the pictures of episodes, each once. Not thread-safe."""

    def __init__(self, finder: VideoFinder) -> None:
        self._finder = finder
        self._reader: FrameReader | None = None
        self._shards: dict[Path, str] = {}
        self.pictures: dict[Shot, str] = {}

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def forget(self, shots: Iterable[Shot]) -> None:
        """Let go of pictures that nobody shows."""
        for shot in shots:
            self.pictures.pop(shot, None)

    def of(self, episode: Episode, own: Sequence[Path], base: Path, detail: Detail = FULL) -> EpisodePictures:
        """Decodes what an episode shows, as far as it is not there yet."""
        wanted: dict[tuple[float, int], Frame] = {}
        frames = {frame.time: frame for trace in episode.traces for frame in trace.images}
        for time in _at_most(episode.overview_times, detail.overview):
            if time in frames:
                wanted[time, OVERVIEW_WIDTH] = frames[time]
        for crop in episode.crops:
            mine = frames if crop.trace is None else {**frames, **{f.time: f for f in crop.trace.images}}
            for time in _at_most(crop.frame_times, detail.crop):
                if time in mine:
                    wanted[time, CROP_WIDTH] = mine[time]
        shots: dict[tuple[float, int], Shot] = {}
        whys: dict[tuple[float, int], str] = {}
        files: dict[tuple[float, int], Frame] = {}
        for place, frame in wanted.items():
            if frame.key.startswith("lab:"):
                shot = self._lab(frame.key)
                if shot is None:
                    whys[place] = "not a picture of the lab"
                else:
                    shots[place] = shot
            else:
                files[place] = frame
        if files:
            self._read(episode.sample.video, own, base, files, shots, whys)
        return EpisodePictures(self, shots, whys)

    def _lab(self, key: str) -> Shot | None:
        found = _LAB_KEY.fullmatch(key)
        if not found:
            return None
        ground, drawn, variant = found[1], None if found[2] == "None" else found[2], int(found[3])
        if (
            ground not in world.GROUNDS
            or drawn not in (None, *world.GLYPHS, *world.DISTRACTORS)
            or variant >= world.VARIANTS
        ):
            return None
        shot = Shot(LAB, f"{ground}/{drawn or '-'}/{variant}")
        if shot not in self.pictures:
            self.pictures[shot] = data_uri(world.picture(ground, drawn, variant), CROP_WIDTH)
        return shot

    def _read(
        self,
        video: str,
        own: Sequence[Path],
        base: Path,
        wanted: Mapping[tuple[float, int], Frame],
        shots: dict[tuple[float, int], Shot],
        whys: dict[tuple[float, int], str],
    ) -> None:
        path, why = self._finder.find(video, own, base)
        if path is None:
            whys.update(dict.fromkeys(wanted, why))
            return
        shard = self._shards.setdefault(path, f"v{len(self._shards)}")
        new: list[tuple[float, int]] = []
        for time, widest in wanted:
            shots[time, widest] = Shot(shard, f"{time:.6f}/{widest}")
            if shots[time, widest] not in self.pictures:
                new.append((time, widest))
        if not new:
            return
        try:
            self._check_unchanged(video, path, wanted.values())
            read = self._decode(path, sorted({time for time, _ in new}))
        except VideoError as error:
            for place in wanted:
                shots.pop(place)
                whys[place] = error.reason
            return
        for time, widest in new:
            frame = read.get(time)
            if frame is None:
                shots.pop((time, widest))
                whys[time, widest] = "there is no such frame in the video"
            else:
                self.pictures[shots[time, widest]] = data_uri(frame.pixels, widest)

    @staticmethod
    def _check_unchanged(video: str, path: Path, frames: Iterable[Frame]) -> None:
        """Raises VideoError if the file is where the episode found it, and is another one now."""
        if os.path.isabs(video) and os.path.realpath(video) == str(path):
            identity = file_identity(str(path))
            if any(len(name := frame.key.partition(":")[0]) == len(identity) and name != identity for frame in frames):
                raise VideoError(path, "the video has changed since")

    def _decode(self, path: Path, times: Sequence[float]) -> dict[float, Frame | None]:
        if self._reader is None:
            self._reader = FrameReader(_CACHE)
        info = self._reader.info(path)
        width = min(CROP_WIDTH, info.width)
        size = (width, max(1, round(info.height * width / info.width)))
        return dict(zip(times, self._reader.read(path, times, size).frames, strict=True))


@dataclass(frozen=True)
class EpisodePictures:
    """The pictures of one episode, as `episode_view` asks for them."""

    book: PictureBook
    shots: Mapping[tuple[float, int], Shot]
    whys: Mapping[tuple[float, int], str]

    def inside(self, frame: Frame, widest: int) -> Picture:
        """As data URIs."""
        shot = self.shots.get((frame.time, widest))
        return self._missing(frame, widest) if shot is None else Picture(self.book.pictures[shot])

    def shared(self, frame: Frame, widest: int) -> Picture:
        """As `#NAME/KEY`."""
        shot = self.shots.get((frame.time, widest))
        return self._missing(frame, widest) if shot is None else Picture(f"#{shot.shard}/{shot.key}")

    def _missing(self, frame: Frame, widest: int) -> Picture:
        return Picture(None, self.whys.get((frame.time, widest), LEFT_OUT))


def _at_most(times: Sequence[float], most: int) -> list[float]:
    """So many of them, evenly spaced, or all."""
    if len(times) <= most:
        return list(times)
    return [times[(2 * n + 1) * len(times) // (2 * most)] for n in range(most)]
