"""What a chat server with a Qwen model is sent, rendered by its chat template, is what the local engine's model sees:
token for token and frame for frame, in every turn of the main agent and for every sub-agent."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import Server, parts_text
from conftest import LONG
from PIL import Image
from test_models import FAMILIES, build

from paravt.agent import EpisodeConfig, run_episode
from paravt.chat import APPEND_ONLY_TEMPLATE, text_message
from paravt.engines.openai import OpenAIEngine
from paravt.engines.scripted import ScriptedEngine
from paravt.models import QwenVL, load_model
from paravt.prompts import QWEN_TOOLS, fill
from paravt.tools import CROP_VIDEO
from paravt.turns import render_call
from paravt.types import Dispatch, Evidence, Sample
from paravt.video import FrameReader

SAMPLE = Sample("s", LONG, "Which animals, ü or 猫?", ("a cat", "a dog"), type="choice")


def calls(*windows: tuple[float, float]) -> str:
    blocks = "\n".join(render_call("crop_video", {"start_time": a, "end_time": b}) for a, b in windows)
    return f"<think>\nlook\n</think>\n{blocks}"


SCRIPT = {
    "main": [calls((0, 9), (20, 29), (90, 80)), calls((40, 49.5)), "B</answer>"],
    "crop/0/0": ["a cat"],
    "crop/0/1": ["nothing"],
    "crop/1/0": ["a dog, which bears on it"],
}
REPORTS = {"from 0 to 9 seconds": "a cat", "from 20 to 29 seconds": "nothing"}


def rendered(model: QwenVL, messages: list[dict[str, Any]]) -> tuple[list[int], list[np.ndarray]]:
    """The ids and frames that a server makes of messages, with the model's own processor and chat template."""
    images = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))))
        for message in messages if isinstance(message["content"], list)
        for part in message["content"] if part["type"] == "image_url"
    ]  # fmt: skip
    given = [
        {"role": m["role"], "content": m["content"] if isinstance(m["content"], str) else [
            {"type": "image"} if part["type"] == "image_url" else part for part in m["content"]]}
        for m in messages
    ]  # fmt: skip
    text = model.processor.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
    ids = model.processor(text=[text], images=images or None)["input_ids"][0]
    return list(ids), images


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dispatch", "evidence"),
    [("parallel", "report"), ("parallel", "both"), ("sequential", "report"), ("none", "report")],
)
async def test_every_prompt_is_the_local_one(
    server: Server, family: str, dispatch: Dispatch, evidence: Evidence
) -> None:
    model = build(family)
    config = EpisodeConfig(
        frame_budget=4, crop_max_frames=2, max_turns=2, max_pixels=model.chat.max_pixels, dispatch=dispatch,
        evidence=evidence,
    )  # fmt: skip
    scripted = ScriptedEngine(model.chat, SCRIPT)
    local = await run_episode(SAMPLE, scripted, config, reader=FrameReader())

    def answer(body: dict[str, Any]) -> str:
        last = parts_text(body["messages"][-1]["content"])
        if "Report in a few words" in last:
            return next((text for window, text in REPORTS.items() if window in last), "a dog, which bears on it")
        return SCRIPT["main"][sum(message["role"] == "assistant" for message in body["messages"])]

    server.default = answer  # type: ignore[method-assign]
    engine = OpenAIEngine(server.url, "served", frame_factor=model.chat.frame_factor)
    remote = await run_episode(SAMPLE, engine, config, reader=FrameReader())
    await engine.close()
    assert (remote.forced, remote.errors) == (local.forced, local.errors) == (True, ())
    turns, crops = {"parallel": (3, 3), "sequential": (3, 2), "none": (2, 0)}[dispatch]
    assert len(local.turns) == turns
    assert len(scripted.prompts) == len(server.requests) == turns + crops

    prefix = model.chat.tokenizer.encode("<answer>", add_special_tokens=False)  # a chat endpoint takes no such thing
    expected: Counter[tuple[int, ...]] = Counter()
    for number, prompt in enumerate(scripted.prompts):
        last = number == len(scripted.prompts) - 1
        assert (list(prompt.ids[-len(prefix) :]) == prefix) is last
        expected[prompt.ids[: -len(prefix)] if last else prompt.ids] += 1
    frames = {prompt.ids: prompt.images for prompt in scripted.prompts}
    found: Counter[tuple[int, ...]] = Counter()
    for request in server.requests:
        ids, images = rendered(model, request["messages"])
        found[tuple(ids)] += 1
        shown = frames.get(tuple(ids)) or frames[(*ids, *prefix)]
        assert [image.tolist() for image in images] == [frame.pixels.tolist() for frame in shown]
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tools_are_described_as_the_chat_template_does(family: str) -> None:
    model = build(family)
    header = model.chat.open([text_message("system", "s"), text_message("user", "q")], [CROP_VIDEO.schema]).text
    block = fill(QWEN_TOOLS, schemas=json.dumps(CROP_VIDEO.schema, ensure_ascii=False))
    assert header.startswith(f"<|im_start|>system\ns\n\n{block}<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_was_replaced_is_saved_replaced(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.processor.chat_template = "{{ messages[0].content }}"
    QwenVL(model.module, model.processor).save(tmp_path)
    assert load_model(tmp_path, "float32").processor.chat_template == APPEND_ONLY_TEMPLATE
    assert (tmp_path / "chat_template.jinja").read_text() == APPEND_ONLY_TEMPLATE
