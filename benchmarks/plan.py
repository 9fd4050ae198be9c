"""The formulas of `paravt plan` against this machine's CPU: real learner steps and rollouts of the tiny model.

    python benchmarks/plan.py                    # three runs of each
    python benchmarks/plan.py --write my.yaml    # and what was measured, for `paravt plan --hardware my.yaml`

Measured first: multiplications of large matrices, reading of memory, a call of an operator that does nothing. What a
plan makes of these alone is a bound: with matrices as narrow as the tiny model's, all that is not a multiplication
takes longer than those do. So a step with 16 frames is measured too, for the share of the peak that the learner reaches
and for what a decoding pass costs beside its reading; and with these shares a step with 64 frames is predicted, which
nothing was fitted to. A step is one group (frames of 32 px, G = 8, two turns, two sub-agents an episode): the whole
step of the learner, optimizer included; and the group played by the local engine, turn by turn, stop tokens banned. CPU
seconds, medians. Ratios are measured to predicted: above 1 is slower than planned. Bytes of real tensors are compared
too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
import yaml
from learner import make_prompt, make_row, token_mean
from rollout import Endless

from paravt.dry_run import shape_of
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.learner import Learner, LearnerConfig
from paravt.models import QwenVL
from paravt.plan import (
    OPERATORS,
    Behaviour,
    Hardware,
    Lengths,
    Shape,
    Work,
    decode_seconds,
    forward_flops,
    key_value_bytes,
    learner_work,
    prefill_work,
    training_flops,
)
from paravt.prompts import Prompts
from paravt.types import Row

FITTED, PREDICTED = 16, 64
"""Frames."""
GROUP, REPLY, PATCHES = 8, 60, 4
HOW = Behaviour(turns=2, calls=2, turn_tokens=48, report_tokens=16, window_frames=16)
SAMPLED = GROUP * (HOW.turns * HOW.turn_tokens + HOW.calls * HOW.report_tokens)


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    """Of the median run; a first one warms up."""
    taken = []
    for _ in range(repeats + 1):
        before = time.process_time()
        run()
        taken.append(time.process_time() - before)
    return statistics.median(taken[1:])


def multiplied(rows: int, inner: int, columns: int, repeats: int) -> float:
    """FLOP/s."""
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    times = max(1, int(2e9 / (2 * rows * inner * columns)))
    return times * 2 * rows * inner * columns / cpu_seconds(lambda: [a @ b for _ in range(times)], repeats)


def measure(repeats: int) -> Hardware:
    """Peaks, and nothing lost."""
    large = multiplied(1024, 1024, 1024, repeats)
    memory, one = torch.ones(32 << 20), torch.ones(1)
    read = memory.nbytes / cpu_seconds(lambda: memory.sum(), repeats)
    calls = cpu_seconds(lambda: [one.add_(0) for _ in range(100_000)], repeats) / 100_000
    print(f"{large / 1e9:.1f} GFLOP/s, {read / 1e9:.1f} GB/s, {calls * 1e6:.1f} us for a call of an operator")
    return Hardware(
        memory=16e9, bandwidth=read, bfloat16=large, float32=large, training=1, prefill=1, reading=1, dispatch=calls
    )


def build() -> Endless:
    prompts = Prompts()
    corpus = [prompts.system, prompts.crop, " seconds> 0 1 2 3 4 5 6 7 8 9 ."]
    tokenizer = train_tokenizer(corpus, prompts.fixed_phrases())
    return Endless(build_model(tokenizer, TinyShape()), build_processor(tokenizer, TinyShape()))


def make_rows(model: Endless, frames: int) -> list[Row]:
    overview = make_prompt(model, frames, 32, f"overview/{frames}")
    turn, report = int(HOW.turn_tokens), int(HOW.report_tokens)
    rows = []
    for g in range(GROUP):
        rows.append(make_row(model, overview, [turn, REPLY, turn], g))
        windows = [make_prompt(model, int(HOW.window_frames), 32, f"window/{g}/{c}") for c in range(int(HOW.calls))]
        rows += [make_row(model, window, [report], 100 * g) for window in windows]
    return rows


async def play(model: Endless, engine: LocalEngine, frames: int, run: int) -> None:
    """The group's episodes, turn by turn."""
    overview = make_prompt(model, frames, 32, f"played/{frames}/{run}")
    turn, report = Sampling(int(HOW.turn_tokens), 1.0, seed=run), Sampling(int(HOW.report_tokens), 1.0, seed=run)
    first = await engine.generate(Prompt(tuple(overview[0]), overview[1]), turn, GROUP)
    windows = [
        make_prompt(model, int(HOW.window_frames), 32, f"{frames}/{run}/{n}") for n in range(GROUP * int(HOW.calls))
    ]
    reports = await asyncio.gather(*(engine.generate(Prompt(tuple(ids), images), report) for ids, images in windows))
    noise = np.random.default_rng(run)
    usable = np.setdiff1d(np.arange(len(model.chat.tokenizer)), model.banned_ids)
    read = [(*overview[0], *one.ids, *noise.choice(usable, REPLY).tolist()) for one in first]
    second = await asyncio.gather(*(engine.generate(Prompt(ids, overview[1]), turn) for ids in read))
    done: list[Completion] = [*first, *(c for found in (*reports, *second) for c in found)]
    if sum(len(completion.ids) for completion in done) != SAMPLED:
        raise SystemExit(f"the engine did not make {SAMPLED} tokens")


