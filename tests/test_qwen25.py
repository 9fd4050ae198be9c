"""Two model families through the whole path: engine, learner, episode, update; and what is Qwen2.5-VL's own.

Its published checkpoints have their settings in an older layout, a larger smallest frame, and a chat template without
a place for tools, which would hide the tool from the agent without a word.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import LONG
from rich.console import Console
from test_learner import check_as_every_row_alone, configure, naive_logprobs, row, weights_of
from test_local_engine import check
from test_models import FAMILIES, SHAPE, build, noise, user
from test_rl import BASE, metrics, weights

from paravt.agent import EpisodeConfig, run_episode
from paravt.algo import CreditConfig, loss_weights, rows_from_group
from paravt.chat import APPEND_ONLY_TEMPLATE, text_message
from paravt.config import RLRecipe, load_recipe
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.errors import ModelError
from paravt.lab.factory import train_rl
from paravt.learner import Learner, LoRA
from paravt.models import QwenVL, load_model
from paravt.optim import OptimizerConfig
from paravt.packing import dummy_row
from paravt.spans import token_bytes
from paravt.turns import render_call
from paravt.types import Frame, Row, Sample

TEMPERATURE = 0.7
both = pytest.mark.parametrize("family", FAMILIES)


def prompt(model: QwenVL, text: str, frames: list[Frame]) -> Prompt:
    segment = model.chat.open([text_message("system", "320"), user(text, frames)])
    return Prompt(segment.ids, segment.images)


# ---------------------------------------------------------------------- engine


@both
async def test_the_engine_says_what_a_plain_forward_pass_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that share their prompt while they decode, strangers beside them, later turns with frames in replies."""
    shared: list[int] = []
    find = LocalEngine._trunks

    def spy(self: LocalEngine, rows: list[Any], width: int) -> Any:
        trunks = find(self, rows, width)
        shared.append(len(trunks))
        return trunks

    monkeypatch.setattr(LocalEngine, "_trunks", spy)
    model = build(family)
    frames = [noise(model, i, *shape) for i, shape in enumerate([(1, 1), (3, 4), (4, 4), (3, 4)])]
    large = prompt(model, "what is in this video?", [*frames, frames[0]] * 4)
    async with LocalEngine(model) as engine:
        await engine.generate(large, Sampling(1))
        assert engine.stats.encoded_images == 4, "of twenty, four are different"
        jobs = [engine.generate(large, Sampling(12, TEMPERATURE, seed=1), 5),
                engine.generate(prompt(model, "what?", frames[1:2]), Sampling(9)),
                engine.generate(prompt(model, "320", []), Sampling(5, 1.0, seed=2), 2)]  # fmt: skip
        group, (other,), text = await asyncio.gather(*jobs)
        assert any(shared)
        for completion in group:
            check(model, large, completion, TEMPERATURE)
        check(model, prompt(model, "what?", frames[1:2]), other)
        for completion in text:
            check(model, prompt(model, "320", []), completion, 1.0)

        asked = prompt(model, "what is in it?", frames[:2])
        for turn in range(3):
            fed = engine.stats.fed_tokens
            (done,) = await engine.generate(asked, Sampling(10, TEMPERATURE, seed=turn))
            check(model, asked, done, TEMPERATURE)
            assert turn == 0 or engine.stats.fed_tokens - fed < len(asked.ids), "goes on from its own cache"
            more = [noise(model, 10 * turn + 5, 2, 3), noise(model, 10 * turn + 6)]
            reply = model.chat.reply([user("report", more, "tool")], done.stop_reason == "stop")
            asked = Prompt((*asked.ids, *done.ids, *reply.ids), (*asked.images, *reply.images))


@both
async def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model = build(family, shape=replace(SHAPE, init_std=0.3))
    asked = prompt(model, "what is in this video?", [noise(model, 1, 3, 4), noise(model, 2)])
    pixels, grid = model.pixel_inputs(asked.images)
    ids = torch.tensor([asked.ids])
    expected = model.module.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grid,
        mm_token_type_ids=(ids == model.chat.image_id).int(), max_new_tokens=16, do_sample=False,
        suppress_tokens=model.banned_ids,
    )  # fmt: skip
    async with LocalEngine(model) as engine:
        (done,) = await engine.generate(asked, Sampling(16))
    assert list(done.ids) == expected[0, len(asked.ids) :].tolist()


# ---------------------------------------------------------------------- learner


def batch(model: QwenVL) -> list[Row]:
    """A ragged group, with frames of several sizes in prompts and replies; a row alone; one without frames."""

    def text(words: str, *frames: Frame) -> tuple[list[int], tuple[Frame, ...]]:
        segment = model.chat.open([user(words, frames)])
        return list(segment.ids), segment.images

    first = text("what is in this video?", noise(model, 1), noise(model, 2, 3, 4), noise(model, 3))
    reply = text("reply", noise(model, 4, 2, 2), noise(model, 1))
    return [
        row(model, first, [7], 1),
        row(model, first, [2, reply, 4, text("another", noise(model, 5, 4, 4)), 3], 2),
        row(model, text("320", noise(model, 6, 1, 3)), [6, reply, 2], 3, "alone"),
        row(model, text("320"), [4], 4, "text"),
        row(model, first, [1], 5),
    ]


