"""How a run was made: versions and revision, for every run directory."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("paravt", "torch", "transformers", "av", "numpy")


def provenance() -> dict[str, str]:
    """Versions of what matters, and the git revision if the package runs from a checkout ("+" if it has changes)."""
    out = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "not installed"
    revision = _git("rev-parse", "HEAD")
    if revision is not None:
        out["git"] = revision + ("+" if _git("status", "--porcelain") else "")
    return out


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
