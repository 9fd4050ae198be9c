"""What a step of reinforcement learning takes: tokens, multiplications, bytes and seconds, as pure functions.

A FLOP is one multiplication or one addition, so a weight that a token goes through costs 2; only products of matrices
are counted. How much work a step is depends on how episodes go (`Behaviour`), and its time on the shares of the peaks
that are reached (`Hardware`): both are guesses, which a user can replace. docs/plan.md says more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pydantic import BaseModel, Field

OPERATORS = {2: 77, 4: 49}
"""That a layer of the text model calls in a decoding pass of the local engine, by bytes of a number."""


@dataclass(frozen=True)
class Shape:
    """What the formulas need to know of a model. Weights are those of matrices."""

    hidden: int
    layers: int
    queries: int
    """Heads of queries, times their size."""
    keys: int
    """Heads of keys, times their size; values have as many."""
    feed_forward: int
    vocabulary: int
    layer_weights: int
    """Of all layers of the text model."""
    vision_hidden: int
    vision_layers: int
    vision_feed_forward: int
    embedding_weights: int
    """Of the embedding of patches."""
    block_weights: int
    """Of all blocks of the vision tower."""
    merger_weights: int
    """Of what makes one visual token of several patches, at the tower's end and at other depths."""
    mergers: int
    patches: int
    """Of one visual token."""

    @property
    def read_weights(self) -> int:
        """Of the text model and its head: what decoding a token reads."""
        return self.layer_weights + self.hidden * self.vocabulary


@dataclass(frozen=True)
class Work:
    """What goes through a model. Averages, so not always whole numbers."""

    tokens: float = 0.0
    pairs: float = 0.0
    """Of a token and one that it sees."""
    scored: float = 0.0
    """Tokens at which the head of the vocabulary runs."""
    patches: float = 0.0
    patch_pairs: float = 0.0
    """Of two patches of a frame."""

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Flops:
    text: float
    attention: float
    head: float
    vision: float
    vision_attention: float

    @property
    def total(self) -> float:
        return self.text + self.attention + self.head + self.vision + self.vision_attention


def forward_flops(shape: Shape, work: Work) -> Flops:
    """2 for each weight and token; attention: 2 for the score and 2 for the value, per pair and unit of the queries
    (Kaplan et al. 2020, section 2.1, with the pairs of causal attention, which flash attention computes, in place of
    all). Of the vision tower likewise, per patch."""
    visual = work.patches / shape.patches
    return Flops(
        text=2 * shape.layer_weights * work.tokens,
        attention=4 * shape.layers * shape.queries * work.pairs,
        head=2 * shape.hidden * shape.vocabulary * work.scored,
        vision=2 * (shape.embedding_weights + shape.block_weights) * work.patches + 2 * shape.merger_weights * visual,
        vision_attention=4 * shape.vision_layers * shape.vision_hidden * work.patch_pairs,
    )


def training_flops(
    shape: Shape, work: Work, *, checkpointing: bool, adapters: int = 0, head_again: bool = True
) -> Flops:
    """Forward and backward. `adapters`: their weights, if they alone are trained; 0: all weights are.

    Backward costs 2 for each weight and token for the gradient of what came in, and 2 for that of the weight; of
    attention 2.5 times the forward pass, as flash attention computes the scores again (Dao 2023, section 4.1).
    Patches have no gradient. `checkpointing` runs layers and blocks forward once more, up to their last matrix, whose
    result nobody needs; `head_again` the head, which is so if more tokens are scored than fit one chunk of logits.
    """
    forward = forward_flops(shape, work)
    blocks, embedding = 2 * shape.block_weights * work.patches, 2 * shape.embedding_weights * work.patches
    mergers = forward.vision - blocks - embedding
    last = 0 if adapters else 2 * shape.layers * shape.hidden * shape.feed_forward * work.tokens
    vision_last = 2 * shape.vision_layers * shape.vision_hidden * shape.vision_feed_forward * work.patches
    again = 1 if checkpointing else 0
    trained = 2 * adapters * work.tokens
    return Flops(
        text=(2 if adapters else 3) * forward.text + again * (forward.text - last) + (3 + again) * trained,
        attention=(3.5 + again) * forward.attention,
        head=(2 if adapters else 3) * forward.head + (forward.head if head_again else 0),
        vision=forward.vision if adapters else 3 * (blocks + mergers) + 2 * embedding + again * (blocks - vision_last),
        vision_attention=(1 if adapters else 3.5 + again) * forward.vision_attention,
    )


