"""Bounds of the vLLM engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VLLMConfig:
    max_concurrency: int = 64
    """Requests of this process at a time, at each server."""
    tries: int = 3
    """Servers that a request is sent to before it fails."""
    timeout: float = 600.0
    """Seconds for a request, and for each step of an update."""
    patience: float = 600.0
    """Seconds to wait for a server while there is none; what fails then is unscored."""
    start_timeout: float = 600.0
    """Seconds for a server to become healthy."""
    health_every: float = 5.0
    """Seconds between two health checks of a server."""
    canary_tolerance: float = 1e-3
    """How far a server's log-probabilities of the canary may be from the learner's."""
