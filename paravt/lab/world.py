"""A procedural long video with something to find in it, and a reader that shows it without a file.

A video of 128 s at 2 fps has four scenes of 32 s, each with its own background colour and one event: one of eight
glyphs, shown for 1 to 6 s. Elsewhere there are distractors: pictures with stripes, a second or three long, that no
question is about. Everything follows from the video's name. Pictures are few and shared: what is seen at a time
depends on the ground, on what is drawn on it, and on one of four variants of noise, so that the frames of many videos
are the same ones and go through a vision tower once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path

import av
import numpy as np

from paravt.engines.base import stable_seed
from paravt.errors import DataError, VideoError
from paravt.types import Frame
from paravt.video import Frames, VideoInfo

DURATION, SCENES, CELL = 128, 4, 16
"""Seconds; CELL is the window of a crop that shows a frame a second."""
SCENE = DURATION // SCENES
FPS = 2
SIDE = 32
"""Of the square video, in px."""
EVENT_LENGTHS = (1, 2, 3, 4, 5, 6)
"""Seconds."""
VARIANTS = 4

_BITMAPS = {
    "star": ("...##...", "...##...", "########", ".######.", "..####..", ".##..##.", "##....##", "........"),
    "moon": ("..####..", ".###....", "###.....", "###.....", "###.....", "###.....", ".###....", "..####.."),
    "ring": ("..####..", ".######.", "##....##", "##....##", "##....##", "##....##", ".######.", "..####.."),
    "bolt": ("....###.", "...###..", "..###...", ".######.", "...###..", "..###...", ".###....", "##......"),
    "leaf": ("......##", "...#####", "..######", ".######.", ".######.", ".#####..", ".###....", "##......"),
    "fish": ("........", "..###..#", ".#####.#", "########", "########", ".#####.#", "..###..#", "........"),
    "bell": ("...##...", "..####..", "..####..", ".######.", ".######.", "########", "...##...", "........"),
    "crown": ("#..##..#", "#..##..#", "##.##.##", "########", "########", "########", ".######.", "........"),
    # distractors
    "stripes": ("########", "........", "########", "........", "########", "........", "########", "........"),
    "bars": ("#.#.#.#.", "#.#.#.#.", "#.#.#.#.", "#.#.#.#.", "#.#.#.#.", "#.#.#.#.", "#.#.#.#.", "#.#.#.#."),
}
GLYPHS = tuple(_BITMAPS)[:8]
DISTRACTORS = tuple(_BITMAPS)[8:]
_INKS = dict(zip(_BITMAPS, np.array([
    (250, 240, 60), (240, 240, 255), (255, 160, 40), (90, 230, 255), (90, 240, 90), (255, 110, 200), (190, 140, 255),
    (255, 70, 60), (200, 200, 200), (160, 160, 160),
]), strict=True))  # fmt: skip
GROUNDS = {
    "red": (120, 30, 30), "blue": (30, 40, 120), "green": (25, 90, 40), "gold": (110, 85, 20), "teal": (20, 95, 100),
    "pink": (105, 40, 90), "gray": (70, 70, 75), "brown": (55, 35, 20),
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that is shown from `start` until `end`, in seconds."""

    start: int
    end: int
    shows: str

    def at(self, second: float) -> bool:
        return self.start <= second < self.end


