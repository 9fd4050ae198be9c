"""What the protocols share: the first messages, blocks between tags, answers without tags."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paravt.chat import text_message
from paravt.prompts import fill, read_prompt
from paravt.protocol import Opening, Scene, lettered, spoken, timestamped
from paravt.spans import structural_spans
from paravt.types import Crop, Frame, Message, Part, TextPart
from paravt.video import distinct

_OPEN = read_prompt("modes/open")


def opening(
    scene: Scene,
    *,
    system: bool = True,
    options: str = "",
    frames: Sequence[Part] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Opening:
    """A system turn, unless there is to be none, and a turn of the user: frames (each after its time, unless they are
    given), and the text `user` with what is said in the frames. `options` is a line before the options."""
    prompts = scene.config.prompts
    lines = [*spoken(scene), scene.clean(scene.sample.question)]
    if scene.sample.options:
        lines += [line for line in (options,) if line] + lettered(scene)
    video = scene.clean(os.path.basename(scene.sample.video))
    text = fill(prompts.user, question="\n".join(lines), form=answer_form(scene), video=video)
    shown = list(timestamped(scene.overview)) if frames is None else list(frames)
    messages = [text_message("system", fill(prompts.system))] if system else []
    return [*messages, Message("user", (*shown, TextPart(text)))], tools


def answer_form(scene: Scene) -> str:
    """What an answer looks like, in words."""
    prompts = scene.config.prompts
    if scene.sample.options or scene.sample.type == "choice":
        return prompts.choice
    return prompts.temporal if scene.sample.type == "temporal" else _OPEN


def follow_up(scene: Scene, crops: Sequence[Crop]) -> str:
    """What stands after the replies to these calls."""
    prompts = scene.config.prompts
    return fill(prompts.last, form=answer_form(scene)) if _is_last(scene, crops) else fill(prompts.more)


def kept_frames(
    crop: Crop, frames: Sequence[Frame], share: float, label: Callable[[Sequence[Frame]], list[Part]]
) -> list[Part]:
    """The first `share` of a window's frames, as `label` shows them, and how many could not be read."""
    kept = distinct(frames)
    parts = label(kept[: int(len(kept) * share)])
    if crop.missing:
        parts.append(TextPart(f"\n({len(crop.missing)} frames could not be read)"))
    return parts


def _is_last(scene: Scene, crops: Sequence[Crop]) -> bool:
    """Can the turn that reads the replies to these calls do nothing but answer?"""
    return crops[0].turn + (1 if scene.config.force_answer else 2) >= scene.config.max_turns


def plain_answer(text: str) -> str | None:
    """The answer of a turn that has no tag for it: all that follows the reasoning, if that ends."""
    before, _, after = text.rpartition("</think>")
    if "<think>" in after or structural_spans(after) or (not before and "<think>" in text):
        return None
    return after.strip() or None


def unboxed(answer: str | None) -> str | None:
    r"""What is inside a \boxed{..} that is all of an answer, and inside a \text{..} that is all of that."""
    if answer is None:
        return None
    for name in (r"\boxed{", r"\text{"):
        if answer.startswith(name) and answer.endswith("}"):
            answer = answer[len(name) : -1].strip()
    return answer or None


@dataclass(frozen=True)
class Block:
    tag: str
    body: str
    """Stripped."""
    closed: bool


def read_blocks(text: str, tags: Sequence[str]) -> tuple[list[Block], bool]:
    """The blocks of a turn, in order, and whether there is nothing else: every block closed, no text outside of them.

    What stands inside a closed `<think>` is no structure. Any other block ends at the next tag. In linear time.
    """
    found = list(re.compile(rf"<(/?)({'|'.join(tags)})>").finditer(text))
    blocks: list[Block] = []
    outside: list[str] = []
    at = n = 0
    while n < len(found):
        if found[n][1]:  # a closing tag without anything to close: text
            n += 1
            continue
        tag, end = found[n][2], n + 1
        if tag == "think":
            end = next((m for m in range(n + 1, len(found)) if found[m][2] == "think"), len(found))
            if end == len(found) or not found[end][1]:  # never closed: it ends at the next tag
                end = n + 1
        closed = end < len(found) and found[end][0] == f"</{tag}>"
        stop = found[end].start() if end < len(found) else len(text)
        blocks.append(Block(tag, text[found[n].end() : stop].strip(), closed))
        outside.append(text[at : found[n].start()])
        at = found[end].end() if closed else stop
        n = end + closed
    outside.append(text[at:])
    return blocks, all(block.closed for block in blocks) and not any(part.strip() for part in outside)


def first_body(blocks: Sequence[Block], tag: str) -> str | None:
    """The first body of a tag that is not empty."""
    return next((block.body for block in blocks if block.tag == tag and block.body), None)
