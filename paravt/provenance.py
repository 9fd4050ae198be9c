"""How a run was made: versions and revision, for every run directory."""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import IO

from paravt.errors import RecipeError
from paravt.files import write_whole

_MOST = 120
"""Characters of a setting in a message: prompts are settings, too."""
_PACKAGES = ("paravt", "torch", "transformers", "av", "numpy")


def provenance() -> dict[str, str]:
    """Versions of what matters, and the git revision if the package runs from a checkout ("+" if it has changes)."""
    out = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "not installed"
    revision = _git("rev-parse", "HEAD")
    if revision is not None:
        out["git"] = revision + ("+" if _git("status", "--porcelain") else "")
    return out


def claim_run(out: Path, recipe: str) -> IO[str]:
    """Make a run's directory and write down how the run is made, or check that it is the same run.

    The directory is this process's own for as long as the returned file is open.

    Raises RecipeError if the directory holds a run of another recipe, is in use, or cannot be written to.
    """
    made = out / "recipe.json"
    lock = lock_directory(out)
    try:
        if not made.exists():
            write_whole(made, recipe + "\n")
        elif made.read_text(encoding="utf-8", errors="replace") != recipe + "\n":
            raise RecipeError(f"{out}: holds a run of another recipe{_difference(made, recipe)}; choose another --out")
        write_whole(out / "versions.json", json.dumps(provenance(), indent=1) + "\n")
    except RecipeError:
        lock.close()
        raise
    except OSError as error:
        lock.close()
        raise RecipeError(f"{out}: cannot be written to: {error.strerror or error}") from error
    return lock


def _difference(made: Path, recipe: str) -> str:
    """The first setting in which two recipes differ, in words."""
    try:
        old, new = json.loads(made.read_text(encoding="utf-8")), json.loads(recipe)
    except (ValueError, RecursionError):
        return ""
    where: list[str] = []
    while isinstance(old, dict) and isinstance(new, dict):
        key = next((key for key in (*new, *old) if old.get(key) != new.get(key)), None)
        if key is None:
            return ""
        where.append(key)
        old, new = old.get(key), new.get(key)
    return f" ({'.'.join(where)}: {_short(old)}, now {_short(new)})"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST else text[:_MOST] + "..."


def lock_directory(out: Path) -> IO[str]:
    """Make a directory, which is this process's own for as long as the returned file is open.

    Raises RecipeError if it is in use or cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(f"{out}: another process is running there") from None
    except OSError as error:
        raise RecipeError(f"{out}: cannot be written to: {error.strerror or error}") from error
    return lock


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
