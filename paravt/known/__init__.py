"""What is known beforehand, so that plans need no network: published accelerators and models, and how many tokens the
texts of an episode are."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, Qwen3VLConfig

from paravt.chat import TokenChat, seconds
from paravt.config import load_recipe
from paravt.episode_config import EpisodeConfig
from paravt.errors import RecipeError
from paravt.plan import Hardware, Texts
from paravt.prompts import fill
from paravt.protocol import PARAVT, Scene, timestamped
from paravt.types import Crop, Frame, Message, Sample, TextPart, ToolCall, Window


@lru_cache
def facts(name: str) -> dict[str, Any]:
    """The file `name`.yaml of this directory."""
    found: dict[str, Any] = yaml.safe_load((resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def hardware(name: str) -> Hardware:
    """One of the table, or of a YAML file with the settings of `Hardware`. Raises RecipeError if there is neither."""
    table = facts("accelerators")
    if (entry := table.get(name.upper().replace(" ", ""))) is not None:
        return Hardware(**entry)
    if not Path(name).is_file():
        raise RecipeError(f"{name}: no such accelerator ({', '.join(table)}), and no YAML file that describes one")
    return load_recipe(Hardware, name)


def model_config(name: str) -> Any:
    """Of a published model, by its size ("8b") or its name on the hub: what the hub's cache has, or what is noted
    here. None for any other name."""
    for size, model in facts("models").items():
        if name.lower() in (size, model["hub"].lower()):
            cached = try_to_load_from_cache(model["hub"], "config.json")
            if isinstance(cached, str):
                return AutoConfig.from_pretrained(Path(cached).parent)
            return Qwen3VLConfig(
                text_config=model["text"],
                vision_config=model["vision"],
                tie_word_embeddings=model["text"]["tie_word_embeddings"],
                dtype="bfloat16",
            )
    return None


QWEN_TEXTS = Texts(main=412, crop=78, frame=10, turn=10, reply=20)
"""As `count_texts` finds with the vocabulary of Qwen3-VL and `USUAL`."""

USUAL = Sample(
    id="usual",
    video="video.mp4",
    question="What does the woman in the red coat put on the table after she has come back into the kitchen?",
    options=("A blue cup with a handle", "The keys of her car", "A letter she has not opened", "Nothing at all"),
)
"""A question of usual length."""


def count_texts(chat: TokenChat, sample: Sample = USUAL) -> Texts:
    """With the vocabulary and the template of a model, and a forced `<think>`."""
    window, prefix, side = Window(100.5, 116.5), "<think>\n", chat.frame_factor
    scene = Scene(sample, EpisodeConfig(), chat.clean, 600.0)
    frames = [Frame(100.5 + n, np.zeros((side, side, 3), np.uint8), str(n)) for n in range(2)]
    call = ToolCall("crop_video", {"start_time": window.start_time, "end_time": window.end_time})
    crop = Crop(0, 0, "ran", call, window, "", None)

    def main(shown: int) -> int:
        opening = PARAVT.first(replace(scene, overview=tuple(frames[:shown])))
        return len(chat.open(*opening, prefix).ids) - shown

    def replies(number: int) -> int:
        return len(chat.reply(PARAVT.reply(scene, [crop] * number, [()] * number, 1.0), True, prefix).ids)

    frame, reply = main(2) - main(1), replies(2) - replies(1)
    asked = fill(
        scene.config.prompts.crop,
        start=seconds(window.start_time),
        end=seconds(window.end_time),
        question=chat.clean(sample.question),
    )
    watched = len(chat.open([Message("user", (*timestamped(frames), TextPart(asked)))]).ids) - len(frames)
    return Texts(main(1) - frame, watched - 2 * frame, frame, replies(1) - reply, reply)
