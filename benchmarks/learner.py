"""The learner's step on a group, forward and backward, against the same rows one by one with the prompt repeated.

    python benchmarks/learner.py                     # three settings of prompt and suffix, then a whole step
    python benchmarks/learner.py --case 64x64 --trl  # 64 px frames, 64 sampled tokens; TRL's own loss as well

"repeated" is the strongest naive way that we know: rows one after the other (faster than as a batch on a CPU), our
batched vision attention, the vocabulary head at scored positions only, plain causal attention of torch. "TRL" is
`GRPOTrainer._compute_loss` of the installed TRL with its own fused head, all rows as one batch, transformers as it is.
Everybody has the same weights, rows, frames and advantages; the image processor's work is done beforehand; the
optimizer is left out. Each gradient is compared with that of "repeated" once. Ways alternate in one run; on a busy
machine look at the CPU seconds, which the ratios are of.

The limit is that of the multiplications alone. With P prompt and S suffix tokens, G rows, W weights in the linear
layers of the text model, L layers of h heads of size d, a vocabulary head of D x V, and F for the vision tower (2 for
each weight and patch, and 4 hidden n^2 for the n patches of an image in every block), forward:

    text(T, pairs) = 2 W T + 4 L h d pairs              head = 2 D V S
    repeated = G (F + text(P + S, (P + S)^2 / 2) + head)
    shared   = F + text(P + G S, P^2 / 2 + G (P S + S^2 / 2)) + G head

Backward costs the same multiple of each, so limit = repeated / shared.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

from paravt.chat import timestamp
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.learner import Learner, LearnerConfig
from paravt.loss import LossConfig, policy_loss
from paravt.models import QwenVL
from paravt.packing import share
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, Row, TextPart

CASES = {"64x64": (64, 64), "64x256": (64, 256), "128x256": (128, 256)}
"""Frame side (px) and sampled tokens of each row."""


class Prepared(QwenVL):
    """The image processor's work is done once for each set of frames. Nothing is banned: TRL knows no such thing."""

    @property
    def banned_ids(self) -> list[int]:
        return []

    def __init__(self, module: Any, processor: Any) -> None:
        super().__init__(module, processor)
        self._pixels: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def pixel_inputs(self, frames: Sequence[Frame]) -> tuple[Tensor, Tensor]:
        key = tuple(frame.key for frame in frames)
        if key not in self._pixels:
            self._pixels[key] = super().pixel_inputs(frames)
        return self._pixels[key]


class WithoutOptimizer(Learner):
    def _update(self, rate: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Work:
    rows: list[Row]
    weights: list[np.ndarray]

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.rows)


def build(frame_side: int) -> Prepared:
    prompts = Prompts()
    corpus = [prompts.system, prompts.crop, " seconds> 0 1 2 3 4 5 6 7 8 9 ."]
    tokenizer = train_tokenizer(corpus, prompts.fixed_phrases())
    shape = TinyShape(
        hidden=256, layers=4, heads=4, kv_heads=2, feed_forward=768, vision_hidden=128, frame_side=frame_side
    )
    return Prepared(build_model(tokenizer, shape), build_processor(tokenizer, shape))


def make_prompt(model: QwenVL, frames: int, side: int, name: str, start: float = 0.0) -> tuple[list[int], Any]:
    noise = np.random.default_rng(sum(map(ord, name)))
    parts: list[TextPart | ImagePart] = []
    for i in range(frames):
        pixels = noise.integers(0, 256, (side, side, 3), dtype=np.uint8)
        parts += [TextPart(timestamp(start + i)), ImagePart(Frame(start + i, pixels, f"{name}/{i}"))]
    segment = model.chat.open([Message("user", (*parts, TextPart(Prompts().system)))])
    return list(segment.ids), segment.images


def make_row(model: QwenVL, prompt: tuple[list[int], Any], pieces: Sequence[int], seed: int) -> Row:
    """`pieces`: numbers of tokens that are, in turns, sampled and not."""
    noise = np.random.default_rng(seed)
    usable = np.setdiff1d(np.arange(len(model.chat.tokenizer)), list(model.chat.vision_ids))
    ids = np.concatenate([prompt[0], noise.choice(usable, sum(pieces))])
    mask = np.repeat([False, *(i % 2 == 0 for i in range(len(pieces)))], [len(prompt[0]), *pieces])
    advantages = np.where(mask, noise.normal(), 0.0)
    return Row(ids, mask, np.zeros(len(ids)), advantages, prompt[1], "group", str(seed), "main", 0)


