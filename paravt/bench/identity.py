"""What a run's configuration is made of: rows of another model, prompt, budget or seed are never taken for its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from paravt.bench.modes import Mode
from paravt.episode_config import EpisodeConfig

_PIECES, _PIECE = 16, 65_536
"""Of a large file: so many pieces of so many bytes, evenly spread."""
_SPEED_ONLY = ("call_timeout", "max_parallel")
"""Settings of an episode that change how long it takes, not what is said."""


def recipe(mode: Mode, model: Mapping[str, Any], config: EpisodeConfig) -> dict[str, Any]:
    """The configuration of a run: what its rows depend on."""
    made = mode.recipe(config)
    episode = {name: value for name, value in made["episode"].items() if name not in _SPEED_ONLY}
    return {**made, "model": dict(model), "episode": episode}


def local_model(name: str, path: str | Path, dtype: str) -> dict[str, Any]:
    """Names a checkpoint by its content: another one in the same directory is another model."""
    directory = Path(path)
    if directory.is_dir():
        return {"name": name, "content": fingerprint(directory), "dtype": dtype}
    found = try_to_load_from_cache(str(path), "config.json")
    revision = Path(found).parent.name if isinstance(found, str) else None
    return {"name": name, "revision": revision, "dtype": dtype}


def served_model(name: str) -> dict[str, Any]:
    """A server says no more about its model than the name."""
    return {"name": name, "served": True}


def fingerprint(directory: Path) -> str:
    """A hash of the names, sizes and contents of a checkpoint's files; of large ones, of pieces all over them (weights
    that were trained further differ everywhere). Raises OSError."""
    found = blake2b(digest_size=16)
    for path in sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            if size <= _PIECES * _PIECE:
                found.update(file.read())
                continue
            for piece in range(_PIECES):
                file.seek((size - _PIECE) * piece // (_PIECES - 1), os.SEEK_SET)
                found.update(file.read(_PIECE))
    return found.hexdigest()
