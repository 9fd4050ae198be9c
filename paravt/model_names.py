"""What can be the name of a model: told at once, before seconds go into importing what loads one."""

from __future__ import annotations

from pathlib import Path

from paravt.errors import ModelError

NEITHER = "no such model directory (and not a hub id of the form owner/name)"


def check_name(path: str | Path) -> None:
    """Raises ModelError for what is no directory here, and cannot be a hub id."""
    name = str(path)
    if not Path(path).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ModelError(f"{name}: {NEITHER}")
