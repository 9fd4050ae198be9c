"""Append-only rendering of conversations.

A conversation is rendered once, piece by piece, and the pieces are only ever appended: `open` gives the first
prompt, `reply` what one step adds after an assistant turn. Increments come from differencing the output of the
model's own chat template, after a check that the template never rewrites what it rendered before.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from paravt.engines.base import Completion
from paravt.errors import EngineError, ModelError
from paravt.types import Frame, Message, Role, Segment, TextPart, VideoPart

log = logging.getLogger(__name__)

APPEND_ONLY_TEMPLATE = (resources.files("paravt") / "models" / "chat_template.jinja").read_text(encoding="utf-8")

# Stands for an assistant turn while an increment is rendered; the turn itself is never passed through a template.
_TURN = "(assistant turn)"
_END = "<|im_end|>"
_REMEMBERED = 512
"""Renderings."""


class RenderError(EngineError, ValueError):
    """A conversation that cannot be rendered for this model."""


def text_message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


def seconds(value: float) -> str:
    """A time as prompts write it: one decimal at most, "320" rather than "320.0"."""
    return f"{value:.1f}".removesuffix(".0")


def timestamp(value: float) -> str:
    """The text before a frame, as Qwen3-VL writes it."""
    return f"<{value:.1f} seconds>"


class TokenChat:
    """Renders messages to token ids with a Hugging Face processor of the Qwen-VL kind.

    Raises ModelError if the processor has no chat template that can be used append-only.
    """

    takes_prefix = True
    context_limit: int | None = None
    """Set by whoever knows the model."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        images = processor.image_processor
        self._patch, self._merge = images.patch_size, images.merge_size
        self.frame_factor: int = self._patch * self._merge
        self._min_pixels, self.max_pixels = _pixel_range(images, self.frame_factor)
        self.image_id: int = self._id("<|image_pad|>")
        self.end_id: int = self._id(_END)
        self.vision_ids: frozenset[int] = frozenset(
            self._id(token) for token in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
        )
        self.stop_ids: frozenset[int] = frozenset({self.end_id, self._id("<|endoftext|>")})
        control = sorted((str(t) for t in self.tokenizer.get_added_vocab() if _is_control(str(t))), key=len)
        self._control = re.compile("|".join(re.escape(token) for token in [*control, *_REPLY_TAGS]))
        # The episodes of a group begin alike, and so do many of their sub-agents.
        self._apply = lru_cache(_REMEMBERED)(self._apply_template)
        self._encode = lru_cache(_REMEMBERED)(self._tokenize)
        self.template: str = self._usable_template()

    def _id(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        if found is None or found == self.tokenizer.unk_token_id:
            raise ModelError(f"the tokenizer has no {token}: not a model of the Qwen-VL family")
        return int(found)

    # ------------------------------------------------------------------ rendering

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), prefix: str = "") -> Segment:
        """The first prompt, up to and with the header of the assistant turn; `prefix` is put into that header."""
        return self._segment(self._render(messages, tools, generate=True) + prefix, messages)

    def reply(self, messages: Sequence[Message], closed: bool, prefix: str = "") -> Segment:
        """What `messages` add after an assistant turn, and the next turn's header.

        `closed` tells whether the turn's last sampled token was the end-of-turn token; if not, it is inserted here.
        The newline after it is never sampled.
        """
        stand_in = [text_message("user", "."), text_message("assistant", _TURN)]
        text = self._render([*stand_in, *messages], (), generate=True).split(_TURN, 1)[1]
        if closed:
            text = text.removeprefix(_END)
        return self._segment(text + prefix, messages)

    def clean(self, text: str) -> str:
        """Untrusted text (questions, reports) without control tokens, so that it cannot end a turn or add an image.
        Lone surrogates, which no tokenizer takes, become "?"."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        while (shorter := self._control.sub("", text)) != text:  # what is left may join into another token
            text = shorter
        return text

    def check(self, completion: Completion) -> None:
        """Raises EngineError for a completion that cannot be what was sampled. A vision token, above all, would stand
        for an image that nobody gave."""
        ids = completion.ids
        if not self.vision_ids.isdisjoint(ids):
            raise EngineError("the engine sampled a vision token; ban these ids in its sampling")
        if not ids or completion.logprobs is None or len(completion.logprobs) != len(ids):
            raise EngineError("the engine returned no ids, or not one log-probability for each")
        if (ids[-1] in self.stop_ids) != (completion.stop_reason == "stop"):
            raise EngineError(f"the engine says {completion.stop_reason!r}, its last token says otherwise")
        if completion.text != self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
            raise EngineError("the engine's text is not what its ids spell")

    def image_tokens(self, frame: Frame) -> int:
        """Placeholders of one frame. Raises RenderError if the processor would resize it."""
        height, width = frame.pixels.shape[:2]
        if height % self.frame_factor or width % self.frame_factor:
            raise RenderError(f"a frame of {width} x {height} px: sides must be multiples of {self.frame_factor}")
        if not self._min_pixels <= height * width <= self.max_pixels:
            raise RenderError(f"a frame of {width} x {height} px: outside {self._min_pixels}..{self.max_pixels} px")
        return int((height // self.frame_factor) * (width // self.frame_factor))

    def _segment(self, text: str, messages: Sequence[Message]) -> Segment:
        frames = tuple(frame for message in messages for frame in message.frames)
        ids: list[int] = []
        waiting = iter(frames)
        for token in self._encode(text):
            if token != self.image_id:
                ids.append(token)
            elif (frame := next(waiting, None)) is not None:
                ids.extend([token] * self.image_tokens(frame))
            else:
                raise RenderError("more image placeholders than frames: some text was not cleaned")
        if next(waiting, None) is not None:
            raise RenderError("fewer image placeholders than frames: the chat template dropped an image")
        return Segment(ids=tuple(ids), sampled=False, text=text, images=frames)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        generate: bool,
        template: str | None = None,
    ) -> str:
        shown = [_as_template_input(message) for message in messages]
        return self._apply(
            json.dumps([shown, [dict(tool) for tool in tools] or None, template or self.template, generate])
        )

    def _apply_template(self, inputs: str) -> str:
        messages, tools, template, generate = json.loads(inputs)
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, add_generation_prompt=generate, tokenize=False
            )
        )

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    # ------------------------------------------------------------------ the template

    def _usable_template(self) -> str:
        own = getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template
        append_only = own is not None and self._is_append_only(own)
        if append_only and self._shows_tools(own):
            return str(own)
        fault = "drops tools" if append_only else "rewrites earlier turns"
        if not self._is_append_only(APPEND_ONLY_TEMPLATE):
            raise ModelError(f"the chat template {fault}, and ours does not fit this tokenizer")
        if own is not None:
            log.warning("the model's chat template %s; using paravt's append-only one instead", fault)
        return APPEND_ONLY_TEMPLATE

    def _shows_tools(self, template: str) -> bool:
        """The published template of Qwen2.5-VL has no place for tools, and says nothing when it is given some."""
        function = {"name": "any_tool", "description": "", "parameters": {"type": "object", "properties": {}}}
        text = self._render([text_message("user", "q")], [{"type": "function", "function": function}], True, template)
        return "any_tool" in text

    def _is_append_only(self, template: str) -> bool:
        """Is each rendering of a growing conversation, reasoning and calls included, a prefix of the next one?"""
        turn = '<think>\na\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        assistant = text_message("assistant", turn)
        history: list[Message] = [text_message("system", "s"), text_message("user", "q")]
        for following in ([text_message("tool", "r"), text_message("tool", "r")], [text_message("user", "q")]):
            header = self._render(history, (), True, template)
            closed = self._render([*history, assistant], (), False, template)
            longer = self._render([*history, assistant, *following], (), True, template)
            if closed != f"{header}{turn}{_END}\n" or not longer.startswith(closed):
                return False
            history += [assistant, *following]
        return True


class MessageChat:
    """For engines that take messages: nothing is tokenized, segments carry text alone.

    A forced prefix cannot be asked for. `frame_factor` is that of the served model.
    """

    max_pixels = 16_777_216
    """What Qwen's processors take; the episode's own limit is far below."""
    takes_prefix = False
    end_id = None
    context_limit = None

    def __init__(self, frame_factor: int = 32) -> None:
        self.frame_factor = frame_factor

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), prefix: str = "") -> Segment:
        return self._segment(messages, prefix)

    def reply(self, messages: Sequence[Message], closed: bool, prefix: str = "") -> Segment:
        return self._segment(messages, prefix)

    def check(self, completion: Completion) -> None:
        if completion.ids:
            raise EngineError("a chat endpoint returned ids, which nobody can have asked for")

    def clean(self, text: str) -> str:
        """Untrusted text with a space in place of every control token, of whatever family the served model may be:
        nobody here has its tokenizer. A space, since no token has one: what is left cannot join into another."""
        return _ANY_CONTROL.sub(" ", text)

    @staticmethod
    def _segment(messages: Sequence[Message], prefix: str) -> Segment:
        if prefix:
            raise EngineError("a chat endpoint cannot continue a forced prefix; unset think_prefix")
        text = "\n".join(message.text for message in messages)
        return Segment(ids=(), sampled=False, text=text, images=tuple(f for m in messages for f in m.frames))


_REPLY_TAGS = ("<tool_response>", "</tool_response>")
# The families whose tokens are known by their form or name; a name is at most 64 characters long.
_ANY_CONTROL = re.compile(
    r"<[|\uff5c][^\s<>|\uff5c]{1,64}[|\uff5c]>"  # <|im_end|>: Qwen, Llama 3, Phi, GLM; full width in DeepSeek
    r"|</?(?:tool_response|img|s)>|<<?/?SYS>>?"  # Qwen, InternVL, Llama 2
    r"|<(?:start|end)_of_(?:turn|image|audio)>|<(?:image|audio)_soft_token>|<(?:bos|eos|pad|unk)>"  # Gemma
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|THINK)\]"  # Mistral
    r"|\[IMG(?:_BREAK|_END)?\]"  # Pixtral
    r"|<(?:image|video|audio|IMG_CONTEXT)>"  # LLaVA and others, InternVL
)


def _is_control(token: str) -> bool:
    return token.startswith("<|") and token.endswith("|>")


def _as_template_input(message: Message) -> dict[str, Any]:
    if all(isinstance(part, TextPart) for part in message.content):
        return {"role": message.role, "content": message.text}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, VideoPart):
            raise RenderError(f"{part.path}: give a video as frames, each after its time")
        parts.append({"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"})
    return {"role": message.role, "content": parts}


def _pixel_range(image_processor: Any, factor: int) -> tuple[int, int]:
    """Smallest and largest frame area (px) that the processor leaves alone."""
    size = image_processor.size
    smallest, largest = size.get("shortest_edge"), size.get("longest_edge")
    return int(smallest or factor * factor), int(largest or 16_777_216)
