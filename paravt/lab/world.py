"""A procedural long video with something to find in it, and questions about it.

A video of 1,280 s at 2 fps has four scenes of 320 s, each with its own background colour and one event: one of eight
glyphs, shown for 8 s. "What appears between 384 and 640 seconds?" asks for the glyph of an event in a stretch of two
to five cells of 64 s. Overview frames are too far apart to catch most events; a crop of a cell (16 frames, one every
4 s) always does.

Everything follows from a seed, and a frame from the video and its index alone, so that the mp4 file and the
in-memory reader show the same pictures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import av
import numpy as np

from paravt.engines.base import stable_seed
from paravt.errors import VideoError
from paravt.types import Frame, Sample
from paravt.video import Frames, VideoInfo

DURATION, SCENES, CELL, EVENT = 1280, 4, 64, 8
SCENE = DURATION // SCENES
FPS = 2
SIDE = 64
"""Of the square video, in px."""

_BITMAPS = {
    "star": ("...##...", "...##...", "########", ".######.", "..####..", ".##..##.", "##....##", "........"),
    "moon": ("..####..", ".###....", "###.....", "###.....", "###.....", "###.....", ".###....", "..####.."),
    "ring": ("..####..", ".######.", "##....##", "##....##", "##....##", "##....##", ".######.", "..####.."),
    "bolt": ("....###.", "...###..", "..###...", ".######.", "...###..", "..###...", ".###....", "##......"),
    "leaf": ("......##", "...#####", "..######", ".######.", ".######.", ".#####..", ".###....", "##......"),
    "fish": ("........", "..###..#", ".#####.#", "########", "########", ".#####.#", "..###..#", "........"),
    "bell": ("...##...", "..####..", "..####..", ".######.", ".######.", "########", "...##...", "........"),
    "crown": ("#..##..#", "#..##..#", "##.##.##", "########", "########", "########", ".######.", "........"),
}
GLYPHS = tuple(_BITMAPS)
_MASKS = np.array([[[c == "#" for c in row] for row in _BITMAPS[name]] for name in GLYPHS])
_INKS = np.array([(250, 240, 60), (240, 240, 255), (255, 160, 40), (90, 230, 255), (90, 240, 90), (255, 110, 200),
                  (190, 140, 255), (255, 70, 60)])  # fmt: skip
_GROUNDS = np.array([(120, 30, 30), (30, 40, 120), (25, 90, 40), (110, 85, 20), (20, 95, 100), (105, 40, 90),
                     (70, 70, 75), (55, 35, 20)])  # fmt: skip


@dataclass(frozen=True)
class Event:
    start: int
    """In seconds; the event is over EVENT seconds later."""
    glyph: int
    left: int
    top: int


@dataclass(frozen=True)
class World:
    """One video."""

    name: str
    grounds: tuple[int, ...]
    events: tuple[Event, ...]
    """One in each scene, in order."""

    def frame(self, index: int) -> np.ndarray:
        """Picture `index` (at index / FPS seconds): uint8 RGB, (SIDE, SIDE, 3)."""
        second = index / FPS
        scene = min(int(second // SCENE), SCENES - 1)
        noise = np.random.default_rng(stable_seed(self.name, index))
        picture = np.empty((SIDE, SIDE, 3))
        picture[:] = _GROUNDS[self.grounds[scene]] + noise.normal(0, 5, 3)
        picture += np.linspace(-12, 12, SIDE)[:, None, None]
        event = self.events[scene]
        if event.start <= second < event.start + EVENT:
            mask = np.kron(_MASKS[event.glyph], np.ones((4, 4), bool))
            box = picture[event.top : event.top + 32, event.left : event.left + 32]
            box[mask] = _INKS[event.glyph]
        return picture.clip(0, 255).astype(np.uint8)

    def visible(self, times: Sequence[float], start: float = 0, end: float = DURATION) -> list[str]:
        """The glyphs that pictures at `times` show between `start` and `end`, in order, each once."""
        return [
            GLYPHS[event.glyph]
            for event in self.events
            if any(event.start <= t < event.start + EVENT and start <= t < end for t in times)
        ]


@lru_cache(maxsize=512)
def world(name: str) -> World:
    """The video that a name stands for."""
    draw = random.Random(stable_seed("world", name))
    events = []
    for scene in range(SCENES):
        cell = scene * SCENE + CELL * draw.randrange(SCENE // CELL)
        start = cell + draw.randrange(CELL - EVENT + 1)
        events.append(Event(start, draw.randrange(len(GLYPHS)), 8 + draw.randrange(17), 8 + draw.randrange(17)))
    return World(name, tuple(draw.sample(range(len(_GROUNDS)), SCENES)), tuple(events))


@dataclass(frozen=True)
class Question:
    """A sample with what the teacher needs to know about it."""

    sample: Sample
    start: int
    end: int

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(a, a + CELL) for a in range(self.start, self.end, CELL)]


def question(video: str, seed: int, path: str | None = None, lengths: Sequence[int] = (2, 3, 4, 5)) -> Question:
    """A question about a stretch of `lengths` cells; `path` is where the video's file is, if there is one."""
    draw = random.Random(stable_seed("question", video, seed))
    scene = draw.randrange(SCENES)
    event = world(video).events[scene]
    cells = SCENE // CELL
    at = (event.start - scene * SCENE) // CELL
    length = draw.choice(lengths)
    first = draw.randint(max(0, at - length + 1), min(at, cells - length))
    start = scene * SCENE + first * CELL
    end = start + length * CELL
    sample = Sample(
        id=f"{video}/{seed}",
        video=path or video,
        question=f"What appears between {start} and {end} seconds?",
        answer=GLYPHS[event.glyph],
    )
    return Question(sample, start, end)