def one_group(model: QwenVL, frames: int, side: int, group: int, sampled: int) -> Work:
    prompt = make_prompt(model, frames, side, f"one/{side}")
    rows = [make_row(model, prompt, [sampled], seed) for seed in range(group)]
    return Work(rows, token_mean(rows))


def whole_step(model: QwenVL, side: int, group: int) -> Work:
    """Five gated prompts, one of each frame budget; every main row calls twice, reads a reply of 60 tokens and
    answers; every call is a sub-agent row of 16 frames, from one of eight windows of its video."""
    rows = []
    noise = np.random.default_rng(0)
    for budget in (4, 8, 16, 32, 64):
        prompt = make_prompt(model, budget, side, f"overview/{budget}")
        windows = [make_prompt(model, 16, side, f"window/{budget}/{w}", 16.0 * w) for w in range(8)]
        for g in range(group):
            rows.append(make_row(model, prompt, [64, 60, 32], 100 * budget + g))
            rows += [make_row(model, windows[w], [32], int(w)) for w in noise.choice(8, 2, replace=False)]
    return Work(rows, token_mean(rows))


def token_mean(rows: Sequence[Row]) -> list[np.ndarray]:
    total = sum(row.mask.sum() for row in rows)
    return [row.mask / total for row in rows]


def repeated(model: QwenVL, module: Any, work: Work, config: LearnerConfig) -> None:
    """Every row alone."""
    for row, weights in zip(work.rows, work.weights, strict=True):
        ids = torch.from_numpy(row.ids)
        hidden = module.model(
            input_ids=ids[None],
            position_ids=torch.from_numpy(model.positions(row.ids.tolist(), row.images)[0])[:, None],
            mm_encoder_outputs={"image": model.encode_images(row.images)},
            use_cache=False,
        ).last_hidden_state[0]
        at = torch.from_numpy(np.flatnonzero(row.mask))
        logits = module.lm_head(hidden[at - 1])
        logprobs = logits.gather(1, ids[at][:, None])[:, 0] - logits.logsumexp(-1)
        old = logprobs.detach()
        streams = (torch.from_numpy(array)[at].float() for array in (row.advantages, weights))
        policy_loss(logprobs, old, old, *streams, config.loss).loss.backward()


def trl_loss(module: Any) -> Callable[[QwenVL, Work], None]:
    """TRL's loss and backward for one group, on a trainer without all else."""
    from trl.trainer.grpo_trainer import GRPOTrainer, add_fused_lm_head

    add_fused_lm_head(module, outputs=("log_probs", "entropy"))
    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(
        model=module, loss_type="bnpo", beta=0.0, epsilon_low=0.2, epsilon_high=0.2, use_vllm=False,
        importance_sampling_level="token", top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, report_to=[]), state=SimpleNamespace(global_step=0),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, is_main_process=False, autocast=nullcontext,
            gather=lambda x: x, gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
    )  # fmt: skip

    def run(model: QwenVL, work: Work) -> None:
        first, group = work.rows[0], len(work.rows)
        prompt = int(np.flatnonzero(first.mask)[0])
        ids = torch.from_numpy(np.stack([row.ids for row in work.rows]))
        pixels, grid = model.pixel_inputs(first.images)
        trainer._compute_loss(
            module,
            {
                "prompt_ids": ids[:, :prompt],
                "prompt_mask": torch.ones_like(ids[:, :prompt]),
                "completion_ids": ids[:, prompt:],
                "completion_mask": torch.ones_like(ids[:, prompt:]),
                "advantages": torch.tensor([row.advantages[prompt] for row in work.rows]).float(),
                "pixel_values": pixels.repeat(group, 1),
                "image_grid_thw": grid.repeat(group, 1),
                "num_images": [len(first.images)] * group,
                "mm_token_type_ids": (ids == model.chat.image_id).int(),
            },
        ).backward()

    return run


