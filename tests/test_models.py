"""Loading a checkpoint: what cannot be loaded is one line, and frames of published checkpoints are left as they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LONG

from paravt.agent import EpisodeConfig, run_episode
from paravt.engines.local import LocalEngine
from paravt.errors import ModelError
from paravt.models import QwenVL, load_model
from paravt.types import Frame, Sample
from paravt.video import FrameReader, VideoInfo


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
        (other_family, "a llama model; supported: qwen3_vl"),
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


def test_a_model_is_loaded_as_it_was_saved(tiny: QwenVL, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    tiny.save(tmp_path)
    loaded = load_model(tmp_path, "float32").module
    assert not loaded.training
    assert all(torch.equal(w, loaded.state_dict()[name]) for name, w in tiny.module.state_dict().items())
