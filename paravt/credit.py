"""What each sampled token of an episode was paid, for people to look at: saved beside the episodes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from paravt.structure import TokenBytes
from paravt.types import Episode, Row, Trace


class TraceCredit(TypedDict):
    """Of the sampled tokens of a trace, in their order."""

    advantages: list[float] | None
    """Group advantage and anchor marks together; None if the trace gave no row, and nothing was learned from it."""
    spelled: list[str]
    """Each token's own bytes as text; "\N{REPLACEMENT CHARACTER}" for a part of a character."""


def group_credit(
    episodes: Sequence[Episode], rows: Sequence[Row], group_id: str, token_bytes: TokenBytes
) -> list[dict[str, TraceCredit]]:
    """For each episode of a group, by the names of its traces. `rows` are what `rows_from_group` made of the group."""
    out = []
    for n, episode in enumerate(episodes):
        mine = [row for row in rows if row.episode_id == f"{group_id}/{n}"]
        out.append({trace.name: _trace_credit(trace, mine, token_bytes) for trace in episode.traces})
    return out


def _trace_credit(trace: Trace, rows: Sequence[Row], token_bytes: TokenBytes) -> TraceCredit:
    # Sub-agents of an episode share its advantage: of two with the same ids, either row will do.
    row = next((row for row in rows if row.role == trace.role and tuple(row.ids.tolist()) == trace.ids), None)
    sampled = [i for segment in trace if segment.sampled for i in segment.ids]
    return {
        "advantages": None if row is None else row.advantages[row.mask].tolist(),
        "spelled": [piece.decode("utf-8", "replace") for piece in token_bytes(sampled)],
    }
