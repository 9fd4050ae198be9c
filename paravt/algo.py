"""PARA-GRPO: from the episodes and rewards of a group to per-token credit. Pure functions; numpy, no torch.

Left out on purpose: everything with a gradient (`loss.py`) and everything that needs a batch on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paravt.engines.base import stable_seed
from paravt.structure import TokenBytes, trace_verdicts
from paravt.types import Episode, Row, Trace

Aggregation = Literal["token_mean", "seq_mean", "dr_grpo"]
FRAME_BUDGETS = (4, 8, 16, 32, 64)
_STD_EPSILON = 1e-4
"""What TRL adds to the standard deviation."""


@dataclass(frozen=True)
class AnchorConfig:
    """Selective anchoring. `credit` is "token" (marks on structural tokens), "marks" (the same marks, averaged over the
    episode into its reward), "sequence" (a part of the format reward, as in the public release: see
    `RewardConfig.anchor_weight`) or "off"."""

    credit: Literal["token", "marks", "sequence", "off"] = "token"
    """Where the anchor is paid."""
    alpha: float = 1.0
    """The mark of a structural token that obeys the template."""
    gamma: float = 1.0
    """What one that breaks it is marked down by."""
    weight: float = 0.5
    """Lambda: marks times this are added to the advantages ("token"), their mean times this to the reward ("marks")."""
    centred: bool = True
    """Centred marks depend on alpha + gamma alone: to study gamma by itself, turn this off."""

    @property
    def on_tokens(self) -> bool:
        return self.credit == "token" and self.weight != 0


@dataclass(frozen=True)
class CreditConfig:
    """What `rows_from_group` needs to know."""

    anchor: AnchorConfig = field(default_factory=AnchorConfig)
    std: bool = True
    """Divide advantages by the group's standard deviation; False is Dr. GRPO."""
    tolerance: float = 1e-6
    """Rewards of a group that differ by no more are equal."""
    subagents: bool = True
    """Make rows of the sub-agents' traces too."""


# ---------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class GroupAdvantages:
    advantages: tuple[float, ...]
    """One per episode; 0.0 for unscored ones."""
    equal: bool
    """True if the rewards say nothing: they are all equal, or fewer than two are scored."""
    scored: int


def group_advantages(rewards: Sequence[float | None], *, std: bool = True, tolerance: float = 1e-6) -> GroupAdvantages:
    """(reward - mean) / (std + 1e-4) over the scored members of one group.

    rewards: one per episode; None (or a value that isn't finite) is unscored and takes no part. Rewards are equal if
    they differ by at most `tolerance`, relative to the largest where that is above 1. `std` is the unbiased one, as in
    TRL (source: GRPO, arXiv 2402.03300; without std Dr. GRPO, arXiv 2503.20783).
    """
    known = np.array([r for r in rewards if r is not None and math.isfinite(r)], dtype=np.float64)
    scored = len(known)
    if scored < 2 or np.ptp(known) <= tolerance * max(1.0, float(np.abs(known).max())):
        return GroupAdvantages((0.0,) * len(rewards), True, scored)
    mean = float(known.mean())
    scale = float(known.std(ddof=1)) + _STD_EPSILON if std else 1.0
    advantages = (0.0 if r is None or not math.isfinite(r) else (r - mean) / scale for r in rewards)
    return GroupAdvantages(tuple(advantages), False, scored)


def draw_frame_budget(
    run_seed: int,
    sample_id: str,
    visit: int,
    choices: Sequence[int] = FRAME_BUDGETS,
    weights: Sequence[float] | None = None,
) -> int:
    """nFrames gating: K, drawn from `choices` for all episodes of a prompt at its `visit`-th visit; uniform without
    `weights`.

    The same in every process and on every machine. Source: paper, K ~ Uniform{4, 8, 16, 32, 64}.
    """
    number = stable_seed("frame budget", run_seed, visit, sample_id)
    if weights is None:
        return choices[number % len(choices)]
    edges = np.cumsum(weights) / np.sum(weights)
    return choices[int(np.searchsorted(edges[:-1], number / 2**63, side="right"))]


def pass_rate_weights(rates: Sequence[float | None], floor: float = 0.05) -> list[float]:
    """Weights of frame budgets from the accuracy at each: p (1 - p), the variance that a group's signal comes from,
    and at least `floor`. A budget that was not seen counts as one that is passed half of the time."""
    return [max(floor, p * (1 - p)) for p in (0.5 if rate is None else rate for rate in rates)]


