"""Rollout of a group: the local engine against `generate` of transformers, side by side, on the same work.

    python benchmarks/rollout.py --frames 64 --group 8 --tokens 64

One prompt of many frames, G samples of the same number of tokens (stop tokens are banned for everybody). "repeated"
gives transformers the prompt and the images G times, as GRPO trainers do; "num_return_sequences" leaves the expansion
to it. Transformers is run as it is, on a copy of the model without our batched vision attention. Frames are new in
every run, so nothing is reused between runs. Times include the image processor, once; on a busy machine look at the
CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time

import numpy as np
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

from paravt.chat import timestamp
from paravt.engines.base import Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.models import QwenVL, load_model
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, TextPart


class Endless(QwenVL):
    """Never samples a stop token, so that every sample has the same length."""

    @property
    def banned_ids(self) -> list[int]:
        return sorted({*super().banned_ids, *self.chat.stop_ids})


def build(args: argparse.Namespace) -> Endless:
    if args.model:
        loaded = load_model(args.model, args.dtype, args.device)
        return Endless(loaded.module, loaded.processor)
    prompts = Prompts()
    corpus = [
        prompts.system,
        prompts.crop,
        " seconds> 0 1 2 3 4 5 6 7 8 9 .",
    ]  # about as many tokens a frame as with Qwen's own
    tokenizer = train_tokenizer(corpus, prompts.fixed_phrases())
    shape = TinyShape(
        hidden=256, layers=4, heads=4, kv_heads=2, feed_forward=768, vision_hidden=128, frame_side=args.frame_side
    )
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    return Endless(build_model(tokenizer, shape).to(args.device, dtype), build_processor(tokenizer, shape))


def make_prompt(model: QwenVL, args: argparse.Namespace, run: int) -> Prompt:
    noise = np.random.default_rng(run)
    parts: list[TextPart | ImagePart] = []
    for i in range(args.frames):
        pixels = noise.integers(0, 256, (args.frame_side, args.frame_side, 3), dtype=np.uint8)
        parts += [TextPart(timestamp(float(i))), ImagePart(Frame(float(i), pixels, f"{run}/{i}"))]
    segment = model.chat.open([Message("user", (*parts, TextPart(Prompts().system)))])
    return Prompt(segment.ids, segment.images)


def with_engine(engine: LocalEngine, prompt: Prompt, args: argparse.Namespace, run: int) -> int:
    sampling = Sampling(args.tokens, args.temperature, seed=run)
    done = asyncio.run(engine.generate(prompt, sampling, args.group))
    return sum(len(completion.ids) for completion in done)


def without_our_attention(module: torch.nn.Module) -> torch.nn.Module:
    plain = copy.deepcopy(module)
    for block in plain.model.visual.blocks:
        block.attn.__class__ = Qwen3VLVisionAttention
    return plain


@torch.inference_mode()
def with_transformers(
    model: QwenVL, module: torch.nn.Module, prompt: Prompt, args: argparse.Namespace, run: int, *, repeat: bool
) -> int:
    torch.manual_seed(run)
    rows = args.group if repeat else 1
    pixels, grid = model.pixel_inputs(prompt.images)
    ids = torch.tensor([prompt.ids] * rows, device=model.device)
    out = module.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels.repeat(rows, 1),
        image_grid_thw=grid.repeat(rows, 1),
        mm_token_type_ids=(ids == model.chat.image_id).int(),
        num_return_sequences=args.group // rows,
        max_new_tokens=args.tokens,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
        suppress_tokens=model.banned_ids,
    )
    return int(out.numel() - args.group * len(prompt.ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--frame-side", type=int, default=64, help="px, a multiple of 32")
    parser.add_argument("--group", type=int, default=8, help="samples of the prompt, G")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sample")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", help="a checkpoint; a tiny random model if not given")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args)
    engine = LocalEngine(model)
    plain = without_our_attention(model.module)
    ways = {
        "local engine": lambda prompt, run: with_engine(engine, prompt, args, run),
        "transformers, repeated": lambda p, run: with_transformers(model, plain, p, args, run, repeat=True),
        "transformers, num_return_sequences": lambda p, run: with_transformers(
            model, plain, p, args, run, repeat=False
        ),
    }
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {way: [] for way in ways} for clock in clocks}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for i, (way, generate) in enumerate(ways.items()):
            run = repeat * len(ways) + i
            prompt = make_prompt(model, args, run)
            before = {clock: read() for clock, read in clocks.items()}
            tokens = generate(prompt, run)
            if tokens != args.group * args.tokens:
                raise SystemExit(f"{way} made {tokens} tokens")
            if repeat:
                for clock, read in clocks.items():
                    seconds[clock][way].append(read() - before[clock])
    asyncio.run(engine.close())

    parameters = sum(p.numel() for p in model.module.parameters()) / 1e6
    print(
        f"{parameters:.1f} M parameters, {args.device}, {args.threads} thread(s); {args.frames} frames of"
        f" {args.frame_side} px, prompt {len(prompt.ids)} tokens, G = {args.group}, {args.tokens} new tokens each,"
        f" {args.repeats} runs, alternating"
    )
    for clock, times in seconds.items():
        for way, theirs in times.items():
            ratios = [t / ours for t, ours in zip(theirs, times["local engine"], strict=True)]
            rate = args.group * args.tokens / statistics.median(theirs)
            print(
                f"{way:36s}{clock:>5s} {statistics.median(theirs):7.3f} s {rate:8.1f} tokens/s; the engine is"
                f" {statistics.median(ratios):.2f}x as fast ({min(ratios):.2f}-{max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