def activation_bytes(shape: Shape, size: int, tokens: float, patches: float, *, checkpointing: bool) -> float:
    """What the backward pass of `tokens` and of `patches` that are trained on keeps, with numbers of `size` bytes (4
    or 2), without the logits.

    Per token and layer: what goes into each norm, in 32 bits, and what comes out before and after its weight; rotated
    queries and keys, values, attention's output, and four of the feed-forward part. With checkpointing only what goes
    into each layer is kept, and all of one layer at a time.
    """
    norm = 4 + size  # beside its output
    attended = (norm + 2 * size) * shape.queries + (norm + size) * shape.keys + size * shape.keys
    layer = tokens * (2 * (norm + size) * shape.hidden + attended + 4 * size * shape.feed_forward)
    block = patches * size * (10 * shape.vision_hidden + 2 * shape.vision_feed_forward)
    rest = size * patches * (4 * shape.mergers * shape.vision_hidden + shape.embedding_weights / shape.vision_hidden)
    if not checkpointing:
        return shape.layers * layer + shape.vision_layers * block + rest
    inputs = size * (shape.layers * shape.hidden * tokens + shape.vision_layers * shape.vision_hidden * patches)
    return inputs + max(layer, block) + rest


def logits_bytes(shape: Shape, chunk: int = 512) -> int:
    """Of one chunk of scored tokens: logits, what the entropy takes, and gradients, five numbers of 32 bits each."""
    return 5 * 4 * chunk * shape.vocabulary


def key_value_bytes(shape: Shape, size: int) -> int:
    """Of one token."""
    return 2 * shape.layers * shape.keys * size


# ---------------------------------------------------------------------- how much work a step is


@dataclass(frozen=True)
class Texts:
    """Tokens of what is said around frames and sampled tokens."""

    main: int
    """The system turn with the tool, and a question of some length."""
    crop: int
    """What a sub-agent is told."""
    frame: int
    """The time of a frame, and the marks around it."""
    turn: int
    """The header of a turn that reads replies."""
    reply: int
    """Around a report."""


@dataclass(frozen=True)
class Behaviour:
    """How an episode goes, on average: nobody knows before it was played."""

    turns: int = 2
    """Of the main agent; calls are in all but the last one."""
    calls: float = 2.0
    turn_tokens: float = 256.0
    """Sampled in a turn."""
    report_tokens: float = 96.0
    """Sampled by a sub-agent."""
    window_frames: float = 16.0
    """Of a sub-agent."""


@dataclass(frozen=True)
class Lengths:
    """Of an episode, in tokens."""

    prompt: float
    """Of the main trace up to its first turn."""
    suffix: float
    """All that follows."""
    sampled: float
    """Of the suffix."""
    crop: float
    """A sub-agent's prompt."""
    report: float


def lengths(budget: float, frame_tokens: float, texts: Texts, how: Behaviour) -> Lengths:
    """With `budget` overview frames, of `frame_tokens` visual tokens each."""
    frame = frame_tokens + texts.frame
    read = how.calls * (how.report_tokens + texts.reply) + (how.turns - 1) * texts.turn
    sampled = how.turns * how.turn_tokens
    crop = texts.crop + how.window_frames * frame
    return Lengths(texts.main + budget * frame, sampled + read, sampled, crop, how.report_tokens)