# ---------------------------------------------------------------------------------------------------- the anchor


def marks(verdicts: Sequence[int], anchor: AnchorConfig) -> np.ndarray:
    """+alpha where a structural token obeys, -gamma where one breaks, else 0. Shape (T,), before centring."""
    signs_T = np.asarray(verdicts, dtype=np.int64)
    return np.where(signs_T > 0, anchor.alpha, np.where(signs_T < 0, -anchor.gamma, 0.0))


def marks_mean(verdicts_by_row: Sequence[Sequence[int]], anchor: AnchorConfig) -> float:
    """The mean mark over all structural positions of the rows; 0.0 if there are none."""
    obeying = sum(sum(v > 0 for v in row) for row in verdicts_by_row)
    breaking = sum(sum(v < 0 for v in row) for row in verdicts_by_row)
    total = obeying + breaking
    return anchor.alpha - (anchor.alpha + anchor.gamma) * breaking / total if total else 0.0


def center_marks(
    verdicts_by_row: Sequence[Sequence[int]], anchor: AnchorConfig, center: float | None = None
) -> list[np.ndarray]:
    """The marks of each row minus their mean over the structural positions (of `verdicts_by_row`, unless `center` is
    given); 0 elsewhere. Without it, paths with more structural tokens would be favoured for their number."""
    center = marks_mean(verdicts_by_row, anchor) if center is None else center
    structural = (np.asarray(row, dtype=np.int64) != 0 for row in verdicts_by_row)
    return [marks(row, anchor) - center * where for row, where in zip(verdicts_by_row, structural, strict=True)]


def token_advantages(mask: np.ndarray, advantage: float, marks_T: np.ndarray | None, weight: float) -> np.ndarray:
    """advantage + weight * mark at sampled tokens (True in `mask`), 0 elsewhere. Shapes (T,)."""
    credit_T = np.full(mask.shape, advantage, dtype=np.float64)
    if marks_T is not None:
        if marks_T.shape != mask.shape:
            raise ValueError(f"{marks_T.shape} marks for {mask.shape} tokens")
        credit_T += weight * marks_T
    return np.where(mask, credit_T, 0.0).astype(np.float32)


