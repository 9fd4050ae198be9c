"""Loading a checkpoint: what cannot be loaded is one line, and frames of published checkpoints are left as they are.

And what a model of either family gives the engines and the learner, against transformers: rope positions, vision
features, their gradient.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LONG
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from paravt.agent import EpisodeConfig, run_episode
from paravt.engines.local import LocalEngine
from paravt.errors import ModelError
from paravt.lab.tiny import (
    TinyShape,
    build_model,
    build_processor,
    build_qwen25_model,
    build_qwen25_processor,
    train_tokenizer,
)
from paravt.models import QwenVL, load_model
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, Sample, TextPart
from paravt.video import FrameReader, VideoInfo

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
SHAPE = TinyShape(hidden=48, layers=3, heads=4, kv_heads=2, feed_forward=64, vision_hidden=32, frame_side=128)


def build(family: str, seed: int = 0, shape: TinyShape = SHAPE, **options: bool) -> QwenVL:
    """A tiny model with random weights; its frames have up to four by four visual tokens."""
    tokenizer = train_tokenizer([Prompts().system, "<1.0 seconds> 320 what is in this video"], ["what is in"])
    if family == "qwen3_vl":
        return QwenVL(build_model(tokenizer, shape, seed), build_processor(tokenizer, shape))
    return QwenVL(build_qwen25_model(tokenizer, shape, seed, **options), build_qwen25_processor(tokenizer, shape))


def noise(model: QwenVL, seed: int, rows: int = 1, columns: int = 1) -> Frame:
    """A frame of so many visual tokens."""
    shape = (rows * model.chat.frame_factor, columns * model.chat.frame_factor, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Frame(float(seed), pixels, f"{seed}/{rows}x{columns}")


def user(text: str, frames: Sequence[Frame] = (), role: str = "user") -> Message:
    parts = [part for f in frames for part in (TextPart(f"<{f.time:.1f} seconds>"), ImagePart(f))]
    return Message(role, (*parts, TextPart(text)))  # type: ignore[arg-type]


def garbage(at: Path) -> None:
    (at / "model.safetensors").write_bytes(b"garbage" * 100)


def cut(at: Path) -> None:
    whole = (at / "model.safetensors").read_bytes()
    (at / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def pickled(at: Path) -> None:
    (at / "model.safetensors").unlink()
    torch.save({}, at / "pytorch_model.bin")


def broken_config(at: Path) -> None:
    (at / "config.json").write_text("{oops")


def absurd_config(at: Path) -> None:
    (at / "config.json").write_text('{"model_type": "qwen3_vl", "text_config": {"hidden_size": "x"}}')


def other_shapes(at: Path) -> None:
    config = json.loads((at / "config.json").read_text())
    config["text_config"]["intermediate_size"] //= 2
    (at / "config.json").write_text(json.dumps(config))


def other_family(at: Path) -> None:
    (at / "config.json").write_text('{"model_type": "llama"}')


def incomplete(at: Path) -> None:
    weights = load_file(at / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.0.mlp." not in name}
    save_file(kept, at / "model.safetensors", {"format": "pt"})


def headless(at: Path) -> None:
    weights = load_file(at / "model.safetensors")
    assert "lm_head.weight" not in weights, "it is tied: no tensor of its own"
    kept = {name: tensor for name, tensor in weights.items() if "embed_tokens" not in name}
    save_file(kept, at / "model.safetensors", {"format": "pt"})


def no_processor(at: Path) -> None:
    for path in at.glob("*process*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (garbage, "a weights file is damaged .*; copy it again"),
        (cut, "a weights file is damaged .*; copy it again"),
        (pickled, "no file named model.safetensors"),
        (broken_config, "not a valid JSON"),
        (absurd_config, "hidden_size"),
        (other_shapes, "cannot be loaded"),
        (other_family, "a llama model; supported: qwen3_vl, qwen2_5_vl"),
        (incomplete, r"no tensor model\.language_model\.layers\.0\.mlp\.\S+ \(3 missing\); copy it again"),
        (headless, r"no tensor model\.language_model\.embed_tokens\.weight \("),
        (no_processor, "image processor"),
    ],
)
def test_damaged_checkpoints_are_one_line(
    tiny: QwenVL, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    tiny.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"device": "foo"}, "device foo: .*; choose another device"),
        ({"device": "mps:7"}, "device mps:7: .*; choose another device"),
        ({"dtype": "foo"}, "dtype foo: not one of auto, float32, bfloat16, float16"),
        ({"dtype": "int8"}, "dtype int8: not one of"),
    ],
)
def test_devices_and_dtypes_that_are_not_there(
    tiny: QwenVL, tmp_path: Path, choice: dict[str, str], reason: str
) -> None:
    tiny.save(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(tmp_path, **choice)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_driver(tiny: QwenVL, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    with pytest.raises(ModelError, match=r"device cuda: .*; choose another device") as caught:
        load_model(tmp_path, device="cuda")
    assert "\n" not in str(caught.value)


def with_published_sizes(tiny: QwenVL, at: Path) -> Path:
    """The tiny model as the hub's checkpoints of Qwen3-VL are: image settings in a file of their own, large frames."""
    tiny.save(at)
    os.remove(at / "processor_config.json")
    settings = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    image = {**settings, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**settings, "video_processor_type": "Qwen3VLVideoProcessor"}
    (at / "preprocessor_config.json").write_text(json.dumps(image))
    (at / "video_preprocessor_config.json").write_text(json.dumps(video))
    return at