@both
@pytest.mark.parametrize("changes", [{}, {"kernel": "dense", "token_budget": 100}, {"activation_checkpointing": True}])
def test_the_learner_does_what_every_row_alone_does(
    family: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    monkeypatch.setattr("test_learner.batch", batch)
    check_as_every_row_alone(model, configure(**changes), monkeypatch, (1e-5, 1e-4))


@both
def test_a_step_trains_all_parts(family: str) -> None:
    model = build(family)
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    rows = batch(model)
    learner = Learner(model, configure(optimizer=OptimizerConfig(learning_rate=1e-3)))
    old = learner.logprobs(rows)
    steps = [learner.step(rows, weights_of(rows), old) for _ in range(3)]
    assert steps[2].loss < steps[1].loss < steps[0].loss
    still = [name for name, parameter in model.module.named_parameters() if torch.equal(parameter, before[name])]
    assert not still
    assert np.isfinite(learner.logprobs([dummy_row(model)])[0]).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=8)])
def test_what_is_exported_computes_the_same(tied: bool, lora: LoRA | None, tmp_path: Path) -> None:
    model = build("qwen2_5_vl", tied=tied)
    rows = batch(model)
    learner = Learner(model, configure(lora=lora, optimizer=OptimizerConfig(learning_rate=1e-2)))
    before = np.concatenate(learner.logprobs(rows))
    learner.step(rows, weights_of(rows))
    learner.step(rows, weights_of(rows))
    after = np.concatenate(learner.logprobs(rows))
    assert np.abs(after - before).max() > 1e-3
    learner.merge_and_export(tmp_path)
    loaded = load_model(tmp_path)
    np.testing.assert_allclose(np.concatenate(Learner(loaded, configure()).logprobs(rows)), after, rtol=0, atol=1e-4)
    names = learner.weights().keys()
    assert ("lm_head.weight" in names) != tied
    assert names == loaded.module.state_dict().keys() - ({"lm_head.weight"} if tied else set())


# ---------------------------------------------------------------------- episodes and updates


class CallsFirst(LocalEngine):
    """A model that knows nothing makes no calls: the first turn is put into its mouth."""

    first = "<think>\nlook\n</think>\n" + "\n".join(
        render_call("crop_video", {"start_time": start, "end_time": start + 3}) for start in (10, 50)
    )
    spoken = False

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        done = await super().generate(prompt, sampling, n)
        if self.spoken:
            return done
        self.spoken = True
        ids = (*self.chat.tokenizer.encode(self.first, add_special_tokens=False), self.chat.end_id)
        return [replace(done[0], ids=ids, text=self.first + "<|im_end|>", logprobs=(0.0,) * len(ids),
                        stop_reason="stop")]  # fmt: skip


@both
async def test_an_episode_with_sub_agents_is_learned_from(family: str) -> None:
    model = build(family, shape=replace(SHAPE, frame_side=64))
    config = EpisodeConfig(
        frame_budget=4, crop_max_frames=3, evidence="both", max_tokens=16, max_report_tokens=6, max_turns=2,
        temperature=TEMPERATURE, force_answer=False,
    )  # fmt: skip
    episodes = []
    for seed in range(2):
        async with CallsFirst(model) as engine:
            episodes.append(await run_episode(Sample("s", LONG, "?"), engine, replace(config, seed=seed)))
    for episode in episodes:
        assert episode.scored, episode.errors
        assert [crop.status for crop in episode.crops] == ["ran", "ran"]
        assert len(episode.main.images) == 4 + 2 * 3, "overview, and the crops' frames in the reply"
        sides = {side for trace in episode.traces for image in trace.images for side in image.pixels.shape[:2]}
        assert all(side % model.chat.frame_factor == 0 for side in sides)
    spell = partial(token_bytes, model.chat.tokenizer)
    rows = rows_from_group(episodes, [1.0, 0.0], CreditConfig(), spell, group_id="g")
    assert [one.role for one in rows] == ["main", "crop", "crop"] * 2
    learner = Learner(model, configure(optimizer=OptimizerConfig(learning_rate=1e-3)))
    old = learner.logprobs(rows)
    for one, logprobs in zip(rows, old, strict=True):
        np.testing.assert_allclose(
            logprobs[one.mask], naive_logprobs(model.module, model, one).detach(), rtol=0, atol=1e-5
        )
        sampled = one.mask & (one.logprobs != 0)  # all but what was put in
        assert sampled.any()
        np.testing.assert_allclose(logprobs[sampled], one.logprobs[sampled], rtol=0, atol=1e-4)
    assert learner.step(rows, loss_weights(rows), old).grad_norm > 0


