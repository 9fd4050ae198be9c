"""What a read gives back: a frame or a reason for every time that was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paravt.types import Frame


@dataclass(frozen=True, eq=False)
class Frames:
    """One entry per asked time, in the asked order: a frame, or None and the reason in `missing`.

    A frame's `time` is its own, at or before the asked one. Times that fall into the same frame give the same
    frame again; see `distinct`.
    """

    frames: tuple[Frame | None, ...]
    missing: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if [f is None for f in self.frames] != [m is not None for m in self.missing]:
            raise ValueError("each asked time gives either a frame or a reason")

    @property
    def present(self) -> tuple[Frame, ...]:
        """The frames there are, in the asked order, repeats included."""
        return tuple(frame for frame in self.frames if frame is not None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """A reason for each frame that could not be had."""
        return tuple(reason for reason in self.missing if reason is not None)


def distinct(frames: Frames | Iterable[Frame | None]) -> tuple[Frame, ...]:
    """The frames there are, each at most once, in the given order.

    A clip with fewer frames than were asked for gives each of its frames once. Pictures that are shown at two times
    are two frames, also if they look the same.
    """
    given = frames.frames if isinstance(frames, Frames) else frames
    return tuple({(frame.time, frame.key): frame for frame in given if frame is not None}.values())