@dataclass(frozen=True)
class World:
    """One video."""

    name: str
    grounds: tuple[str, ...]
    events: tuple[Event, ...]
    """One in each scene, in order."""
    distractors: tuple[Event, ...]

    def shows(self, second: float) -> str | None:
        """What is drawn at a time, a glyph or a distractor."""
        drawn = (event.shows for event in (*self.events, *self.distractors) if event.at(second))
        return next(drawn, None)

    def picture(self, index: int) -> tuple[str, str | None, int]:
        """Which of the shared pictures frame `index` is (at index / FPS seconds): ground, what is drawn, variant."""
        second = index / FPS
        scene = min(int(second // SCENE), SCENES - 1)
        return self.grounds[scene], self.shows(second), stable_seed(self.name, index) % VARIANTS

    def visible(self, times: Sequence[float], start: float = 0, end: float = DURATION) -> list[str]:
        """The glyphs that pictures at `times` show from `start` until `end` (all in seconds), in the order of the
        events, one for each."""
        return [event.shows for event in self.events if any(event.at(t) and start <= t < end for t in times)]


@cache
def picture(ground: str, drawn: str | None, variant: int) -> np.ndarray:
    """uint8 RGB of shape (SIDE, SIDE, 3): noise on a ground, and a glyph of 16 px about its middle."""
    draw = np.random.default_rng(stable_seed("picture", ground, drawn, variant))
    pixels = GROUNDS[ground] + draw.normal(0, 5, 3) + draw.normal(0, 4, (SIDE, SIDE, 3))
    if drawn is not None:
        mask = np.kron(np.array([[c == "#" for c in row] for row in _BITMAPS[drawn]]), np.ones((2, 2), bool))
        top, left = 8 + draw.integers(-1, 2, 2)
        pixels[top : top + 16, left : left + 16][mask] = _INKS[drawn]
    return pixels.clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=512)
def world(name: str) -> World:
    """The video that a name stands for.

    A third of the videos show one glyph in three scenes and another one in the fourth; in the others every scene has
    a glyph of its own draw.
    """
    draw = random.Random(stable_seed("world", name))
    common, odd = draw.sample(GLYPHS, 2)
    if draw.random() < 1 / 3:
        shown = [common] * SCENES
        shown[draw.randrange(SCENES)] = odd
    else:
        shown = [draw.choice(GLYPHS) for _ in range(SCENES)]
    events, distractors = [], []
    for scene, glyph in enumerate(shown):
        length = draw.choice(EVENT_LENGTHS)
        start = scene * SCENE + draw.randrange(SCENE - length + 1)
        events.append(Event(start, start + length, glyph))
    for _ in range(3):
        start, length = draw.randrange(DURATION - 3), draw.randint(1, 3)
        if all(start + length <= event.start or event.end <= start for event in events):
            distractors.append(Event(start, start + length, draw.choice(DISTRACTORS)))
    return World(name, tuple(draw.sample(tuple(GROUNDS), SCENES)), tuple(events), tuple(distractors))


def write_video(name: str, path: str | Path) -> None:
    """Write the video as a lossless H.264 mp4 file. Raises DataError if the file cannot be written."""
    partial = Path(path).with_name(f".{Path(path).name}.partial")  # nobody finds half of a video
    try:
        _write_mp4(name, partial)
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_mp4(name: str, path: Path) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=FPS, options={"qp": "0", "preset": "veryfast", "g": "16"})
        stream.width = stream.height = SIDE
        stream.pix_fmt = "rgb24"
        stream.time_base = Fraction(1, FPS)
        for index in range(DURATION * FPS):
            shown = av.VideoFrame.from_ndarray(picture(*world(name).picture(index)), format="rgb24")
            shown.pts = index
            container.mux(stream.encode(shown))
        container.mux(stream.encode())


class WorldReader:
    """The frames of worlds without files, behind the interface of `paravt.video.FrameReader`."""

    async def ainfo(self, path: str) -> VideoInfo:
        return VideoInfo(
            path=path, duration=float(DURATION), fps=float(FPS), width=SIDE, height=SIDE, rotation=0, first_pts=0.0,
            frame_count=DURATION * FPS, warnings=(), identity=path,
        )  # fmt: skip

    async def aread(self, path: str, times: Sequence[float], size: tuple[int, int] | None = None) -> Frames:
        if size is not None and size != (SIDE, SIDE):
            raise VideoError(path, f"worlds are read at {SIDE} x {SIDE} px")
        shown = world(path)
        inside = [0 <= time < DURATION for time in times]
        frames = [frame(shown, time) if ok else None for time, ok in zip(times, inside, strict=True)]
        missing = [None if ok else f"{t:g} seconds is outside the video" for t, ok in zip(times, inside, strict=True)]
        return Frames(tuple(frames), tuple(missing))

    async def aread_many(
        self, path: str, windows: Sequence[Sequence[float]], size: tuple[int, int] | None = None
    ) -> list[Frames]:
        return [await self.aread(path, times, size) for times in windows]


def frame(shown: World, time: float) -> Frame:
    """The frame that is on the screen at `time` (seconds); its own time is when it came there."""
    index = int(time * FPS)
    return still(index / FPS, *shown.picture(index))


def still(time: float, ground: str, drawn: str | None, variant: int) -> Frame:
    """One of the shared pictures as a frame."""
    return Frame(time, picture(ground, drawn, variant), f"lab:{ground}:{drawn}:{variant}")
