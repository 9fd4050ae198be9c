"""What sequences share is found as by comparing each with each; frames are prepared as the image processor does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paravt.engines.kv import PrefixIndex, Trunk, common_prefix, families, shared_prefix_attention
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
    index: PrefixIndex[int] = PrefixIndex()
    assert index.longest(np.arange(3)) == (None, 0)
    known = keys(60)
    for i, key in enumerate(known):
        index.add(key, i)
    for key in keys(300):
        item, length = index.longest(key)
        assert length == max(common_prefix(key, other) for other in known)
        assert item is None if length == 0 else common_prefix(key, known[item]) == length  # type: ignore[index]
    alone = np.array([7, 7], np.int64)
    index.add(alone, -1)
    assert index.longest(alone) == (-1, 2)
    index.remove(alone)
    assert index.longest(alone) == (None, 0)


def test_families_share_at_least_half_and_are_split_nowhere_else() -> None:
    for _ in range(50):
        known = keys(20)
        found = families(known)
        assert sorted(i for members, _ in found for i in members) == list(range(20))
        for members, length in found:
            assert members == sorted(members)
            first = known[members[0]]
            assert length == min(common_prefix(first, known[i]) for i in members)
            assert all(2 * length >= len(known[i]) for i in members)
    group = [np.array([*range(10), n, n], np.int64) for n in (50, 60, 70)]
    stranger = np.arange(100, 108)
    assert sorted(families([group[0], stranger, *group[1:]])) == [([0, 2, 3], 10), ([1], 8)]


def test_attention_over_families_is_attention_over_rows() -> None:
    lengths, width, heads, kv_heads, dim = [9, 12, 11, 5, 8, 7], 14, 4, 2, 8
    torch.manual_seed(0)
    query = torch.randn(6, heads, 1, dim, dtype=torch.float64)
    cache = torch.randn(2, 6, kv_heads, width, dim, dtype=torch.float64)
    cache[:, 2, :, :6] = cache[:, 1, :, :6] = cache[:, 0, :, :6]  # rows 0 to 2 begin alike, and so do 3 and 5
    cache[:, 5, :, :4] = cache[:, 3, :, :4]
    trunks = [Trunk(slice(0, 3), 0, 6, 12), Trunk(torch.tensor([3, 5]), 3, 4, 7), Trunk(slice(4, 5), 4, 0, 8)]
    seen = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = torch.where(seen, 0.0, -torch.inf).double()[:, None, None]
    got, _ = shared_prefix_attention(None, query, *cache, mask, dim**-0.5, trunks)
    expected = torch.nn.functional.scaled_dot_product_attention(query, *cache, seen[:, None, None], enable_gqa=True)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-12)


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