class Enlarging(FrameReader):
    """Its videos are large ones, of which an episode takes frames of 224 x 224 px."""

    async def ainfo(self, path: str | os.PathLike[str]) -> VideoInfo:
        return replace(await super().ainfo(path), width=1024, height=1024)


def frame(width: int, height: int) -> Frame:
    return Frame(0.0, np.zeros((height, width, 3), np.uint8), f"{width}x{height}")


async def test_frames_are_not_resized_where_the_published_minimum_is_larger(tiny: QwenVL, tmp_path: Path) -> None:
    path = with_published_sizes(tiny, tmp_path / "hub")
    model = load_model(path)
    for width, height in ((32, 32), (224, 224), (288, 160)):
        pixels, grid = model.pixel_inputs([frame(width, height)])
        assert grid.tolist() == [[1, height // 16, width // 16]]
        assert len(pixels) == height * width // 256
    model.save(tmp_path / "again")
    assert load_model(tmp_path / "again").processor.image_processor.size["shortest_edge"] == 32 * 32
    async with LocalEngine(model) as engine:
        config = EpisodeConfig(frame_budget=2, max_tokens=4, max_turns=1, force_answer=False)
        episode = await run_episode(Sample("s", LONG, "?"), engine, config, reader=Enlarging())
        assert engine.stats.encoded_images == 2
    assert episode.scored, episode.errors
    assert [image.pixels.shape for image in episode.main.images] == [(224, 224, 3)] * 2
    assert model.pixel_inputs(episode.main.images)[1].tolist() == [[1, 14, 14]] * 2
    assert list(episode.main.ids).count(model.chat.image_id) == 2 * 49


def test_limits_under_their_old_names_hold(tiny: QwenVL, tmp_path: Path) -> None:
    processor = load_model(with_published_sizes(tiny, tmp_path)).processor
    images = processor.image_processor
    images.size = {"shortest_edge": 56 * 56, "longest_edge": 10**9}
    images.min_pixels, images.max_pixels = 65_536, 4096
    model = QwenVL(tiny.module, processor)
    assert (images.min_pixels, images.max_pixels, model.chat.max_pixels) == (1024, 4096, 4096)
    assert model.chat.image_tokens(frame(32, 32)) == 1
    with pytest.raises(ValueError, match=r"outside 1024\.\.4096"):
        model.chat.image_tokens(frame(96, 64))


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3_vl", {}), ("qwen2_5_vl", {"tied": True}), ("qwen2_5_vl", {"tied": False})]
)
def test_a_model_is_loaded_as_it_was_saved(family: str, options: dict[str, bool], tmp_path: Path) -> None:
    model = build(family, **options)
    shutil.rmtree(tmp_path)
    model.save(tmp_path)
    loaded = load_model(tmp_path, "float32")
    assert not loaded.module.training
    assert type(loaded.module) is type(model.module)
    assert type(loaded.processor) is type(model.processor)
    assert loaded.chat.template == model.chat.template
    state = loaded.module.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.module.state_dict().items())
    head, embedding = loaded.module.lm_head.weight, loaded.module.model.language_model.embed_tokens.weight
    assert (head is embedding) == options.get("tied", True)
    # and without anything of ours
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert all(torch.equal(weight, state[name]) for name, weight in plain.state_dict().items())
    assert type(AutoProcessor.from_pretrained(tmp_path)) is type(model.processor)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: str) -> None:
    model = build(family)
    shapes = [(1, 1), (2, 4), (3, 1), (2, 2)]
    segment = model.chat.open([user("what is in?", [noise(model, i, *shape) for i, shape in enumerate(shapes)])])
    ids = torch.tensor([segment.ids])
    types = (ids == model.chat.image_id).int()
    expected, _ = model.module.model.get_rope_index(ids, types, model.pixel_inputs(segment.images)[1])
    found, after = model.positions(segment.ids, segment.images)
    np.testing.assert_array_equal(found, expected[:, 0])  # temporal, height, width
    assert after == found.max() + 1
    second = np.flatnonzero(types[0])[1:9]  # the frame of two by four: one time, its rows, its columns
    assert (found[:, second] - found[0, second[0]]).tolist() == [[0] * 8, [0] * 4 + [1] * 4, [0, 1, 2, 3] * 2]
    cut = int(second[-1]) + 1
    head, start = model.positions(segment.ids[:cut], segment.images[:2])
    tail, end = model.positions(segment.ids[cut:], segment.images[2:], start)
    np.testing.assert_array_equal(np.concatenate([head, tail], 1), found)
    assert end == after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shapes", [[(1, 1)] * 3, [(4, 4)] * 2, [(3, 4)] * 2, [(1, 1), (3, 3), (2, 4), (4, 1), (1, 1)]])
