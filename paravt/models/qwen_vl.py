"""Models of the Qwen-VL families as the engines and the learner use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

from paravt.chat import TokenChat
from paravt.errors import DataError, ModelError
from paravt.models import qwen3_vl, qwen25_vl
from paravt.models.base import Family
from paravt.models.hub import find_model
from paravt.types import Frame

_FAMILIES: dict[str, Family] = {"qwen3_vl": qwen3_vl.FAMILY, "qwen2_5_vl": qwen25_vl.FAMILY}
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class QwenVL:
    """A loaded model with its processor. `module` is the Hugging Face model, `chat` the rendering."""

    def __init__(self, module: Any, processor: Any) -> None:
        self.module = module
        self.processor = processor
        _allow_small_frames(processor.image_processor)
        self.chat = TokenChat(processor)
        # saved with the model: a server of what was trained renders what it was trained on
        processor.chat_template = self.chat.template
        self.chat.context_limit = module.config.text_config.max_position_embeddings
        self.merge: int = processor.image_processor.merge_size
        self.family = _FAMILIES[module.config.model_type]
        for layer in module.modules():
            if faster := self.family.faster.get(type(layer)):
                layer.__class__ = faster

    def save(self, directory: str | Path) -> None:
        """In the Hugging Face layout (safetensors, processor, template). Raises DataError if it can't be written."""
        try:
            with _no_progress_bar():
                self.module.save_pretrained(directory)
            self.processor.save_pretrained(directory)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{directory}: cannot be written: {_first_line(error)}; make room and try again") from error

    @property
    def device(self) -> torch.device:
        return torch.device(self.module.device)

    @property
    def head_dim(self) -> int:
        """Of keys and values. Qwen3-VL's configuration gives it; Qwen2.5-VL's heads divide the hidden size."""
        text = self.module.config.text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    @property
    def banned_ids(self) -> list[int]:
        """Ids that must never be sampled: vision tokens, and rows of the head beyond the vocabulary."""
        rows = self.module.config.text_config.vocab_size
        return [*sorted(self.chat.vision_ids), *range(len(self.chat.tokenizer), rows)]

    def pixel_inputs(self, frames: Sequence[Frame]) -> tuple[Tensor, Tensor]:
        """`(pixel_values, image_grid_thw)` of the frames in order, as the image processor makes them.

        By its own methods for a batch of one size: as a whole it spends most of its time on taking up one image after
        the other. Raises ValueError for a frame that it would resize.
        """
        images, patch = self.processor.image_processor, self.processor.image_processor.patch_size
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, frame in enumerate(frames):
            self.chat.image_tokens(frame)  # raises
            sizes.setdefault(frame.pixels.shape[:2], []).append(i)
        patches: list[Tensor] = [torch.empty(0)] * len(frames)
        for members in sizes.values():
            pixels = torch.from_numpy(np.stack([frames[i].pixels for i in members])).permute(0, 3, 1, 2)
            scaled = images.rescale_and_normalize(
                pixels,
                images.do_rescale,
                images.rescale_factor,
                images.do_normalize,
                images.image_mean,
                images.image_std,
            )
            patched, _, _ = images.patchify(scaled, patch, self.merge, images.temporal_patch_size)
            for i, own in zip(members, patched, strict=True):
                patches[i] = own
        grid = [[1, *(side // patch for side in frame.pixels.shape[:2])] for frame in frames]
        return torch.cat(patches).to(self.device), torch.tensor(grid).to(self.device)

    def encode_images(self, frames: Sequence[Frame]) -> Any:
        """Vision features of the frames; equal frames (by key) go through the tower once.

        What `module.model(mm_encoder_outputs={"image": ...})` takes: `pooler_output` and, where the family has them,
        `deepstack_features`, one tensor per frame.
        """
        unique = {frame.key: frame for frame in frames}
        index = {key: i for i, key in enumerate(unique)}
        order = [index[frame.key] for frame in frames]
        pixels, grid = self.pixel_inputs(list(unique.values()))
        features = self.module.model.get_image_features(pixels, grid, return_dict=True)
        features.pooler_output = [features.pooler_output[i] for i in order]
        if self.family.deepstack:
            features.deepstack_features = [[level[i] for i in order] for level in features.deepstack_features]
        return features

    def positions(
        self, ids: Sequence[int] | np.ndarray, frames: Sequence[Frame], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """Rope positions (3, T) of `ids`, whose first token has position `start`, and the position after the last.

        Text counts up by one; an image of h x w merged patches spans a grid and moves on by max(h, w). The same as
        `get_rope_index` of transformers, but for any stretch that begins between images.
        """
        places = np.flatnonzero(np.asarray(ids, np.int64) == self.chat.image_id)
        sides = [tuple(side // self.chat.frame_factor for side in frame.pixels.shape[:2]) for frame in frames]
        steps = np.ones(len(ids), np.int64)
        steps[places] = 0
        ends = places[np.cumsum([height * width for height, width in sides], dtype=np.int64) - 1]
        steps[ends] = [max(side) for side in sides]
        out = np.tile(start + np.cumsum(steps) - steps, (3, 1))
        if sides:
            out[:, places] += np.concatenate([_cells(*side) for side in sides], 1)
        return out, start + int(steps.sum())


@lru_cache(maxsize=64)
def _cells(height: int, width: int) -> np.ndarray:
    """Time, row and column of the visual tokens of a frame, (3, height * width)."""
    return np.indices((1, height, width)).reshape(3, -1)


def _allow_small_frames(image_processor: Any) -> None:
    """Lower the processor's smallest frame to one visual token, so that it leaves frames of any budget as they are.

    The published checkpoints enlarge everything below 65,536 px, and the frames of an episode have at most 50,176.
    """
    size = dict(image_processor.size)
    # Limits under their old names, where a processor has them, override the size.
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if getattr(image_processor, name, None) is not None:
            size[edge] = getattr(image_processor, name)
    size["shortest_edge"] = (image_processor.patch_size * image_processor.merge_size) ** 2
    if getattr(image_processor, "min_pixels", None) is not None:
        image_processor.min_pixels = size["shortest_edge"]
    image_processor.size = type(image_processor.size)(**size)


def load_model(path: str | Path, dtype: str = "auto", device: str = "cpu") -> QwenVL:
    """Load a Qwen3-VL or Qwen2.5-VL checkpoint (safetensors only, and no code of its own) from a directory or hub id.

    Raises ModelError in one line if there is no such model, if it is damaged, incomplete or of another family, and for
    a `dtype` or a `device` that isn't there.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"{path}: dtype {dtype}: not one of {', '.join(_DTYPES)}")
    where = _device(path, device)
    source = {"trust_remote_code": False, "local_files_only": find_model(path)}
    try:
        config = AutoConfig.from_pretrained(path, **source)
        if config.model_type not in _FAMILIES:
            raise ModelError(f"{path}: a {config.model_type} model; supported: {', '.join(_FAMILIES)}")
        # Engine and learner attend to all that came before; Qwen2.5-VL could be configured not to, and never is.
        if "sliding_attention" in (getattr(config.text_config, "layer_types", None) or ()):
            raise ModelError(f"{path}: it attends within a sliding window, which is not supported")
        # a pickle can run code while it is loaded
        with _no_progress_bar():
            module, found = AutoModelForImageTextToText.from_pretrained(
                path, dtype=dtype, use_safetensors=True, output_loading_info=True, **source
            )
        # Transformers would leave them at random values.
        if missing := found["missing_keys"] - module.all_tied_weights_keys.keys():
            raise ModelError(f"{path}: incomplete: no tensor {min(missing)} ({len(missing)} missing); copy it again")
        processor = AutoProcessor.from_pretrained(path, **source)
    except SafetensorError as error:
        raise ModelError(f"{path}: a weights file is damaged ({_first_line(error)}); copy it again") from error
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError, httpx2.HTTPError) as error:
        raise ModelError(f"{path}: cannot be loaded: {_first_line(error)}") from error
    try:
        module = module.to(where)
    except RuntimeError as error:  # out of memory
        raise ModelError(f"{path}: does not go onto {device}: {_first_line(error)}") from error
    return QwenVL(module.eval(), processor)


def _device(path: str | Path, name: str) -> torch.device:
    """The device, if this machine has it: found out before anything is loaded."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with the device's support
        raise ModelError(f"{path}: device {name}: {_first_line(error)}; choose another device") from error
    return device


def merge_adapters(model: QwenVL, adapters: str | Path) -> QwenVL:
    """A model with adapters in peft's format merged into its weights. Raises ModelError if they don't fit."""
    try:
        merged = PeftModel.from_pretrained(model.module, str(adapters)).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{adapters}: not adapters of this model: {_first_line(error)}") from error
    return QwenVL(merged.eval(), model.processor)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Transformers shows one for its weights, in the middle of whatever the caller shows."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
