"""Collapse watch: the failure modes of the paper, said aloud when they happen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paravt.errors import EngineError


@dataclass(frozen=True)
class WatchConfig:
    """Thresholds; a negative one (or above 1 for the equal groups) never warns."""

    min_format_strict: float = 0.2
    """Share of episodes whose every turn keeps to the format."""
    min_kappa: float = 0.1
    """Executed calls per episode."""
    min_entropy: float = 0.02
    """Nats per token."""
    max_equal_groups: float = 0.9
    """Share of groups whose rewards say nothing."""
    max_unscored: float = 0.2
    """Share of episodes that failed."""
    max_mismatch: float = 0.5
    """Mean |log-probability of learner - of sampler|: above it the engine does not run the learner's weights."""
    stop_mismatch: float = 1.0
    """The same mean; above it the run ends at once, before a checkpoint is written."""
    patience: int = 3
    """Steps in a row before the first warning; it is repeated after as many again."""
    stop: bool = False
    """End the run at the first warning."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")


def check_mismatch(config: WatchConfig, step: int, means: Mapping[str, float]) -> None:
    """Raises EngineError for a step that was learned from what another policy said."""
    found = means["mismatch"]
    if 0 <= config.stop_mismatch < found:
        raise EngineError(
            f"step {step}: sampler and learner disagree: mean |log-probability difference| {found:.3g} >"
            f" {config.stop_mismatch:g} (watch.stop_mismatch), at most {means['mismatch_max']:.3g}, weights truncated"
            f" at {means['truncated']:.1%} of tokens; the engine runs other weights or another sampling distribution"
        )


class Watch:
    """Counts, for each danger, how many steps in a row it has lasted."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._lasted: dict[str, int] = {}

    def look(self, step: int, values: Mapping[str, float]) -> list[str]:
        """The warnings of a step, each one line."""
        config = self._config
        groups, episodes = values.get("groups", 0.0), values.get("episodes", 0.0)
        dangers = {
            "the format collapses": _below(values, "f_strict", config.min_format_strict),
            "the tool is no longer called": _below(values, "kappa", config.min_kappa),
            "the entropy collapses": _below(values, "entropy", config.min_entropy),
            "almost no group has a signal": _above("equal_groups", values, groups, config.max_equal_groups),
            "many episodes fail": _above("unscored", values, episodes, config.max_unscored),
            "sampler and learner disagree": _above("token/mismatch", values, 1.0, config.max_mismatch),
        }
        warnings = []
        for what, sign in dangers.items():
            lasted = self._lasted[what] = self._lasted.get(what, 0) + 1 if sign else 0
            if lasted and lasted % config.patience == 0:
                warnings.append(f"step {step}: {what}: {sign}, for {lasted} steps")
        return warnings


def _below(values: Mapping[str, float], name: str, least: float) -> str:
    value = values.get(name, math.nan)
    return f"{name} {value:.3f} < {least:g}" if value < least else ""


def _above(name: str, values: Mapping[str, float], total: float, most: float) -> str:
    share = values.get(name, math.nan) / total if total else math.nan
    return f"{name} {share:.3f} > {most:g}" if share > most else ""
