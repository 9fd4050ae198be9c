"""`crop_video(start_time, end_time)`: look closely at a window of the video."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from paravt.tools.base import Tool, ToolArgumentError
from paravt.types import Window

_NUMBER = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*(?:s|secs?|seconds?)?", re.IGNORECASE)
_CLOCK = re.compile(r"(?:([0-9]+):)?([0-9]+):([0-5]?[0-9](?:\.[0-9]*)?)")


def crop_window(arguments: Mapping[str, Any]) -> Window:
    """The window (seconds) of normalised arguments, that is of `ToolCall.arguments`."""
    return Window(float(arguments["start_time"]), float(arguments["end_time"]))


def _shown(value: object) -> str:
    """`value` on one short line, for an error message. Escapes what isn't printable (surrogates, newlines)."""
    text = ascii(value) if isinstance(value, str) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def clock_seconds(text: str) -> float | None:
    """Seconds of a time as a number or a clock ("12.5", "12 s", "1:05", "1:00:05.5"); None for any other text."""
    if match := _NUMBER.fullmatch(text):
        return float(match[1])
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds = match.groups()
        if hours is not None and float(minutes) >= 60:
            return None
        return 3600 * float(hours or 0) + 60 * float(minutes) + float(seconds)
    return None


def _seconds(name: str, value: object) -> tuple[float, bool]:
    """A time argument in seconds, and whether it was anything but a JSON number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ToolArgumentError(f"{name} must be a number of seconds, not {_shown(value)}")
    repaired = isinstance(value, str)
    if isinstance(value, str):
        seconds = clock_seconds(value.strip())
        if seconds is None:
            raise ToolArgumentError(f"{name} must be a number of seconds, not {_shown(value)}")
    else:
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    if not math.isfinite(seconds):
        raise ToolArgumentError(f"{name} must be a finite number of seconds")
    return seconds, repaired


def _is_text(value: object) -> bool:
    """Whether `value` is a string that can be printed and stored: no NUL, no lone surrogate."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _normalise(arguments: Mapping[str, object]) -> tuple[dict[str, Any], bool]:
    repaired = False
    out: dict[str, Any] = {}
    used = set()
    for name, alias in (("start_time", "start"), ("end_time", "end")):
        key = name if name in arguments else alias
        if arguments.get(key) is None:
            raise ToolArgumentError(f"{name} is missing: give start_time and end_time in seconds")
        used.add(key)
        out[name], mended = _seconds(name, arguments[key])
        repaired |= mended or key == alias
    if out["end_time"] < 0:
        raise ToolArgumentError(f"end_time ({out['end_time']:g}) must not be negative")
    if out["start_time"] < 0:
        out["start_time"], repaired = 0.0, True
    out["start_time"] += 0.0  # -0.0 becomes 0.0
    if out["end_time"] <= out["start_time"]:
        raise ToolArgumentError(
            f"end_time ({out['end_time']:g}) must be greater than start_time ({out['start_time']:g})"
        )
    # The file is never chosen by the model: a video_path that says nothing is no reason to refuse the call.
    if _is_text(arguments.get("video_path")):
        out["video_path"] = arguments["video_path"]
        used.add("video_path")
    return out, repaired or not used.issuperset(arguments)


CROP_VIDEO = Tool(
    name="crop_video",
    schema={
        "type": "function",
        "function": {
            "name": "crop_video",
            "description": "Look closely at a segment of the video: frames are sampled between two times.",
            "parameters": {
                "type": "object",
                "properties": {
                    "video_path": {"type": "string", "description": "Name of the video (optional)."},
                    "start_time": {"type": "number", "description": "Start of the segment in seconds."},
                    "end_time": {"type": "number", "description": "End of the segment in seconds."},
                },
                "required": ["start_time", "end_time"],
            },
        },
    },
    normalise=_normalise,
)