def test_vision_features_and_their_gradient_are_those_of_transformers(
    family: str, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Frames of one size and of many; with Qwen2.5-VL windows of one size and of many, too."""
    model = build(family)
    frames = [noise(model, i, *shape) for i, shape in enumerate(shapes)]
    plain = AutoModelForImageTextToText.from_config(model.module.config)
    plain.load_state_dict(model.module.state_dict())
    assert {type(m) for m in plain.modules()}.isdisjoint(model.family.faster.values())
    model.module.to(dtype)
    plain.to(dtype)
    theirs = plain.model.get_image_features(*model.pixel_inputs(frames), return_dict=True)
    fed: list[int] = []
    model.module.model.visual.patch_embed.register_forward_pre_hook(lambda _, args: fed.append(len(args[0])))
    ours = model.encode_images([frames[1], *frames, frames[0]])
    assert fed == [4 * sum(height * width for height, width in shapes)], "equal frames go through the tower once"
    bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}

    def features(of: object) -> list[list[torch.Tensor]]:
        levels = [torch.split(level, [len(one) for one in of.pooler_output]) if torch.is_tensor(level) else level
                  for level in getattr(of, "deepstack_features", ())]  # type: ignore[attr-defined]  # fmt: skip
        return [list(of.pooler_output), *map(list, levels)]  # type: ignore[attr-defined]

    assert len(features(ours)) == (1 + SHAPE.vision_depth if family == "qwen3_vl" else 1)
    for mine, other in zip(features(ours), features(theirs), strict=True):
        for a, b in zip(mine, [other[1], *other, other[0]], strict=True):
            torch.testing.assert_close(a, b, **bounds)
    if dtype == torch.float32:
        for of, pick in ((ours, slice(1, -1)), (theirs, slice(None))):
            sum(one.square().sum() for level in features(of) for one in level[pick]).backward()
        found = dict(model.module.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                scale = float(parameter.grad.abs().max())
                torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-3, atol=1e-5 * scale, msg=name)
