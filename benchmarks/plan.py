"""The formulas of `paravt plan` against this machine's CPU: a real learner step and a real rollout of the tiny model.

    python benchmarks/plan.py                    # three runs of each
    python benchmarks/plan.py --write my.yaml    # and what was measured, for `paravt plan --hardware my.yaml`

Measured first: multiplications of matrices as wide as the model's and of large ones, reading of memory, and a call of
an operator that does nothing. With these the plan predicts how long a step on one group takes (64 frames of 32 px,
G = 8, two turns, two sub-agents an episode), which is then run: the whole step of the learner, optimizer included; and
the group played by the local engine, turn by turn, stop tokens banned. CPU seconds, medians. Ratios are measured to
predicted: above 1 is slower than planned. The memory is compared too: bytes of real tensors, without running anything
twice.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
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
    activation_bytes,
    decode_seconds,
    forward_flops,
    key_value_bytes,
    learner_work,
    prefill_work,
    training_flops,
)
from paravt.prompts import Prompts
from paravt.types import Row

FRAMES, GROUP, REPLY = 64, 8, 60
HOW = Behaviour(turns=2, calls=2, turn_tokens=48, report_tokens=16, window_frames=16)


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
    large = multiplied(1024, 1024, 1024, repeats)
    own = multiplied(1024, 128, 256, repeats)
    memory = torch.ones(32 << 20)
    read = memory.nbytes / cpu_seconds(lambda: memory.sum(), repeats)
    one = torch.ones(1)
    calls = cpu_seconds(lambda: [one.add_(0) for _ in range(100_000)], repeats) / 100_000
    print(f"matrices of 1024: {large / 1e9:.1f} GFLOP/s; of the model's width: {own / 1e9:.1f} GFLOP/s")
    print(f"memory: {read / 1e9:.1f} GB/s; a call of an operator: {calls * 1e6:.1f} us")
    share = round(min(1.0, own / large), 3)
    return Hardware(
        memory=16e9, bandwidth=read, bfloat16=large, float32=large, training=share, prefill=share, reading=1.0,
        dispatch=calls,
    )  # fmt: skip


def build() -> Endless:
    prompts = Prompts()
    corpus = [prompts.system, prompts.crop, " seconds> 0 1 2 3 4 5 6 7 8 9 ."]
    tokenizer = train_tokenizer(corpus, prompts.fixed_phrases())
    return Endless(build_model(tokenizer, TinyShape()), build_processor(tokenizer, TinyShape()))


def make_rows(model: Endless) -> list[Row]:
    overview = make_prompt(model, FRAMES, 32, "overview")
    turn, report = int(HOW.turn_tokens), int(HOW.report_tokens)
    rows = []
    for g in range(GROUP):
        rows.append(make_row(model, overview, [turn, REPLY, turn], g))
        windows = [make_prompt(model, int(HOW.window_frames), 32, f"window/{g}/{c}") for c in range(int(HOW.calls))]
        rows += [make_row(model, window, [report], 100 * g) for window in windows]
    return rows


async def play(model: Endless, engine: LocalEngine, run: int) -> int:
    """The group's episodes, turn by turn; the number of sampled tokens."""
    overview = make_prompt(model, FRAMES, 32, f"played/{run}")
    turn, report = Sampling(int(HOW.turn_tokens), 1.0, seed=run), Sampling(int(HOW.report_tokens), 1.0, seed=run)
    first = await engine.generate(Prompt(tuple(overview[0]), overview[1]), turn, GROUP)
    windows = [make_prompt(model, int(HOW.window_frames), 32, f"{run}/{n}") for n in range(GROUP * int(HOW.calls))]
    reports = await asyncio.gather(*(engine.generate(Prompt(tuple(ids), images), report) for ids, images in windows))
    noise = np.random.default_rng(run)
    usable = np.setdiff1d(np.arange(len(model.chat.tokenizer)), model.banned_ids)
    read = [(*overview[0], *one.ids, *noise.choice(usable, REPLY).tolist()) for one in first]
    second = await asyncio.gather(*(engine.generate(Prompt(ids, overview[1]), turn) for ids in read))
    done: list[Completion] = [*first, *(c for found in (*reports, *second) for c in found)]
    return sum(len(completion.ids) for completion in done)


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
    machine = measure(args.repeats)
    if args.write:
        args.write.write_text(yaml.safe_dump(machine.model_dump()), encoding="utf-8")

    model = build()
    shape, rows = shape_of(model.module), make_rows(model)
    main_prompt = int(np.flatnonzero(rows[0].mask)[0])
    crop_prompt = int(np.flatnonzero(rows[1].mask)[0])
    sampled = HOW.turns * HOW.turn_tokens
    long = Lengths(main_prompt, sampled + REPLY, sampled, crop_prompt, HOW.report_tokens)
    patches = 4
    config = LearnerConfig()

    work = learner_work(GROUP, FRAMES, patches, long, HOW, token_budget=config.token_budget, subagents=True)
    flops = training_flops(shape, work, checkpointing=False).total
    learner = Learner(QwenVL(model.module, model.processor), config)
    weights = token_mean(rows)
    fed = learner.step(rows, weights).packed_tokens
    print(f"\nlearner: {len(rows)} rows, {work.tokens:,.0f} tokens planned, {fed:,} fed")
    predicted = flops / (machine.float32 * machine.training)
    show("learner step", predicted, cpu_seconds(lambda: learner.step(rows, weights), args.repeats), 1, "s")

    engine = LocalEngine(model)
    numbers = iter(range(1000))
    read = forward_flops(shape, prefill_work(GROUP, FRAMES, patches, long, HOW)).total
    prefill = read / (machine.float32 * machine.prefill)
    decode = decode_seconds(
        machine, shape, 4, long, HOW, episodes=GROUP, playing=GROUP, decoding=32, operators=OPERATORS[4]
    )
    tokens = GROUP * (sampled + HOW.calls * HOW.report_tokens)
    if asyncio.run(play(model, engine, next(numbers))) != tokens:
        raise SystemExit(f"the engine did not make {tokens} tokens")
    print(f"\nrollout: {tokens:,.0f} tokens sampled; reading prompts {prefill:.2f} s, decoding {decode:.2f} s planned")
    taken = cpu_seconds(lambda: asyncio.run(play(model, engine, next(numbers))), args.repeats)
    show("rollout of the group", prefill + decode, taken, 1, "s")

    parameters = list(model.module.parameters())
    count = sum(p.numel() for p in parameters)
    moments = [v for state in learner.optimizer.state.values() for v in state.values() if v.ndim]
    print()
    show("weights", 4 * count, sum(p.nbytes for p in parameters), 1e6, "MB")
    show("optimizer", 8 * count, sum(v.nbytes for v in moments), 1e6, "MB")
    pool = engine._pool  # what the last batch left
    slots, width = pool.layers[0].shape[1], pool.layers[0].shape[3]
    show("keys and values", slots * width * key_value_bytes(shape, 4), sum(x.nbytes for x in pool.layers), 1e6, "MB")
    kept = activation_bytes(shape, 4, work.tokens, work.patches, checkpointing=False)
    print(f"activations of the whole group: {kept / 1e6:.0f} MB predicted; tests/test_plan.py counts what is kept")
    asyncio.run(engine.close())


if __name__ == "__main__":
    main()
