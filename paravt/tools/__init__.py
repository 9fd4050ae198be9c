"""The tools a model can call, by name. A further tool is one more entry of a dict like `TOOLS`."""

from __future__ import annotations

from paravt.tools.base import Tool, ToolArgumentError
from paravt.tools.crop_video import CROP_VIDEO, clock_seconds, crop_window

TOOLS: dict[str, Tool] = {CROP_VIDEO.name: CROP_VIDEO}

__all__ = ["CROP_VIDEO", "TOOLS", "Tool", "ToolArgumentError", "clock_seconds", "crop_window"]
