"""A supervised step, forward and backward, on rows of very different lengths: packed against padded.

    python benchmarks/packing.py

Four ways with the same rows, weights and token budget:

- "packed": ours, all rows of a microbatch as one sequence (`paravt sft` as it is);
- "buckets": rows sorted by length, each microbatch padded to its longest (`packing: false`);
- "in order": rows as they come, as many to a microbatch as the budget holds when they are padded to its longest;
- "one by one": a row at a time, nothing padded.

Rows are made after the mixture of the published training data: half of them questions about a few images or a short
video, a third of them long videos (some with calls, replies and a second turn), the rest text. All frames are
different, the image processor's work is done beforehand, the optimizer is left out. The gradient of each way is
compared with that of "packed" once. Ways alternate in one run; ratios are medians over rounds, of CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from learner import WithoutOptimizer, Work, build, make_prompt, make_row, token_mean

from paravt.learner import LearnerConfig
from paravt.loss import LossConfig
from paravt.models import QwenVL
from paravt.packing import Shared
from paravt.types import Row


class InOrder(WithoutOptimizer):
    def _plan(self, rows: list[Row]) -> tuple[list[Row], list[list[Shared]]]:
        rows, batches = super()._plan(rows)
        alone = sorted((row for batch in batches for row in batch), key=lambda row: row.rows)
        out: list[list[Shared]] = []
        for row in alone:
            longest = max(each.tokens for each in (*(out[-1] if out else ()), row))
            if not out or (len(out[-1]) + 1) * longest > self.config.token_budget:
                out.append([])
            out[-1].append(row)
        return rows, out


class OneByOne(WithoutOptimizer):
    def _plan(self, rows: list[Row]) -> tuple[list[Row], list[list[Shared]]]:
        rows, batches = super()._plan(rows)
        return rows, [[row] for batch in batches for row in batch]


def mixture(model: QwenVL, count: int, side: int, seed: int) -> Work:
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        kind = draw.choice(["short", "long", "text"], p=[0.5, 0.35, 0.15])
        frames = {"short": int(draw.integers(1, 17)), "long": int(draw.integers(32, 65)), "text": 0}[kind]
        pieces = [int(draw.integers(16, 97))]
        if kind == "long" and draw.random() < 0.6:
            pieces += [int(draw.integers(40, 161)), int(draw.integers(16, 65))]  # replies, and a second turn
        rows.append(make_row(model, make_prompt(model, frames, side, f"row {number}"), pieces, number))
    return Work(rows, token_mean(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument("--side", type=int, default=64, help="of a frame, in px")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a microbatch")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = build(args.side)
    work = mixture(model, args.rows, args.side, 0)
    for row in work.rows:
        row.advantages[row.mask] = 1.0
    lengths = sorted(len(row.ids) for row in work.rows)
    print(
        f"{len(lengths)} rows of {lengths[0]} to {lengths[-1]} tokens, {statistics.median(lengths):.0f} in the middle"
    )

    def config(packing: bool) -> LearnerConfig:
        return LearnerConfig(
            LossConfig(importance_cap=None), token_budget=args.budget, packing=packing, share_prompts=False
        )

    ways = {
        "packed": WithoutOptimizer(model, config(True)),
        "buckets": WithoutOptimizer(model, config(False)),
        "in order": InOrder(model, config(False)),
        "one by one": OneByOne(model, config(True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, torch.Tensor] = {}
    fed: dict[str, tuple[int, int]] = {}
    for number in range(args.repeats + 1):
        for name, learner in ways.items():
            started = time.process_time()
            step = learner.step(work.rows, work.weights)
            if number:  # the first round makes the pixels
                seconds[name].append(time.process_time() - started)
            else:
                fed[name] = step.packed_tokens, step.microbatches
                gradients[name] = torch.cat([p.grad.flatten() for p in model.module.parameters()])
    needed = fed["packed"][0]
    for name, spent in seconds.items():
        ratio = statistics.median(s / p for s, p in zip(spent, seconds["packed"], strict=True))
        error = (gradients[name] - gradients["packed"]).norm() / gradients["packed"].norm()
        tokens, batches = fed[name]
        print(
            f"{name:>10}: {1 - needed / tokens:4.0%} padding, {batches:2d} microbatches,"
            f" {needed / batches / args.budget:4.0%} of the budget used, {ratio:.2f} of packed (CPU),"
            f" gradients differ by {error:.0e}"
        )


if __name__ == "__main__":
    main()
