"""Rendering: append-only, through the model's own template, exact about images."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import numpy as np
import pytest

from paravt.chat import APPEND_ONLY_TEMPLATE, TokenChat, seconds, text_message
from paravt.engines.base import Completion
from paravt.errors import EngineError, ModelError
from paravt.models import QwenVL
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, TextPart, Usage, VideoPart

# As some "thinking" checkpoints have it: reasoning is dropped from every turn but the last.
REWRITING_TEMPLATE = """{%- for m in messages -%}
{%- set content = m.content if m.content is string else m.content | map(attribute='text') | join -%}
{%- if m.role == 'assistant' and not loop.last -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def frame(width: int = 32, height: int = 32) -> Frame:
    return Frame(0.0, np.zeros((height, width, 3), np.uint8), f"{width}x{height}")


def user(*frames: Frame, text: str = "q") -> Message:
    return Message("user", (*(ImagePart(f) for f in frames), TextPart(text)))


def with_template(tiny: QwenVL, template: str | None) -> TokenChat:
    processor = copy.copy(tiny.processor)
    processor.tokenizer = copy.deepcopy(tiny.chat.tokenizer)
    processor.tokenizer.chat_template = None
    processor.chat_template = template
    return TokenChat(processor)


def test_increments_continue_what_the_template_renders_whole(tiny: QwenVL) -> None:
    turn = "<think>\na\n</think>\n<answer>b</answer>"
    more = [text_message("tool", "one"), text_message("tool", "two"), text_message("user", "and now?")]
    start = tiny.chat.open([user()])
    whole = tiny.processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": turn},
         *({"role": m.role, "content": m.text} for m in more)],
        chat_template=APPEND_ONLY_TEMPLATE, add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert start.text + turn + "<|im_end|>" + tiny.chat.reply(more, closed=True).text == whole
    assert start.text + turn + tiny.chat.reply(more, closed=False).text == whole


def test_our_template_renders_tools_and_images_as_the_processor_does(tiny: QwenVL) -> None:
    segment = tiny.chat.open([text_message("system", "s"), user(frame(), frame())], [{"name": "f"}])
    images = [np.zeros((32, 32, 3), np.uint8)] * 2
    assert list(segment.ids) == tiny.processor(text=[segment.text], images=images)["input_ids"][0]
    assert segment.text.count('<tools>\n{"name": "f"}\n</tools>') == 1


def test_a_template_that_rewrites_history_is_replaced(tiny: QwenVL, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chat = with_template(tiny, REWRITING_TEMPLATE)
    assert chat.template == APPEND_ONLY_TEMPLATE
    assert "rewrites earlier turns" in caplog.text


def test_an_append_only_template_of_the_model_is_kept(tiny: QwenVL) -> None:
    own = APPEND_ONLY_TEMPLATE + "{# the model's own #}"
    assert with_template(tiny, own).template == own


def test_a_tokenizer_of_another_family_is_refused(tiny: QwenVL) -> None:
    processor = copy.copy(tiny.processor)
    processor.tokenizer = copy.deepcopy(tiny.chat.tokenizer)
    processor.tokenizer.convert_tokens_to_ids = lambda token: None
    with pytest.raises(ModelError, match="not a model of the Qwen-VL family"):
        TokenChat(processor)


@pytest.mark.parametrize(("width", "height"), [(31, 32), (64, 64), (16, 16)])
def test_frames_that_the_processor_would_resize_are_refused(tiny: QwenVL, width: int, height: int) -> None:
    with pytest.raises(ValueError, match="a frame of"):
        tiny.chat.open([user(frame(width, height))])


def test_an_uncleaned_placeholder_is_an_error(tiny: QwenVL) -> None:
    with pytest.raises(ValueError, match="more image placeholders than frames"):
        tiny.chat.open([user(text="<|image_pad|>")])
    assert tiny.chat.clean("<|image_<|image_pad|>pad|>") == ""


def completion(tiny: QwenVL, text: str = "a<|im_end|>", **changes: object) -> Completion:
    ids = tuple(tiny.chat.tokenizer.encode(text, add_special_tokens=False))
    made = Completion(ids, text, (0.0,) * len(ids), "stop", 0, Usage(1, len(ids)))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_completion_must_be_what_was_sampled(tiny: QwenVL) -> None:
    tiny.chat.check(completion(tiny))
    tiny.chat.check(completion(tiny, "a", stop_reason="length"))
    tiny.chat.check(completion(tiny, "a<|endoftext|>"))
    for wrong, message in [
        (completion(tiny, "a<|image_pad|><|im_end|>"), "vision token"),
        (completion(tiny, logprobs=None), "log-probability"),
        (completion(tiny, logprobs=(0.0,)), "log-probability"),
        (completion(tiny, ids=(), logprobs=()), "no ids"),
        (completion(tiny, stop_reason="length"), "says otherwise"),
        (completion(tiny, "a", stop_reason="stop"), "says otherwise"),
        (replace(completion(tiny), text="b<|im_end|>"), "not what its ids spell"),
    ]:
        with pytest.raises(EngineError, match=message):
            tiny.chat.check(wrong)


@pytest.mark.parametrize(("value", "text"), [(320.0, "320"), (12.5, "12.5"), (0.04, "0"), (3599.96, "3600")])
def test_times_in_prompts(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_whole_video_is_not_rendered_in_silence(tiny: QwenVL) -> None:
    with pytest.raises(EngineError, match="give a video as frames"):
        tiny.chat.open([Message("user", (VideoPart("v.mp4"), TextPart("q")))])


def test_prompts_with_unknown_placeholders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt crop: .*\$start"):
        Prompts(crop="it costs $5")
    with pytest.raises(ValueError, match="prompt question"):
        Prompts(question="$questoin")
    assert Prompts(crop="from $start, it costs $$5").crop