def write_video(name: str, path: str | Path) -> None:
    """Write the video as an H.264 mp4 file, about 1 MB. Raises VideoError if the file cannot be written."""
    try:
        opened = av.open(str(path), "w", format="mp4")
    except OSError as error:
        raise VideoError(path, f"cannot be written: {error.strerror or error}") from error
    with opened as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "16", "preset": "veryfast", "g": "32"})
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv444p"
        stream.time_base = Fraction(1, FPS)
        for index in range(DURATION * FPS):
            picture = av.VideoFrame.from_ndarray(world(name).frame(index), format="rgb24")
            picture.pts = index
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


class WorldReader:
    """The frames of worlds without files, behind the interface of `paravt.video.FrameReader`."""

    async def ainfo(self, path: str) -> VideoInfo:
        return VideoInfo(
            path=path, duration=float(DURATION), fps=float(FPS), width=SIDE, height=SIDE, rotation=0, first_pts=0.0,
            frame_count=DURATION * FPS, warnings=(), identity=path,
        )  # fmt: skip

    async def aread(self, path: str, times: Sequence[float], size: tuple[int, int] | None = None) -> Frames:
        if size is not None and size != (SIDE // 2, SIDE // 2):
            raise VideoError(path, f"worlds are read at {SIDE // 2} x {SIDE // 2} px")
        frames: list[Frame | None] = []
        missing: list[str | None] = []
        for time in times:
            inside = 0 <= time < DURATION
            frames.append(_small_frame(path, int(time * FPS)) if inside else None)
            missing.append(None if inside else f"{time:g} seconds is outside the video")
        return Frames(tuple(frames), tuple(missing))

    async def aread_many(
        self, path: str, windows: Sequence[Sequence[float]], size: tuple[int, int] | None = None
    ) -> list[Frames]:
        return [await self.aread(path, times, size) for times in windows]


@lru_cache(maxsize=4096)
def _small_frame(name: str, index: int) -> Frame:
    picture = world(name).frame(index).astype(np.float32)
    half = picture.reshape(SIDE // 2, 2, SIDE // 2, 2, 3).mean((1, 3)).round().astype(np.uint8)
    return Frame(index / FPS, half, f"{name}:{index}")