def test_a_run_of_reinforcement_learning(tmp_path: Path) -> None:
    build("qwen2_5_vl", shape=replace(SHAPE, frame_side=64)).save(tmp_path / "start")
    questions = [{"video": LONG, "question": f"{i}?", "options": ["a", "b"], "answer": "A"} for i in range(2)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    changes = [
        f"model.path={tmp_path / 'start'}", f"data={{kind: jsonl, path: {tmp_path / 'questions.jsonl'}}}", "steps=2",
        "rollout.prompts=2", "rollout.group_size=2", "episode.frame_budget=4", "frame_budgets=[4, 8]",
        "episode.max_tokens=16", "reward.functions=[test_rl:uneven]",
    ]  # fmt: skip
    train_rl(load_recipe(RLRecipe, BASE / "full.yaml", changes), tmp_path / "out", Console(quiet=True))
    steps = metrics(tmp_path / "out")
    assert [step["episodes"] for step in steps] == [4, 4]
    for step in steps:
        assert step["unscored"] == 0
        assert step["rows"] > 0
        assert step["token/mismatch"] < 1e-4
    start = load_model(tmp_path / "start").module.state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights(tmp_path / "out").items())


# ---------------------------------------------------------------------- as published

# What the published template does, in short: a system turn of its own where there is none, roles as they are called,
# and not a word about tools.
NO_TOOLS = """{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.content is string -%}{{- m.content -}}
{%- else -%}{%- for part in m.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def publish(model: QwenVL, at: Path) -> Path:
    """As the hub has them: one flat configuration, image settings and template in files of their own, area limits."""
    model.save(at)
    config = json.loads((at / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    for name in ("layer_types", "model_type", "dtype"):
        text.pop(name, None)
    config |= text | {"rope_theta": rope["rope_theta"], "torch_dtype": "float32",
                      "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}  # fmt: skip
    config["vision_config"] = {k: v for k, v in vision.items() if k != "rope_parameters"} | {"model_type": "qwen2_5_vl"}
    (at / "config.json").write_text(json.dumps(config))
    (at / "processor_config.json").unlink()
    (at / "chat_template.jinja").unlink()
    settings = {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip
    (at / "preprocessor_config.json").write_text(json.dumps(settings))
    (at / "chat_template.json").write_text(json.dumps({"chat_template": NO_TOOLS}))
    return at


def test_a_checkpoint_in_the_published_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = build("qwen2_5_vl", tied=False)
    with caplog.at_level(logging.WARNING):
        model = load_model(publish(made, tmp_path))
    assert all(torch.equal(tensor, made.module.state_dict()[n]) for n, tensor in model.module.state_dict().items())
    assert model.chat.frame_factor == 28
    assert model.chat.context_limit == 32_768
    frames = [noise(model, 1), noise(model, 2, 8, 8)]  # 28 x 28 px, below the published minimum, and 224 x 224 px
    assert model.pixel_inputs(frames)[1].tolist() == [[1, 2, 2], [1, 16, 16]]
    assert [model.chat.image_tokens(frame) for frame in frames] == [1, 64]
    asked = prompt(model, "what is in this video?", [noise(model, 1), noise(model, 2, 3, 4)])

    def logits(of: QwenVL) -> torch.Tensor:
        ids = torch.tensor([asked.ids])
        pixels, grid = of.pixel_inputs(asked.images)
        types = (ids == of.chat.image_id).int()
        with torch.no_grad():
            return of.module(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=types).logits

    torch.testing.assert_close(logits(model), logits(made))
    assert "drops tools" in caplog.text
    assert model.chat.template == APPEND_ONLY_TEMPLATE


def test_the_template_shows_tools_and_is_append_only(tmp_path: Path) -> None:
    model = load_model(publish(build("qwen2_5_vl"), tmp_path))
    tool = {"type": "function", "function": {"name": "crop_video", "description": "d", "parameters": {}}}
    opened = model.chat.open([text_message("system", "s"), user("q", [noise(model, 1, 2, 2)])], [tool])
    assert "<tools>" in opened.text
    assert '"crop_video"' in opened.text
    assert opened.ids.count(model.chat.image_id) == 4
    assert list(opened.ids) == model.processor(text=[opened.text], images=[opened.images[0].pixels])["input_ids"][0]
    reply = model.chat.reply([text_message("tool", "a"), user("b", [noise(model, 2)], "tool")], closed=True)
    one, two = "<tool_response>\na\n</tool_response>", "<1.0 seconds>"
    assert reply.text.startswith(f"\n<|im_start|>user\n{one}\n<tool_response>\n")
    assert reply.text.replace(two, "").endswith("b\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert "Be helpful" not in opened.text + reply.text


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    build("qwen2_5_vl").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    del config["text_config"]["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="sliding window"):
        load_model(tmp_path)