def prefill_work(group: int, budget: float, patches: float, size: Lengths, how: Behaviour) -> Work:
    """Of the `group` episodes of one prompt: the overview once, every reply, every sub-agent's prompt. Frames have
    `patches` patches each."""
    overview = Work(size.prompt, size.prompt**2 / 2, 0, budget * patches, budget * patches**2)
    read = size.suffix - size.sampled
    replies = Work(read, read * (size.prompt + size.suffix / 2))
    frames = how.window_frames * patches
    crop = Work(size.crop, size.crop**2 / 2, 0, frames, frames * patches)
    return overview + (replies + crop * how.calls) * group


def learner_work(
    group: int, budget: float, patches: float, size: Lengths, how: Behaviour, *, token_budget: int, subagents: bool
) -> Work:
    """Of the same episodes: their prompt once for as many rows as fit a microbatch of `token_budget` tokens, as
    `packing.plan` splits them; sub-agents' rows, which share nothing."""
    rows = max(1, math.floor((token_budget - size.prompt) / size.suffix))
    times = math.ceil(group / rows)
    main = Work(
        times * size.prompt + group * size.suffix,
        times * size.prompt**2 / 2 + group * (size.prompt * size.suffix + size.suffix**2 / 2),
        group * size.sampled,
        times * budget * patches,
        times * budget * patches**2,
    )
    if not subagents:
        return main
    whole, frames = size.crop + size.report, how.window_frames * patches
    return main + Work(whole, whole**2 / 2, size.report, frames, frames * patches) * (group * how.calls)


def mean_work(works: Sequence[Work], shares: Sequence[float]) -> Work:
    return sum((work * share for work, share in zip(works, shares, strict=True)), Work())


# ---------------------------------------------------------------------- how long it takes


class Hardware(BaseModel, extra="forbid", frozen=True):
    """One accelerator. Peaks as published, without sparsity; of them the shares that are reached."""

    memory: float = Field(gt=0)
    """Bytes."""
    bandwidth: float = Field(gt=0)
    """Bytes per second, of its memory."""
    bfloat16: float = Field(gt=0)
    """FLOP/s."""
    float32: float = Field(gt=0)
    """FLOP/s."""
    training: float = Field(0.4, gt=0, le=1)
    """Share of the peak in the learner."""
    prefill: float = Field(0.5, gt=0, le=1)
    """Share of the peak where prompts are read."""
    reading: float = Field(0.7, gt=0, le=1)
    """Share of the bandwidth where tokens are decoded."""
    dispatch: float = Field(8e-6, ge=0)
    """Seconds that a call of one operator takes at least, where passes are not replayed from a graph."""

    def peak(self, size: int) -> float:
        """For numbers of `size` bytes."""
        return self.bfloat16 if size == 2 else self.float32


def pass_seconds(
    hardware: Hardware, shape: Shape, size: int, sequences: float, context: float, operators: int
) -> float:
    """One decoding pass of a batch: the weights are read once and the keys and values of all sequences, of `context`
    tokens each, or the multiplications take longer; `operators` of a layer are called one after the other."""
    read = size * shape.read_weights + sequences * context * key_value_bytes(shape, size)
    done = forward_flops(shape, Work(sequences, sequences * context, sequences)).total
    slower = max(read / (hardware.bandwidth * hardware.reading), done / (hardware.peak(size) * hardware.prefill))
    return slower + shape.layers * operators * hardware.dispatch


def decode_seconds(
    hardware: Hardware, shape: Shape, size: int, long: Lengths, how: Behaviour, *, episodes: int, playing: int,
    decoding: int, operators: int,
) -> float:  # fmt: skip
    """All turns and reports of `episodes`, of which `playing` run at a time, in step; the engine decodes at most
    `decoding` sequences at a time, those of sub-agents too."""
    main = pass_seconds(hardware, shape, size, playing, long.prompt + long.suffix / 2, operators)
    seconds = how.turns * how.turn_tokens * main
    if how.turns > 1 and how.calls:
        watching = playing * how.calls / (how.turns - 1)
        rounds = math.ceil(watching / decoding)
        crop = pass_seconds(hardware, shape, size, watching / rounds, long.crop + long.report / 2, operators)
        seconds += (how.turns - 1) * how.report_tokens * rounds * crop
    return math.ceil(episodes / playing) * seconds