def limit(model: QwenVL, work: Work) -> tuple[int, int, float]:
    """`(P, S, limit)` of one group; see the top of this file."""
    text, vision = model.module.model.language_model, model.module.model.visual
    linear = sum(m.weight.numel() for m in text.modules() if isinstance(m, torch.nn.Linear))
    shape = model.module.config.text_config
    pair = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim

    def size(*parts: torch.nn.Module) -> int:
        return sum(p.numel() for part in parts for p in part.parameters() if p.ndim > 1)

    tower = 0
    _, grid = model.pixel_inputs(work.rows[0].images)
    for patches in grid.prod(-1).tolist():
        tower += 2 * patches * size(vision.patch_embed, vision.blocks)
        tower += 2 * patches // model.merge**2 * size(vision.merger, vision.deepstack_merger_list)
        tower += 4 * len(vision.blocks) * model.module.config.vision_config.hidden_size * patches**2
    sampled = int(work.rows[0].mask.sum())
    prompt, group = len(work.rows[0].ids) - sampled, len(work.rows)
    head = 2 * sampled * model.module.lm_head.weight.numel()

    def cost(tokens: int, pairs: float) -> float:
        return 2 * linear * tokens + pair * pairs

    one = cost(prompt + sampled, (prompt + sampled) ** 2 / 2)
    pairs = prompt**2 / 2 + group * (prompt * sampled + sampled**2 / 2)
    shared = tower + cost(prompt + group * sampled, pairs) + group * head
    return prompt, sampled, group * (tower + one + head) / shared


def peak_memory(run: Callable[[], object]) -> float:
    """MiB above what was resident before (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")

    def status(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def measure(
    title: str, modules: dict[str, Any], ways: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Runs the ways in turns, prints them, and returns the ratio of each to "ours"."""
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    wall: dict[str, list[float]] = {way: [] for way in ways}
    memory, gradients = {}, {}
    for repeat in range(repeats + 1):  # the first one warms up, and is the one whose memory and gradients are looked at
        for way, run in ways.items():
            modules[way].zero_grad()
            if not repeat:
                memory[way] = peak_memory(run)
                gradients[way] = {n: p.grad.clone() for n, p in modules[way].named_parameters() if p.grad is not None}
                continue
            before = time.process_time(), time.perf_counter()
            run()
            cpu[way].append(time.process_time() - before[0])
            wall[way].append(time.perf_counter() - before[1])
    print(title)
    ratios = {}
    for way in ways:
        each = [theirs / ours for theirs, ours in zip(cpu[way], cpu["ours"], strict=True)]
        ratios[way] = statistics.median(each)
        mine, reference = (
            torch.cat([g[n].flatten() for n in gradients["ours"]]) for g in (gradients[way], gradients["repeated"])
        )
        error = ((mine - reference).norm() / reference.norm()).item()
        print(
            f"  {way:9s} {statistics.median(cpu[way]):7.2f} s CPU {statistics.median(wall[way]):7.2f} s wall"
            f" {memory[way]:6.0f} MiB   {ratios[way]:5.2f}x ours ({min(each):.2f}-{max(each):.2f})"
            f"   gradient off by {error:.0e}"
        )
    return ratios


def run_case(name: str, args: argparse.Namespace) -> None:
    side, sampled = CASES.get(name, (64, 0))
    model = build(side)
    plain = Prepared(copy.deepcopy(model.module), model.processor)
    plain.module.train()
    if args.checkpointing:
        plain.module.activation_checkpointing_enable({"use_reentrant": False})
    # The sampler is the policy itself: no weight but 1, for nobody.
    config = LearnerConfig(LossConfig(importance_cap=None), activation_checkpointing=args.checkpointing)
    learner = WithoutOptimizer(model, config)
    whole = name not in CASES
    work = whole_step(model, side, args.group) if whole else one_group(model, args.frames, side, args.group, sampled)
    modules = {"ours": model.module, "repeated": plain.module}
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: learner.step(work.rows, work.weights),
        "repeated": lambda: repeated(plain, plain.module, work, config),
    }
    if args.trl and not whole:
        raw = copy.deepcopy(plain.module)
        for block in raw.model.visual.blocks:
            block.attn.__class__ = Qwen3VLVisionAttention
        of_trl = trl_loss(raw)
        modules["TRL"], ways["TRL"] = raw, lambda: of_trl(plain, work)
    learner.logprobs(work.rows)  # for its images, which are then prepared
    for row in work.rows:
        plain.pixel_inputs(row.images)
    if whole:
        fed = sum(group.tokens for group in share(model.chat, work.rows))
        measure(f"whole step: {len(work.rows)} rows of {work.tokens} tokens, {fed} fed", modules, ways, args.repeats)
        return
    prompt, _, most = limit(model, work)
    title = f"P = {prompt} ({args.frames} frames of {side} px), S = {sampled}, G = {args.group}"
    reached = measure(title, modules, ways, args.repeats)["repeated"]
    print(f"  limit {most:.2f}x; reached {reached / most:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "whole"], help="all of them if not given")
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="rows of the prompt, G")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing, everybody")
    parser.add_argument("--trl", action="store_true", help="TRL's loss as well (needs trl)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in [args.case] if args.case else [*CASES, "whole"]:
        run_case(name, args)


if __name__ == "__main__":
    main()
