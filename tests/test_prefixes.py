"""What sequences share is found as by comparing each with each; frames are prepared as the image processor does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paravt.engines.kv import PrefixIndex, common_prefix
from paravt.lab.tiny import (
    TinyShape,
    build_model,
    build_processor,
    build_qwen25_model,
    build_qwen25_processor,
    train_tokenizer,
)
from paravt.models import QwenVL
from paravt.types import Frame

DRAW = np.random.default_rng(0)


def keys(count: int) -> list[np.ndarray]:
    """Short keys over few values, negative ones among them, so that prefixes of all lengths are shared."""
    return [DRAW.choice([-(2**40), 0, 1, 256], DRAW.integers(1, 9)).astype(np.int64) for _ in range(count)]


def test_the_longest_prefix_is_the_one_that_comparing_with_all_finds() -> None:
    assert PrefixIndex().longest(np.arange(3)) == (None, 0)
    known = keys(60)
    index = PrefixIndex((key, i) for i, key in enumerate(known))
    for key in keys(300):
        item, length = index.longest(key)
        assert length == max(common_prefix(key, other) for other in known)
        assert item is None if length == 0 else common_prefix(key, known[item]) == length  # type: ignore[index]
    alone = np.array([7, 7], np.int64)
    index.add(alone, -1)
    assert index.longest(alone) == (-1, 2)
    index.remove(alone)
    assert index.longest(alone) == (None, 0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_frames_are_prepared_as_the_image_processor_prepares_them(family: str) -> None:
    tokenizer = train_tokenizer(["what is in this video?"])
    shape = TinyShape(hidden=48, layers=1, frame_side=224)
    newer = family == "qwen3_vl"
    module = build_model(tokenizer, shape) if newer else build_qwen25_model(tokenizer, shape)
    model = QwenVL(module, build_processor(tokenizer, shape) if newer else build_qwen25_processor(tokenizer, shape))
    factor = model.chat.frame_factor
    sizes = [(1, 1), (2, 3), (1, 1), (3, 2), (2, 3), (1, 1)]
    frames = [
        Frame(0.0, DRAW.integers(0, 256, (h * factor, w * factor, 3)).astype(np.uint8), f"{i}")
        for i, (h, w) in enumerate(sizes)
    ]
    pixels, grid = model.pixel_inputs(frames)
    plain = model.processor.image_processor(images=[frame.pixels for frame in frames], return_tensors="pt")
    assert torch.equal(pixels, plain["pixel_values"])
    assert torch.equal(grid, plain["image_grid_thw"])
    with pytest.raises(ValueError, match="multiples"):
        model.pixel_inputs([Frame(0.0, np.zeros((factor + 1, factor, 3), np.uint8), "odd")])
