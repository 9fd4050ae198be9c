"""A factory for tiny real Qwen3-VL and Qwen2.5-VL models: the real classes, a small tokenizer, a chat template.

What `QwenVL.save` writes of them loads with `AutoProcessor` and `AutoModelForImageTextToText`, and is served by vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from paravt.chat import APPEND_ONLY_TEMPLATE

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
TAG_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tool_code>",
    "</tool_code>", "<answer>", "</answer>",
)  # fmt: skip
PATCH, MERGE = 16, 2
PATCH_25 = 14
"""Of Qwen2.5-VL."""
_TAGS = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *TAG_TOKENS)))


@dataclass(frozen=True)
class TinyShape:
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 256
    vision_hidden: int = 64
    vision_depth: int = 2
    frame_side: int = 32
    """Largest side of a square frame, in px. 32 px are one visual token, with Qwen2.5-VL 28."""
    init_std: float = 0.06


DEFAULT_SHAPE = TinyShape()


def train_tokenizer(corpus: Iterable[str], phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer in which every word and number of the corpus and every phrase is one token.

    Any other text falls back to shorter pieces, at worst to bytes: every string can be encoded and decodes to itself.
    Control tokens and tags are taken out of phrases and corpus first, as the finished tokenizer will do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+(?:\.\d+)?| ?\p{L}+|\s+|[^\s\p{L}\d]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1_000_000,  # every word that occurs is merged to the end
        min_frequency=1,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    units = list(dict.fromkeys(piece for phrase in phrases for piece in _TAGS.split(phrase) if len(piece) > 1))
    known = re.compile("|".join(re.escape(unit) for unit in sorted(units, key=len, reverse=True)) or r"(?!)")
    tokenizer.train_from_iterator(
        (piece for text in corpus for part in _TAGS.split(text) for piece in known.split(part)), trainer
    )
    tokenizer.add_tokens([AddedToken(unit, normalized=False) for unit in (*TAG_TOKENS, *units)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=[t for t in CONTROL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
    )


def build_processor(tokenizer: PreTrainedTokenizerFast, shape: TinyShape = DEFAULT_SHAPE) -> Qwen3VLProcessor:
    side = PATCH * MERGE
    sizes = {"shortest_edge": side * side, "longest_edge": shape.frame_side**2}
    common: dict[str, Any] = dict(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**common),
        tokenizer=tokenizer,
        # its limits are for all frames of a video together
        video_processor=Qwen3VLVideoProcessor(**common | {"size": {**sizes, "longest_edge": 64 * shape.frame_side**2}}),
        chat_template=APPEND_ONLY_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, shape: TinyShape = DEFAULT_SHAPE, seed: int = 0
) -> Qwen3VLForConditionalGeneration:
    """A freshly initialised model in float32. Global random state is left as it was."""
    text, vision, ids = _common_config(tokenizer, shape)
    config = Qwen3VLConfig(
        text_config=text
        | {
            "head_dim": shape.hidden // shape.heads,
            "rope_parameters": text["rope_parameters"] | {"mrope_interleaved": True},
            "tie_word_embeddings": True,
        },
        vision_config=vision
        | {
            "patch_size": PATCH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": list(range(shape.vision_depth)),
        },
        tie_word_embeddings=True,
        **ids,
    )
    model = _initialise(Qwen3VLForConditionalGeneration, config, seed)
    _copy_heads(model, shape)
    return model


def build_qwen25_processor(tokenizer: PreTrainedTokenizerFast, shape: TinyShape = DEFAULT_SHAPE) -> Qwen2_5_VLProcessor:
    side = PATCH_25 * MERGE
    sizes = {"shortest_edge": side * side, "longest_edge": shape.frame_side**2}
    common: dict[str, Any] = dict(
        patch_size=PATCH_25, merge_size=MERGE, temporal_patch_size=2, size=sizes, image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )  # fmt: skip
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**common),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**common | {"size": {**sizes, "longest_edge": 64 * shape.frame_side**2}}),
        chat_template=APPEND_ONLY_TEMPLATE,
    )


def build_qwen25_model(
    tokenizer: PreTrainedTokenizerFast, shape: TinyShape = DEFAULT_SHAPE, seed: int = 0, *, tied: bool = True
) -> Qwen2_5_VLForConditionalGeneration:
    """As `build_model`. `tied`: whether the vocabulary's head is the embedding (3B) or a matrix of its own (7B, 72B).

    All layers of the vision tower but the last attend within windows of two by two visual tokens, so that small frames
    have several, and at their edges narrower ones.
    """
    text, vision, ids = _common_config(tokenizer, shape)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision
        | {
            "patch_size": PATCH_25,
            "window_size": 2 * PATCH_25 * MERGE,
            "fullatt_block_indexes": [shape.vision_depth - 1],
        },
        tie_word_embeddings=tied,
        **ids,
    )
    model = _initialise(Qwen2_5_VLForConditionalGeneration, config, seed)
    if tied:
        _copy_heads(model, shape)
    return model


def _common_config(
    tokenizer: PreTrainedTokenizerFast, shape: TinyShape
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """What both families have: the configuration of the text model, of the vision tower, and the vision tokens."""
    token = tokenizer.convert_tokens_to_ids
    rotary = shape.hidden // shape.heads // 2
    third = rotary // 3
    text = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [rotary - 2 * third, third, third],
            "rope_theta": 1e4,
        },
        "bos_token_id": None,
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
        "initializer_range": shape.init_std,
    }
    vision = {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": 2 * shape.vision_hidden,
        "num_heads": 4,
        "out_hidden_size": shape.hidden,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "initializer_range": shape.init_std,
    }
    ids = {
        f"{name}_id": token(f"<|{piece}|>")
        for name, piece in (
            ("image_token", "image_pad"),
            ("video_token", "video_pad"),
            ("vision_start_token", "vision_start"),
            ("vision_end_token", "vision_end"),
        )
    }
    return text, vision, ids


def _initialise(kind: Any, config: Any, seed: int) -> Any:
    """Random weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    text = config.text_config
    model.generation_config.eos_token_id = [text.eos_token_id, text.pad_token_id]
    model.generation_config.pad_token_id = text.pad_token_id
    return model.eval()


@torch.no_grad()
def _copy_heads(model: Any, shape: TinyShape) -> None:
    """Start every attention head as one that copies: its output matrix is the transpose of its value matrix.

    With tied embeddings, attending to a token then raises that token's own logit from the first step on, so that where
    to look can be learned at once. From a random start, reading a word out of a tool reply takes thousands of steps.
    """
    head = shape.hidden // shape.heads
    for layer in model.model.language_model.layers:
        values = layer.self_attn.v_proj.weight.view(shape.kv_heads, head, shape.hidden)
        repeated = values.repeat_interleave(shape.heads // shape.kv_heads, 0)
        layer.self_attn.o_proj.weight.copy_(repeated.reshape(shape.heads * head, shape.hidden).T)