def with_marks(
    rewards: Sequence[float | None], verdicts_by_row: Sequence[Sequence[int]], anchor: AnchorConfig
) -> list[float | None]:
    """Sequence-level credit by the same marks: each episode's reward plus weight * the mean mark over its structural
    positions. Unscored episodes (None) stay so."""
    return [
        None if reward is None else reward + anchor.weight * marks_mean([verdicts], anchor)
        for reward, verdicts in zip(rewards, verdicts_by_row, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- rows


def rows_from_group(
    episodes: Sequence[Episode],
    rewards: Sequence[float | None],
    config: CreditConfig,
    token_bytes: TokenBytes,
    *,
    group_id: str,
    center: float | None = None,
) -> list[Row]:
    """The rows of the G episodes of one prompt, main traces and sub-agents.

    rewards: one per episode, None where unscored; such episodes give no rows. A group whose rewards are all equal gives
    only the rows that carry anchor marks. `group_id` must be unique in the batch (a prompt can be in it twice).
    `center` is the mean mark of the *batch* (`batch_marks_mean`); None takes the group's own. Rows without sampled
    tokens are left out.

    Raises ValueError if a sampled token comes without its log-probability or its policy version.
    """
    if len(episodes) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards for {len(episodes)} episodes")
    if config.anchor.credit == "marks":
        rewards = with_marks(rewards, [trace_verdicts(e.main, token_bytes) for e in episodes], config.anchor)
    group = group_advantages(rewards, std=config.std, tolerance=config.tolerance)
    kept = [n for n, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)]
    marked: dict[int, np.ndarray] = {}
    if config.anchor.on_tokens:
        verdicts = [trace_verdicts(episodes[n].main, token_bytes) for n in kept]
        if not config.anchor.centred:
            center = 0.0
        marked = dict(zip(kept, center_marks(verdicts, config.anchor, center), strict=True))
    rows = []
    for n in kept:
        traces = episodes[n].traces if config.subagents else (episodes[n].main,)
        for trace in traces:
            marks_T = marked.get(n) if trace.role == "main" else None
            row = _row(trace, group.advantages[n], marks_T, config.anchor.weight, group_id, f"{group_id}/{n}")
            if row.mask.any() and (not group.equal or np.abs(row.advantages).max() > config.tolerance):
                rows.append(row)
    return rows


def batch_marks_mean(
    groups: Sequence[tuple[Sequence[Episode], Sequence[float | None]]], anchor: AnchorConfig, token_bytes: TokenBytes
) -> float:
    """The `center` of a batch: the mean mark over the structural positions of all scored episodes of its groups."""
    verdicts = [
        trace_verdicts(episode.main, token_bytes)
        for episodes, rewards in groups
        for episode, reward in zip(episodes, rewards, strict=True)
        if reward is not None and math.isfinite(reward)
    ]
    return marks_mean(verdicts, anchor)


def _row(
    trace: Trace, advantage: float, marks_T: np.ndarray | None, weight: float, group_id: str, episode_id: str
) -> Row:
    sampled = [segment for segment in trace.segments if segment.sampled]
    versions = [segment.policy_version for segment in sampled if segment.policy_version is not None]
    if len(versions) < len(sampled) or any(segment.logprobs is None for segment in sampled):
        raise ValueError(f"{trace.name}: sampled without log-probabilities or policy version; can't be trained on")
    mask_T = np.array(trace.loss_mask, dtype=bool)
    return Row(
        ids=np.array(trace.ids, dtype=np.int64),
        mask=mask_T,
        logprobs=np.array(trace.logprobs, dtype=np.float32),
        advantages=token_advantages(mask_T, advantage, marks_T, weight),
        images=trace.images,
        group_id=group_id,
        episode_id=episode_id,
        role=trace.role,
        policy_version=min(versions, default=0),  # the oldest: staleness is never understated
    )


# ---------------------------------------------------------------------------------------------------- loss weights


@dataclass(frozen=True)
class LossCounts:
    """Denominators of the loss. Counts of ranks are added up: `sum(counts, LossCounts())`."""

    main_tokens: int = 0
    main_rows: int = 0
    crops: Mapping[str, int] = field(default_factory=dict)
    """Rows of sub-agents by episode id."""

    @property
    def rows(self) -> int:
        return self.main_rows + sum(self.crops.values())

    def __add__(self, other: LossCounts) -> LossCounts:
        crops = {key: self.crops.get(key, 0) + other.crops.get(key, 0) for key in (*self.crops, *other.crops)}
        return LossCounts(self.main_tokens + other.main_tokens, self.main_rows + other.main_rows, crops)


def loss_counts(rows: Sequence[Row]) -> LossCounts:
    """The counts of these rows; rows without sampled tokens don't count."""
    trained = [row for row in rows if row.mask.any()]
    main = [row for row in trained if row.role == "main"]
    crops: dict[str, int] = {}
    for row in trained:
        if row.role == "crop":
            crops[row.episode_id] = crops.get(row.episode_id, 0) + 1
    return LossCounts(sum(int(row.mask.sum()) for row in main), len(main), crops)


def loss_weights(
    rows: Sequence[Row],
    subagent_weight: float = 1.0,
    aggregation: Aggregation = "token_mean",
    *,
    counts: LossCounts | None = None,
    max_tokens: int | None = None,
) -> list[np.ndarray]:
    """Per-token weights of each row, shapes (T,), with sum(weight * loss per token) = L over all ranks.

    L = L_main + subagent_weight * mean over episodes (mean over its crops (mean over tokens)), episodes that have
    crops. L_main is the mean over all sampled tokens of main rows (`token_mean`, DAPO), the mean over rows of the mean
    over tokens (`seq_mean`, GRPO), or the sum divided by rows * max_tokens (`dr_grpo`, as in TRL).

    counts: the counts of all ranks and microbatches of the step; None if `rows` is all there is.
    """
    counts = counts or loss_counts(rows)
    if aggregation == "dr_grpo" and not max_tokens:
        raise ValueError("dr_grpo divides by max_tokens, the most tokens that a main trace may sample: give it")
    out = []
    for row in rows:
        tokens = int(row.mask.sum())
        if tokens == 0:
            weight = 0.0
        elif row.role == "crop":
            weight = subagent_weight / (len(counts.crops) * counts.crops[row.episode_id] * tokens)
        elif aggregation == "token_mean":
            weight = 1.0 / counts.main_tokens
        elif aggregation == "seq_mean":
            weight = 1.0 / (counts.main_rows * tokens)
        else:
            weight = 1.0 / (counts.main_rows * (max_tokens or 1))
        out.append(np.where(row.mask, weight, 0.0))
    return out