@dataclass(frozen=True)
class Step:
    """What is planned and what is measured, with one number of frames."""

    work: Work
    prefill: Work
    long: Lengths
    fed: int
    learner: float
    rollout: float

    def learning(self, machine: Hardware, shape: Shape) -> float:
        return training_flops(shape, self.work, checkpointing=False).total / (machine.float32 * machine.training)

    def sampling(self, machine: Hardware, shape: Shape) -> float:
        read = forward_flops(shape, self.prefill).total / (machine.float32 * machine.prefill)
        return read + decode_seconds(
            machine, shape, 4, self.long, HOW, episodes=GROUP, playing=GROUP, decoding=32, operators=OPERATORS[4]
        )


def run_step(model: Endless, learner: Learner, engine: LocalEngine, frames: int, repeats: int) -> Step:
    rows = make_rows(model, frames)
    weights = token_mean(rows)
    prompt, crop = (int(np.flatnonzero(row.mask)[0]) for row in rows[:2])
    sampled = HOW.turns * HOW.turn_tokens
    long = Lengths(prompt, sampled + REPLY, sampled, crop, HOW.report_tokens)
    budget = learner.config.token_budget
    runs = count()
    return Step(
        work=learner_work(GROUP, frames, PATCHES, long, HOW, token_budget=budget, subagents=True),
        prefill=prefill_work(GROUP, frames, PATCHES, long, HOW),
        long=long,
        fed=learner.step(rows, weights).packed_tokens,
        learner=cpu_seconds(lambda: learner.step(rows, weights), repeats),
        rollout=cpu_seconds(lambda: asyncio.run(play(model, engine, frames, next(runs))), repeats),
    )


def fitted(machine: Hardware, shape: Shape, step: Step) -> Hardware:
    """With the shares that a measured step tells of."""
    passes = HOW.turns * HOW.turn_tokens + (HOW.turns - 1) * HOW.report_tokens
    calls = passes * shape.layers * OPERATORS[4]
    share = min(1.0, step.learning(machine, shape) / step.learner)
    slower = machine.model_copy(update={"training": share, "prefill": share})
    rest = (step.rollout - step.sampling(slower, shape)) / calls
    return slower.model_copy(update={"dispatch": max(0.0, slower.dispatch + rest)})


def show(what: str, predicted: float, measured: float, scale: float, unit: str) -> None:
    print(
        f"{what:34s} predicted {predicted / scale:9.3f} {unit}  measured {measured / scale:9.3f} {unit}"
        f"  ratio {measured / predicted:5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a YAML file for `paravt plan --hardware`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    peaks = measure(args.repeats)
    model = build()
    shape = shape_of(model.module)
    learner, engine = Learner(QwenVL(model.module, model.processor), LearnerConfig()), LocalEngine(model)
    first, second = (run_step(model, learner, engine, k, args.repeats) for k in (FITTED, PREDICTED))
    machine = fitted(peaks, shape, first)
    print(
        f"with {FITTED} frames the learner reaches {machine.training:.0%} of the peak, and a call of an operator with"
    )
    print(f"all that goes with it takes {machine.dispatch * 1e6:.1f} us")
    if args.write:
        args.write.write_text(yaml.safe_dump(machine.model_dump()), encoding="utf-8")
    print(f"\n{PREDICTED} frames: {second.work.tokens:,.0f} tokens planned for the learner, {second.fed:,} fed")
    for how, used in (("bound", peaks), ("fitted", machine)):
        show(f"learner step, {how}", second.learning(used, shape), second.learner, 1, "s")
        show(f"rollout of the group, {how}", second.sampling(used, shape), second.rollout, 1, "s")

    parameters = list(model.module.parameters())
    number = sum(p.numel() for p in parameters)
    moments = [v for state in learner.optimizer.state.values() for v in state.values() if v.ndim]
    print()
    show("weights", 4 * number, sum(p.nbytes for p in parameters), 1e6, "MB")
    show("optimizer", 8 * number, sum(v.nbytes for v in moments), 1e6, "MB")
    pool = engine._pool  # what the last batch left
    slots, width = pool.layers[0].shape[1], pool.layers[0].shape[3]
    show("keys and values", slots * width * key_value_bytes(shape, 4), sum(x.nbytes for x in pool.layers), 1e6, "MB")
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
