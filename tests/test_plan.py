"""Plans: every formula against numbers worked out by hand, and against what the real tiny model does: multiplications
as torch counts them, bytes of real tensors, tokens that are really fed. Nothing here is timed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure, frames_of, fresh_model, row, text_of, weights_of
from test_sft_qwen import released, tokenizer  # noqa: F401  # the fixture
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner, Result

from paravt.ask import shipped_model
from paravt.chat import TokenChat
from paravt.cli import app
from paravt.config import RLRecipe, load_recipe
from paravt.dry_run import empty_model, estimate, shape_of, skeleton
from paravt.engines.kv import Block, KVPool
from paravt.episode_config import EpisodeConfig
from paravt.errors import ModelError, RecipeError
from paravt.known import QWEN_TEXTS, count_texts, facts, hardware, model_config
from paravt.lab.questions import question
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.learner import Learner, LoRA
from paravt.models import QwenVL, load_model
from paravt.packing import Shared, pack, share
from paravt.packing import plan as pack_plan
from paravt.plan import (
    OPERATORS,
    Behaviour,
    Hardware,
    Lengths,
    Shape,
    Texts,
    Work,
    activation_bytes,
    decode_seconds,
    forward_flops,
    key_value_bytes,
    learner_work,
    lengths,
    logits_bytes,
    mean_work,
    pass_seconds,
    prefill_work,
    training_flops,
)
from paravt.plan_case import find_model
from paravt.plan_cli import amount
from paravt.protocol import PARAVT, Scene
from paravt.step_plan import Entry, Plan, make_plan
from paravt.types import Row

RECIPES = Path(__file__).parents[1] / "recipes"
EIGHT = RECIPES / "qwen3vl-8b" / "rl.yaml"
LAB = RECIPES / "lab" / "rl" / "full.yaml"

SMALL = Shape(
    hidden=8, layers=2, queries=12, keys=4, feed_forward=16, vocabulary=100, layer_weights=1000, vision_hidden=6,
    vision_layers=3, vision_feed_forward=10, embedding_weights=60, block_weights=300, merger_weights=50, mergers=2,
    patches=4,
)  # fmt: skip
MACHINE = Hardware(
    memory=1e9, bandwidth=1000, bfloat16=4000, float32=2000, training=0.5, prefill=0.5, reading=0.5, dispatch=0.25
)
TEXTS = Texts(main=50, crop=20, frame=6, turn=5, reply=7)
HOW = Behaviour(turns=3, calls=2, turn_tokens=10, report_tokens=4, window_frames=2)


# ---------------------------------------------------------------------- by hand


def test_flops_by_hand() -> None:
    work = Work(tokens=10, pairs=30, scored=3, patches=8, patch_pairs=32)
    forward = forward_flops(SMALL, work)
    assert forward.text == 2 * 1000 * 10
    assert forward.attention == 4 * 2 * 12 * 30
    assert forward.head == 2 * 8 * 100 * 3
    assert forward.vision == 2 * 360 * 8 + 2 * 50 * 2
    assert forward.vision_attention == 4 * 3 * 6 * 32
    assert forward.total == 20_000 + 2_880 + 4_800 + 5_960 + 2_304

    plain = training_flops(SMALL, work, checkpointing=False, head_again=False)
    assert plain.text == 3 * 20_000
    assert plain.attention == 3.5 * 2_880
    assert plain.head == 3 * 4_800
    assert plain.vision == 3 * 2 * 300 * 8 + 2 * 2 * 60 * 8 + 3 * 2 * 50 * 2
    assert plain.vision_attention == 3.5 * 2_304
    again = training_flops(SMALL, work, checkpointing=True)
    # but for the last matrices, 16 x 8 in each of 2 layers, 10 x 6 in each of 3 blocks
    assert again.text == 3 * 20_000 + 2 * (1000 - 2 * 16 * 8) * 10
    assert (again.attention, again.head) == (4.5 * 2_880, 4 * 4_800)
    assert again.vision == plain.vision + 2 * (300 - 3 * 10 * 6) * 8
    adapters = training_flops(SMALL, work, checkpointing=False, adapters=70, head_again=False)
    assert adapters.text == 2 * 20_000 + 3 * 2 * 70 * 10
    assert (adapters.head, adapters.vision, adapters.vision_attention) == (2 * 4_800, 5_960, 2_304)


def test_bytes_by_hand() -> None:
    assert key_value_bytes(SMALL, 2) == 2 * 2 * 4 * 2
    assert logits_bytes(SMALL, 10) == 5 * 4 * 10 * 100
    # a token in 32 bits: three of each of two norms; q and k twice before and once after, v, the output; 4 of 16
    layer = 4 * (6 * 8 + 4 * 12 + 4 * 4 + 4 * 16)
    block, mergers, pixels = 4 * (10 * 6 + 2 * 10), 4 * 4 * 2 * 6, 4 * 10
    assert activation_bytes(SMALL, 4, 5, 0, checkpointing=False) == 5 * 2 * layer
    assert activation_bytes(SMALL, 4, 0, 8, checkpointing=False) == 8 * (3 * block + mergers + pixels)
    kept = activation_bytes(SMALL, 4, 5, 8, checkpointing=True)
    assert kept == 4 * (2 * 8 * 5 + 3 * 6 * 8) + max(5 * layer, 8 * block) + 8 * (mergers + pixels)
    # in 16 bits what goes into a norm has 4 bytes all the same
    half = 2 * (6 + 2) * 8 + (6 + 4) * 12 + (6 + 4) * 4 + 2 * 4 * 16
    assert activation_bytes(SMALL, 2, 5, 0, checkpointing=False) == 5 * 2 * half


def test_lengths_and_work_by_hand() -> None:
    size = lengths(8, 49, TEXTS, HOW)
    assert size == Lengths(prompt=50 + 8 * 55, suffix=30 + 2 * (4 + 7) + 2 * 5, sampled=30, crop=20 + 2 * 55, report=4)
    read = prefill_work(3, 8, 196, size, HOW)
    replies = 2 * 11 + 2 * 5
    assert read.tokens == 490 + 3 * (replies + 2 * 130)
    assert read.pairs == 490**2 / 2 + 3 * (replies * (490 + 62 / 2) + 2 * 130**2 / 2)
    assert read.patches == (8 + 3 * 2 * 2) * 196
    assert read.patch_pairs == (8 + 3 * 2 * 2) * 196**2
    learned = learner_work(3, 8, 196, size, HOW, token_budget=1000, subagents=False)
    assert learned == Work(490 + 3 * 62, 490**2 / 2 + 3 * (490 * 62 + 62**2 / 2), 3 * 30, 8 * 196, 8 * 196**2)
    with_crops = learner_work(3, 8, 196, size, HOW, token_budget=1000, subagents=True)
    assert with_crops.tokens == learned.tokens + 6 * 134
    assert with_crops.scored == learned.scored + 6 * 4
    assert mean_work([Work(1, 2), Work(3)], [0.25, 0.75]) == Work(2.5, 0.5)


def test_seconds_by_hand() -> None:
    # 2 bytes each of 1000 + 800 weights, and 3 sequences of 5 tokens of 32 bytes, at half of 1000 bytes a second
    assert pass_seconds(MACHINE, SMALL, 2, 3, 5, 0) == pytest.approx((3600 + 480) / 500)
    # 1000 sequences multiply for longer, at half of 4000 a second
    work = forward_flops(SMALL, Work(1000, 0, 1000)).total
    assert pass_seconds(MACHINE, SMALL, 2, 1000, 0, 0) == pytest.approx(work / 2000)
    assert pass_seconds(MACHINE, SMALL, 4, 1000, 0, 0) == pytest.approx(work / 1000)
    assert pass_seconds(MACHINE, SMALL, 2, 3, 5, 10) == pytest.approx((3600 + 480) / 500 + 2 * 10 * 0.25)

    size = Lengths(prompt=6, suffix=8, sampled=6, crop=3, report=4)
    main = pass_seconds(MACHINE, SMALL, 2, 4, 10, 0)
    crop = pass_seconds(MACHINE, SMALL, 2, 4, 5, 0)

    def decode(episodes: int, playing: int, decoding: int, how: Behaviour = HOW) -> float:
        return decode_seconds(
            MACHINE, SMALL, 2, size, how, episodes=episodes, playing=playing, decoding=decoding, operators=0
        )

    assert decode(4, 4, 4) == pytest.approx(3 * 10 * main + 2 * 4 * crop)  # a sub-agent of each of two turns
    assert decode(7, 4, 4) == pytest.approx(2 * decode(4, 4, 4))  # two waves
    twice = replace(HOW, calls=4)
    assert decode(4, 4, 4, twice) == pytest.approx(3 * 10 * main + 2 * 4 * 2 * crop)  # 8 sub-agents, 4 at a time
    assert decode(4, 4, 4, replace(HOW, turns=1)) == pytest.approx(10 * main)


# ---------------------------------------------------------------------- against the real thing


@pytest.fixture(scope="module")
def model() -> QwenVL:
    return fresh_model()


def episode_rows(model: QwenVL) -> list[Row]:
    """Four episodes of one prompt with 24 frames, each of two turns and two sub-agents of 4 frames."""
    prompt = text_of(model, "what is in this video?", frames_of("a", 24))
    reply = text_of(model, "reply")
    rows = []
    for g in range(4):
        rows.append(row(model, prompt, [9, reply, 6], g))
        for c in range(2):
            rows.append(row(model, text_of(model, "crop_video", frames_of(f"{g}{c}", 4)), [5], 10 * g + c, "crop"))
    return rows


def counted_work(model: QwenVL, rows: list[Row]) -> Work:
    """What one microbatch of them is, pair by pair."""
    work = Work()
    for group in share(model.chat, rows):
        prompt, suffixes = group.prompt, group.suffixes
        tokens = prompt + sum(suffixes)
        if len(suffixes) == 1:
            work += Work(tokens, tokens * (tokens + 1) / 2)
        else:
            pairs = sum(prompt * suffix + suffix * (suffix + 1) / 2 for suffix in suffixes)
            work += Work(tokens, prompt * (prompt + 1) / 2 + pairs)
    keys = {frame.key for one in rows for frame in one.images}
    return work + Work(0, 0, sum(one.mask.sum() for one in rows), 4 * len(keys), 16 * len(keys))


def attention_flops(q: Any, k: Any, causal: bool, products: int) -> int:
    (batch, heads, queries, dim), keys = q, k[2]
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    return products * 2 * batch * heads * dim * pairs


def forward_attention(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    return attention_flops(q, k, causal, 2)


def backward_attention(g: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, p: float, causal: bool, **_: Any) -> int:
    return attention_flops(q, k, causal, 5)


CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_attention,
}
"""Torch counts none of these."""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk", [7, 512])
def test_the_learner_multiplies_as_planned(checkpointing: bool, chunk: int) -> None:
    model = fresh_model()
    rows = episode_rows(model)
    learner = Learner(model, configure(activation_checkpointing=checkpointing, logits_chunk=chunk))
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        learner.step(rows, weights_of(rows))
    planned = training_flops(
        shape_of(model.module), counted_work(model, rows), checkpointing=checkpointing, head_again=chunk == 7
    )
    assert planned.total == pytest.approx(counter.get_total_flops(), rel=0.005)


def test_adapters_multiply_as_planned() -> None:
    model = fresh_model()
    rows, shape = episode_rows(model), shape_of(model.module)
    learner = Learner(model, configure(lora=LoRA(rank=4)))
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        learner.step(rows, weights_of(rows))
    adapters = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
    work = counted_work(model, rows)
    planned = training_flops(shape, work, checkpointing=False, adapters=adapters, head_again=False).total
    # Nothing is trained before the first layer: its projections to queries, keys and values pass no gradient on. Two
    # layers in all make much of that.
    planned -= 2 * work.tokens * shape.hidden * (shape.queries + 2 * shape.keys + 3 * 4)
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_scoring_multiplies_as_planned(model: QwenVL) -> None:
    rows = episode_rows(model)
    learner = Learner(model, configure())
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        learner.logprobs(rows)
    planned = forward_flops(shape_of(model.module), counted_work(model, rows)).total
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_about_what_is_kept(dtype: torch.dtype) -> None:
    model = fresh_model(dtype)
    rows = episode_rows(model)
    learner = Learner(model, configure())
    weights = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    packed = pack(model, rows, share(model.chat, rows))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = learner.scorer(packed)  # as long as it lives, so do the storages
    work, shape = counted_work(model, rows), shape_of(model.module)
    scored = work.scored * 4 * shape.vocabulary
    planned = activation_bytes(shape, dtype.itemsize, work.tokens, work.patches, checkpointing=False) + scored
    assert sum(kept.values()) == pytest.approx(planned, rel=0.1)
    del out


def test_tokens_are_those_of_the_packing() -> None:
    how = Behaviour(turns=2, calls=2, turn_tokens=100, report_tokens=30, window_frames=16)
    for budget, token_budget in ((64, 16_384), (64, 5000), (16, 2500), (4, 900), (64, 1000)):
        size = lengths(budget, 49, TEXTS, how)
        prompt, suffix = int(size.prompt), int(size.suffix)
        group = Shared(prompt, tuple(range(8)), (suffix,) * 8)
        fed = sum(piece.tokens for batch in pack_plan([group], token_budget) for piece in batch)
        work = learner_work(8, budget, 196, size, how, token_budget=token_budget, subagents=False)
        assert work.tokens == fed


def test_memory_is_that_of_real_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(shipped_model(), "float32")
    changes = [f"model.path={shipped_model()}", "loss.kl_coef=0.1"]
    run = estimate(load_recipe(RLRecipe, LAB, changes))
    prompt = text_of(model, "what?", frames_of("a", 2))
    rows = [row(model, prompt, [5], seed) for seed in range(2)]
    learner = Learner(model, configure(loss=replace(configure().loss, kl_coef=0.1)))
    seen: list[int] = []
    step = learner.optimizer.step
    parameters = list(model.module.parameters())
    monkeypatch.setattr(
        learner.optimizer, "step", lambda: (seen.append(sum(p.grad.nbytes for p in parameters)), step())
    )
    learner.step(rows, weights_of(rows), None, learner.reference_logprobs(rows))
    assert run.weights == sum(p.nbytes for p in parameters)
    assert [run.gradients] == seen
    moments = [value for state in learner.optimizer.state.values() for value in state.values() if value.ndim]
    assert run.optimizer == sum(value.nbytes for value in moments)
    assert learner._reference is not None
    assert run.reference == sum(p.nbytes for p in learner._reference.parameters())

    text = model.module.config.text_config
    pool = KVPool(text.num_hidden_layers, text.num_key_value_heads, model.head_dim, torch.float32, model.device)
    pool.reserve(3, 512)
    shape = shape_of(model.module)
    assert sum(layer.nbytes for layer in pool.layers) == 3 * 512 * key_value_bytes(shape, 4)


class Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_of_a_decoding_pass(dtype: torch.dtype) -> None:
    """Those that two more layers call."""
    words = train_tokenizer(["a b c"])

    def calls(layers: int) -> int:
        shape = TinyShape(layers=layers)
        model = QwenVL(build_model(words, shape).to(dtype), build_processor(words, shape))
        pool = KVPool(layers, shape.kv_heads, model.head_dim, dtype, model.device)
        pool.reserve(2, 8)
        block = Block(pool, 0, torch.tensor([[3], [3]]), 4)
        with torch.inference_mode(), Counter() as counter:
            model.module.model(input_ids=torch.tensor([[40], [41]]), position_ids=torch.full((3, 2, 1), 3), cache=block)
        return counter.calls

    assert (calls(4) - calls(2)) / 2 == pytest.approx(OPERATORS[dtype.itemsize], rel=0.1)


# ---------------------------------------------------------------------- what is known beforehand


@pytest.mark.parametrize("size", ["2b", "8b", "32b"])
def test_published_models_have_their_parameters(size: str) -> None:
    noted = facts("models")[size]
    module = empty_model(model_config(size))
    assert sum(p.numel() for p in module.parameters()) == noted["parameters"]
    assert module.dtype == torch.bfloat16
    assert model_config(noted["hub"]).to_dict() == model_config(size).to_dict()
    assert model_config("7b") is None


def test_the_cache_of_the_hub_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton(str(shipped_model())).config.save_pretrained(tmp_path)
    monkeypatch.setattr("paravt.known.try_to_load_from_cache", lambda hub, file: str(tmp_path / file))
    assert model_config("8b").text_config.hidden_size == 128


def test_texts_are_those_of_the_vocabulary(tokenizer: Any) -> None:  # noqa: F811
    processor = build_processor(tokenizer, TinyShape(frame_side=448))
    processor.chat_template = released("qwen3_vl")
    assert count_texts(TokenChat(processor)) == QWEN_TEXTS


def test_hardware_of_the_table_and_of_a_file(tmp_path: Path) -> None:
    assert hardware("h100") == hardware("H100")
    assert hardware("rtx 4090").memory == 24e9
    assert hardware("H200").bandwidth / hardware("H100").bandwidth == pytest.approx(4.8 / 3.35)
    own = tmp_path / "own.yaml"
    own.write_text("{memory: 96.0e+9, bandwidth: 4.0e+12, bfloat16: 148.0e+12, float32: 44.0e+12, training: 0.3}")
    assert hardware(str(own)) == Hardware(memory=96e9, bandwidth=4e12, bfloat16=148e12, float32=44e12, training=0.3)
    own.write_text("{memory: 96.0e+9, bandwidth: 0, bfloat16: 148.0e+12, float32: 44.0e+12}")
    with pytest.raises(RecipeError, match=r"own.yaml: bandwidth: .*greater than 0"):
        hardware(str(own))
    with pytest.raises(RecipeError, match=r"P100: no such accelerator \(H100, .*CPU\)"):
        hardware("P100")


# ---------------------------------------------------------------------- plans


def planned(model: str, gpus: int, *changes: str, servers: int = 0, path: Path = EIGHT, on: str = "H100") -> Plan:
    recipe = load_recipe(RLRecipe, path, changes)
    return make_plan(recipe, find_model(recipe, model), hardware(on), Behaviour(), gpus=gpus, servers=servers)


def test_eight_billion_on_eight_gpus() -> None:
    made = planned("8b", 8)
    memory = made.parts["memory of each of 8 GPUs"]
    run = estimate(load_recipe(RLRecipe, EIGHT), 8, find_model(load_recipe(RLRecipe, EIGHT), "8b").module)
    assert memory["weights"].value == run.weights == memory["optimizer"].value / 2
    assert memory["engine's own weights"].value == 2 * 8_767_123_696
    assert all(memory[name].kind == "exact" for name in ("weights", "gradients", "optimizer", "reference"))
    lasting = sum(memory[name].value for name in ("weights", "optimizer", "reference", "engine's own weights"))
    learning = sum(
        memory[name].value for name in ("gradients", "gathered blocks", "activations, checkpointed", "logits")
    )
    assert memory["peak"].value == lasting + max(learning, memory["keys and values"].value)
    assert memory["activations, all kept"].value > 8 * memory["activations, checkpointed"].value
    assert made.fits
    assert not made.warnings

    assert [budget.share for budget in made.budgets] == [0.2] * 5
    (last,) = (budget for budget in made.budgets if budget.frames == 64)
    assert last.lengths == Lengths(412 + 64 * 59, 2 * 256 + 2 * (96 + 20) + 10, 512, 78 + 16 * 59, 96)
    tokens = made.parts["tokens of a step"]
    assert tokens["episodes"].value == 56
    assert tokens["sampled in main traces"].value == 56 * 512
    assert tokens["sampled by sub-agents"].value == 56 * 2 * 96
    learned = sum(budget.learned.tokens for budget in made.budgets) / 5
    assert tokens["through the learner"].value == pytest.approx(7 * learned)
    time = made.parts["time of a step"]
    parts = time["read prompts"].value + time["decode"].value + time["learn"].value
    assert time["step"].value == pytest.approx(parts)
    assert time["step"].value < time["step, slowest"].value
    assert time["steps per hour"].value == pytest.approx(3600 / parts)
    # the prompt that a process has, at the mean over K; forward of the reference too
    shape = shape_of(empty_model(model_config("8b")))
    work = mean_work([budget.learned for budget in made.budgets], [0.2] * 5)
    flops = training_flops(shape, work, checkpointing=True).total + forward_flops(shape, work).total
    assert time["learn"].value == pytest.approx(flops / (0.4 * 989e12))


def test_what_does_not_fit_says_so() -> None:
    made = planned("32b", 8)
    assert not made.fits
    assert any(warning.startswith("does not fit: ") for warning in made.warnings)
    long = planned("8b", 8, "episode.max_context_tokens=4096")
    assert [warning.split(":")[0] for warning in long.warnings] == ["K = 64"]
    with pytest.raises(RecipeError, match="needs several processes"):
        planned("8b", 1)
    with pytest.raises(ModelError, match=r"no such model directory.*; --model takes tiny"):
        find_model(load_recipe(RLRecipe, EIGHT))


def test_servers_take_the_engine_away() -> None:
    alone, apart = planned("8b", 8), planned("8b", 8, servers=2)
    learners, servers = apart.parts["memory of each of 6 GPUs that learn"], "memory of each of 2 GPUs that serve"
    assert learners["engine's own weights"].value == learners["keys and values"].value == 0
    assert apart.value(servers, "weights") == 2 * 8_767_123_696
    # a pass is replayed from a graph: nothing waits for calls of operators
    assert apart.value("time of a step", "decode") < alone.value("time of a step", "decode")
    ahead = planned("8b", 8, "rollout.max_staleness=1", servers=2)
    time = ahead.parts["time of a step"]
    sampling = time["read prompts"].value + time["decode"].value
    assert time["step"].value == pytest.approx(max(sampling, time["learn"].value))
    assert time["step"].value < apart.value("time of a step", "step")
    split = planned("32b", 16, servers=4)  # 67 GB of weights on two of 80 GB
    assert split.value("memory of each of 4 GPUs that serve", "weights") == 33_357_390_064
    # all 56 episodes at a time would not fit beside the weights: some wait
    cached = planned("32b", 8, servers=2).value("memory of each of 2 GPUs that serve", "keys and values")
    assert 0.85 * (0.9 * 80e9 - 33_357_390_064) < cached <= 0.9 * 80e9 - 33_357_390_064
    assert planned("32b", 24, "token_budget=8192", servers=8).fits
    assert any("none of which are among these GPUs" in w for w in planned("8b", 8, "engine={kind: vllm}").warnings)
    with pytest.raises(RecipeError, match="must be a multiple of 2"):
        planned("32b", 16, servers=3)
    with pytest.raises(RecipeError, match="leaves none of 8 GPUs"):
        planned("8b", 8, servers=8)


def test_behaviour_keeps_to_the_recipe() -> None:
    how = planned("8b", 8, "episode.dispatch=sequential", "episode.max_tokens=100", "episode.max_turns=1").behaviour
    assert (how.turns, how.calls, how.turn_tokens) == (1, 0, 100)
    assert planned("8b", 8, "episode.dispatch=sequential").behaviour.calls == 1
    assert planned("8b", 8, "episode.dispatch=none").behaviour.calls == 0
    assert [budget.frames for budget in planned("8b", 8, "gating=false").budgets] == [64]


def test_adapters_and_the_tiny_model() -> None:
    lora = planned("8b", 1, path=RECIPES / "qwen3vl-8b" / "rl-lora.yaml")
    memory = lora.parts["memory of each of 1 GPUs"]
    assert memory["reference"].value == memory["engine's own weights"].value == 0
    assert lora.value("model", "trained") < 0.02 * lora.value("model", "parameters")
    tiny = planned("tiny", 1, path=LAB, on="cpu")
    assert tiny.model == "tiny"
    assert tiny.fits
    assert not tiny.warnings
    model = load_model(shipped_model())
    assert tiny.value("model", "parameters") == sum(p.numel() for p in model.module.parameters())
    asked = question("video-0", 0).sample
    for budget in tiny.budgets:  # its own vocabulary; a frame is one visual token
        scene = Scene(asked, EpisodeConfig(), model.chat.clean, 120.0, frames_of("v", budget.frames))
        prompt = model.chat.open(*PARAVT.first(scene), "<think>\n")
        assert budget.lengths.prompt == pytest.approx(len(prompt.ids), abs=0.02 * len(prompt.ids))


def test_plan_on_the_command_line() -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["plan", str(EIGHT), "--gpus", "8", *arguments])

    done = run("--model", "8b", "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["parts"]["model"]["parameters"] == {"value": 8_767_123_696, "unit": "", "kind": "exact", "note": ""}
    assert made["hardware"]["memory"] == 80e9
    assert len(made["budgets"]) == 5
    shown = run("--model", "32b", "--calls", "3")
    assert shown.exit_code == 0, shown.output
    for line in ("32b on 8 x H100", "memory of each of 8 GPUs", "66.7 GB exact", "steps per hour", "3 sub-agents"):
        assert line in " ".join(shown.stdout.split()), line
    assert "paravt: does not fit: " in shown.stderr
    engine = 'engine={kind: vllm, replicas: 2, devices: ["4,5", "6,7"]}'
    placed = run("--model", "8b", "--json", "--set", engine)
    assert json.loads(placed.stdout)["servers"] == 4
    assert json.loads(run("--model", "8b", "--json", "--set", engine, "--servers", "2").stdout)["servers"] == 2


def test_the_table_of_the_docs() -> None:
    """docs/plan.md shows what `paravt plan` says today."""
    lines = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    (start,) = (n for n, row in enumerate(rows) if row[0] == "model")
    table = rows[start + 1 : start + 6]
    assert [row[0] for row in table] == ["tiny", "2b", "8b", "32b", "32b, LoRA"]
    for model, servers, *shown in table:
        path = {"tiny": LAB, "32b, LoRA": RECIPES / "qwen3vl-8b" / "rl-lora.yaml"}.get(model, EIGHT)
        made = planned(model.split(",")[0], 8, servers=int(servers), path=path)
        (memory,) = (name for name in made.parts if name.startswith("memory of") and not name.endswith("serve"))
        lasting = ("weights", "optimizer", "reference", "engine's own weights", "gradients", "gathered blocks")
        held = Entry(sum(made.value(memory, name) for name in lasting), "bytes", "exact")
        entries = [held, *(made.parts[memory][name] for name in ("activations, checkpointed", "activations, all kept"))]
        entries += [made.parts[memory]["keys and values"], made.parts[memory]["peak"]]
        entries += [made.parts["tokens of a step"]["through the learner"], made.parts["work of a step"]["learn"]]
        entries += [made.parts["time of a step"][name] for name in ("step", "step, slowest", "steps per hour")]
        assert shown == [*map(amount, entries), "yes" if made.fits else "no"]


@pytest.mark.parametrize(
    "options",
    [
        ("--calls", "inf"),
        ("--calls", "1e300"),
        ("--turn-tokens", "inf", "--set", "episode.max_tokens=1" + "0" * 200),
        ("--gpus", "9" * 400),
        ("--set", "rollout.prompts=" + "9" * 400),
        ("--set", "steps=" + "9" * 400),
        ("--hardware", "slow.yaml"),
    ],
)
def test_numbers_beyond_all_measure_are_one_line(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.yaml").write_text("memory: 8.0e10\nbandwidth: 1.0e-300\nbfloat16: 1.0e-300\nfloat32: 1.0e-300\n")
    done = CliRunner().invoke(app, ["plan", str(LAB.absolute()), "--model", "tiny", *options])
    assert isinstance(done.exception, RecipeError), done.exception
    assert "too large, or too small, for a plan" in str(done.exception)
