"""A checkpoint's rendering without its weights: what counts tokens and shows rows needs no more."""

from __future__ import annotations

from pathlib import Path

import httpx2
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoProcessor

from paravt.chat import TokenChat
from paravt.errors import ModelError
from paravt.models.hub import find_model
from paravt.models.qwen_vl import _FAMILIES, _allow_small_frames, _first_line


def load_chat(path: str | Path) -> TokenChat:
    """As `load_model(path).chat` is. Raises ModelError in one line."""
    source = {"trust_remote_code": False, "local_files_only": find_model(path)}
    try:
        config = AutoConfig.from_pretrained(path, **source)
        if config.model_type not in _FAMILIES:
            raise ModelError(f"{path}: a {config.model_type} model; supported: {', '.join(_FAMILIES)}")
        processor = AutoProcessor.from_pretrained(path, **source)
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError, httpx2.HTTPError) as error:
        raise ModelError(f"{path}: cannot be loaded: {_first_line(error)}") from error
    _allow_small_frames(processor.image_processor)
    chat = TokenChat(processor)
    chat.context_limit = config.text_config.max_position_embeddings
    return chat
