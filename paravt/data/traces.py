"""Rows as traces: what the model will see, token by token, and which of it it would have said itself.

Everything is rendered once and appended, as the agent does it: assistant turns are encoded as they stand and closed,
what stands between them is what `TokenChat` adds. Assistant turns are sampled segments, nothing else is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from paravt.chat import RenderError, TokenChat, text_message
from paravt.data.media import VideoReader, read_image, read_video
from paravt.data.messages import ImageRef, RefPart, VideoRef, parse_row
from paravt.data.skips import RowError
from paravt.protocol import timestamped
from paravt.types import ImagePart, Message, Part, Segment, Trace


@dataclass(frozen=True)
class RowConfig:
    """How rows are seen."""

    root: Path | None = None
    """Where relative paths of media begin."""
    system: str | None = None
    """The system turn of rows that have none."""
    fps: float = 1.0
    max_frames: int = 64
    """Of a video."""
    max_pixels: int = 50_176
    """Of a frame or an image."""
    max_tokens: int | None = None
    """Longer rows are skipped; None: what the model can take."""


@dataclass(frozen=True)
class Loaded:
    """A row whose files have been read."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]


class TraceBuilder:
    """`load` may run on many threads at once, `render` on one at a time. Both raise RowError for a row that cannot be
    used."""

    def __init__(self, chat: TokenChat, reader: VideoReader, config: RowConfig) -> None:
        self.chat, self.reader, self.config = chat, reader, config
        names = sorted((str(t) for t in chat.tokenizer.get_added_vocab() if str(t).startswith("<|")), key=len)
        self._control = re.compile("|".join(re.escape(name) for name in reversed(names)))

    def build(self, row: Mapping[str, Any]) -> Trace:
        return self.render(self.load(row))

    def load(self, row: Mapping[str, Any]) -> Loaded:
        dialogue = parse_row(row)
        self._refuse_control(json.dumps(dialogue.tools, ensure_ascii=False))
        messages = [
            Message(turn.role, tuple(shown for part in turn.content for shown in self._parts(part)))
            for turn in dialogue.turns
        ]
        if self.config.system is not None and messages[0].role != "system":
            messages.insert(0, text_message("system", self.config.system))
        return Loaded(tuple(messages), dialogue.tools)

    def _parts(self, part: RefPart) -> Sequence[Part]:
        config, factor = self.config, self.chat.frame_factor
        limit = min(config.max_pixels, self.chat.max_pixels)
        if isinstance(part, ImageRef):
            return [ImagePart(read_image(part, config.root, factor, limit))]
        if isinstance(part, VideoRef):
            frames = read_video(part, config.root, self.reader, factor, limit, config.fps, config.max_frames)
            return list(timestamped(frames))
        self._refuse_control(part.text)
        return [part]

    def _refuse_control(self, text: str) -> None:
        if found := self._control.search(text):
            raise RowError("control_token", f"a text spells {found[0]}")

    def render(self, loaded: Loaded) -> Trace:
        try:
            trace = self._render(loaded)
        except (RenderError, TemplateError) as error:
            raise RowError("messages", f"the chat template refuses it: {error}") from error
        most = self.config.max_tokens or self.chat.context_limit
        if most is not None and len(trace.ids) > most:
            raise RowError("too_long", f"{len(trace.ids)} tokens; at most {most}")
        return trace

    def _render(self, loaded: Loaded) -> Trace:
        trace = Trace("main", "main", stop_reason="stop")
        asked: list[Message] = []
        for message in loaded.messages:
            if message.role != "assistant":
                asked.append(message)
                continue
            opened = bool(trace.segments)
            segment = self.chat.reply(asked, closed=True) if opened else self.chat.open(asked, loaded.tools)
            trace = trace.append(segment).append(self._said(message))
            asked = []
        return trace  # what comes after the last answer teaches nothing

    def _said(self, message: Message) -> Segment:
        text = message.text
        ids = self.chat.tokenizer.encode(text, add_special_tokens=False)
        end = self.chat.end_id
        return Segment(ids=(*ids, end), sampled=True, text=text + self.chat.tokenizer.decode([end]))
