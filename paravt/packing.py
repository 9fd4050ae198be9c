"""Rows to packed batches: which rows share a prompt, which go through the model together, and as what tensors.

In one sequence without padding, as a rule; where there is no attention for that, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from paravt.chat import TokenChat
from paravt.models import QwenVL
from paravt.prefix_attention import Block, Layout
from paravt.types import Frame, Row


@dataclass(frozen=True)
class Shared:
    """Rows (by index) that begin with the same prompt of `prompt` tokens, images included."""

    prompt: int
    rows: tuple[int, ...]
    suffixes: tuple[int, ...]
    """Tokens of each row after the prompt that go through the model: the last scored token predicts nothing."""

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.suffixes)


def share(chat: TokenChat, rows: Sequence[Row], *, share_prompts: bool = True) -> list[Shared]:
    """Rows by prompt, in order of first appearance; rows without a scored token are left out.

    The prompt is all that comes before the first scored token: in main traces of a group that is their whole first
    segment. With `share_prompts` False every row stays alone: the reference to measure and test against.
    """
    found: dict[object, list[tuple[int, int, int]]] = {}
    for index, row in enumerate(rows):
        scored = np.flatnonzero(row.mask)
        if not len(scored):
            continue
        prompt, stop = int(scored[0]), int(scored[-1])
        if not prompt:
            raise ValueError(f"row {index} of episode {row.episode_id}: nothing comes before its first scored token")
        # Image tokens are equal whatever they show: the frames' keys tell what it is.
        key: object = index
        if share_prompts:
            ids = np.ascontiguousarray(row.ids[:prompt], np.int64)
            key = (ids.tobytes(), tuple(frame.key for frame in _frames_before(chat, row, prompt)))
        found.setdefault(key, []).append((index, prompt, stop))
    return [
        Shared(members[0][1], tuple(index for index, _, _ in members), tuple(stop - p for _, p, stop in members))
        for members in found.values()
    ]


def plan(shared: Sequence[Shared], token_budget: int) -> list[list[Shared]]:
    """Microbatches of at most `token_budget` tokens, as few as first-fit gives.

    What is too large for one is split by rows, and pays for its prompt again; a row alone is never split, however long.
    """
    pieces = [piece for group in shared for piece in _split(group, token_budget)]
    batches: list[list[Shared]] = []
    free: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        at = next((i for i, room in enumerate(free) if piece.tokens <= room), None)
        if at is None:
            batches.append([])
            free.append(token_budget)
            at = -1
        batches[at].append(piece)
        free[at] -= piece.tokens
    return batches


def _split(group: Shared, token_budget: int) -> list[Shared]:
    out: list[tuple[list[int], list[int]]] = []
    room = 0
    for row, suffix in zip(group.rows, group.suffixes, strict=True):
        if not out or suffix > room:
            out.append(([], []))
            room = token_budget - group.prompt
        out[-1][0].append(row)
        out[-1][1].append(suffix)
        room -= suffix
    return [Shared(group.prompt, tuple(rows), tuple(suffixes)) for rows, suffixes in out]


def bucket(shared: Sequence[Shared], token_budget: int) -> list[list[Shared]]:
    """The same for rows alone that are padded: rows of similar length together, at most the budget with the padding."""
    batches: list[list[Shared]] = []
    for row in sorted(shared, key=lambda row: -row.tokens):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > token_budget:
            batches.append([])
        batches[-1].append(row)
    return batches


@dataclass(frozen=True, eq=False)
class Packed:
    """One microbatch. B x T tokens go through the model, N of the rows' tokens are scored."""

    ids_BT: Tensor
    positions_3BT: Tensor
    layout: Layout | None
    """What the one sequence is made of; None: of padded rows, and attention is that of any batch."""
    frames: tuple[Frame, ...]
    """In the order of their placeholders."""
    predictors_N: Tensor
    """Among the B x T, the token whose hidden state predicts each scored one: for the first of a suffix, the prompt's
    last."""
    targets_N: Tensor
    scored: tuple[tuple[int, np.ndarray], ...]
    """Per row its index and the positions of its scored tokens, in the order of N."""

    def gather(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """(N,) of arrays that are aligned with the rows' ids."""
        parts = [np.asarray(arrays[index], np.float64)[at] for index, at in self.scored]
        return torch.from_numpy(np.concatenate(parts)).to(self.ids_BT.device)

    def scatter(self, values_N: Tensor, arrays: Sequence[np.ndarray]) -> None:
        """The reverse, into `arrays`."""
        parts = np.split(values_N.double().cpu().numpy(), np.cumsum([len(at) for _, at in self.scored])[:-1])
        for (index, at), part in zip(self.scored, parts, strict=True):
            arrays[index][at] = part


def pack(model: QwenVL, rows: Sequence[Row], groups: Sequence[Shared]) -> Packed:
    """All in one sequence. Raises ValueError for a row with a scored token that the sampler could not have sampled."""
    banned = np.array(model.banned_ids)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    frames: list[Frame] = []
    blocks: list[Block] = []
    predictors: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    scored: list[tuple[int, np.ndarray]] = []
    end = 0
    for group in groups:
        start, prompt = end, group.prompt
        first = rows[group.rows[0]]
        prompt_frames = _frames_before(model.chat, first, prompt)
        prompt_positions, after = model.positions(first.ids[:prompt], prompt_frames)
        ids.append(first.ids[:prompt])
        positions.append(prompt_positions)
        frames += prompt_frames
        end += prompt
        for index, suffix in zip(group.rows, group.suffixes, strict=True):
            row, stop = rows[index], prompt + suffix
            own_frames = _frames_before(model.chat, row, stop)[len(prompt_frames) :]
            ids.append(row.ids[prompt:stop])
            positions.append(model.positions(row.ids[prompt:stop], own_frames, after)[0])
            frames += own_frames
            at = np.flatnonzero(row.mask)
            if np.isin(row.ids[at], banned).any():
                raise ValueError(
                    f"row {index} of episode {row.episode_id}: a scored token is one that is never sampled"
                )
            predictors.append(np.where(at == prompt, start + prompt, end + at - prompt) - 1)
            targets.append(row.ids[at])
            scored.append((index, at))
            end += suffix
        suffixes = tuple(suffix for suffix in group.suffixes if suffix)
        # A row alone is causal from end to end: one piece.
        blocks.append(Block(prompt, suffixes) if len(group.rows) > 1 else Block(group.tokens))
    to = model.device
    return Packed(
        ids_BT=_tensor(ids)[None].to(to),
        positions_3BT=torch.from_numpy(np.concatenate(positions, 1))[:, None].to(to),
        layout=Layout(tuple(blocks)),
        frames=tuple(frames),
        predictors_N=_tensor(predictors).to(to),
        targets_N=_tensor(targets).to(to),
        scored=tuple(scored),
    )


def pad(packed: Packed, filler: int) -> Packed:
    """Packed rows, none of which share a prompt, each on its own and filled up to the longest.

    What is filled in comes last, so that causal attention does not see it.
    """
    assert packed.layout is not None
    lengths = packed.layout.pieces
    rows, longest = len(lengths), max(lengths)
    places = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
    places_T = torch.cat(places).to(packed.ids_BT.device)
    ids_BT = packed.ids_BT.new_full((rows * longest,), filler)
    ids_BT[places_T] = packed.ids_BT[0]
    positions_3BT = packed.positions_3BT.new_zeros((3, rows * longest))
    positions_3BT[:, places_T] = packed.positions_3BT[:, 0]
    return replace(
        packed,
        ids_BT=ids_BT.view(rows, longest),
        positions_3BT=positions_3BT.view(3, rows, longest),
        layout=None,
        predictors_N=places_T[packed.predictors_N],
    )


def dummy_row(model: QwenVL) -> Row:
    """The smallest row with an image and a scored token, for a microbatch that must exist and must not count.

    Sharded parameters are gathered by all ranks together, those of the vision tower too: a rank that had no image in
    a microbatch would not take part, and the others would wait for it.
    """
    frame = next(frame for frame in map(partial(_black, model.chat.frame_factor), count(1)) if _fits(model.chat, frame))
    ids = [model.chat.image_id] * model.chat.image_tokens(frame) + [model.chat.end_id] * 2
    mask = np.arange(len(ids)) == len(ids) - 1
    zeros = np.zeros(len(ids))
    return Row(np.array(ids), mask, zeros, zeros, (frame,), "dummy", "dummy", "main", 0)


def _black(factor: int, size: int) -> Frame:
    return Frame(0.0, np.zeros((size * factor, size * factor, 3), np.uint8), f"dummy/{size}")


def _fits(chat: TokenChat, frame: Frame) -> bool:
    try:
        return chat.image_tokens(frame) > 0
    except ValueError:
        return False


def _frames_before(chat: TokenChat, row: Row, stop: int) -> list[Frame]:
    """The frames whose placeholders are in `row.ids[:stop]`."""
    left = int((row.ids[:stop] == chat.image_id).sum())
    out: list[Frame] = []
    for frame in row.images:
        if left <= 0:
            break
        out.append(frame)
        left -= chat.image_tokens(frame)
    if left:
        raise ValueError(f"episode {row.episode_id}: placeholders and frames do not match in the first {stop} tokens")
    return out


def _tensor(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))
