"""The prompts, one text file each. A `$name` in a file is filled in; the filled-in text is never scanned again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from string import Template

_FILES = resources.files(__name__)


def read_prompt(name: str) -> str:
    """The text of one file of this directory, by its name without ".txt"."""
    return (_FILES / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


QWEN_TOOLS = read_prompt("tools_qwen")
"""What the chat templates of the Qwen family write into the system turn when they are given tools."""

SUBTITLES = read_prompt("subtitles")
"""What stands before a question that is asked with subtitles; `$lines` are theirs."""

_PLACEHOLDERS = {
    "question": ("question",),
    "crop": ("start", "end", "question"),
    "tools": ("schemas",),
    "user": ("question", "form", "video"),
    "last": ("form",),
    "error": ("error",),
}


@dataclass(frozen=True)
class Prompts:
    """The texts of an episode. Pass other ones to use a checkpoint with the prompts that it was trained with."""

    system: str = read_prompt("system")
    system_sequential: str = read_prompt("system_sequential")
    system_direct: str = read_prompt("system_direct")
    question: str = read_prompt("question")
    choice: str = read_prompt("choice")
    temporal: str = read_prompt("temporal")
    crop: str = read_prompt("crop")
    final: str = read_prompt("final")
    tools: str = read_prompt("tools")
    """For chat servers with a model of another family; see `OpenAIEngine`. Chat templates have a text of their own."""
    user: str = ""
    """In protocols of other projects, what stands after the frames: the question with its options, the form of the
    answer, the video's name."""
    more: str = ""
    """There, what stands after the frames of a turn's windows,"""
    last: str = ""
    """after those that only an answer can follow,"""
    error: str = ""
    """and in place of those that there are none of."""

    def __post_init__(self) -> None:
        for field in fields(self):
            text, known = getattr(self, field.name), _PLACEHOLDERS.get(field.name, ())
            wanted = ", ".join(f"${name}" for name in known) or "none"
            try:
                filled = Template(text).substitute({name: f"\0{name}" for name in known})
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"prompt {field.name}: a placeholder that is not one of: {wanted} (a dollar sign is $$)"
                ) from error
            if field.name == "user" and text and "\0question" not in filled:
                raise ValueError(f"prompt user has no $question; it can have: {wanted}")

    def fixed_phrases(self) -> tuple[str, ...]:
        """The parts of the prompts that are the same every time, for tokenizers that want them as units."""
        texts = [getattr(self, field.name) for field in fields(self)]
        pieces = [piece for text in texts for piece in Template.pattern.split(text) if piece]
        return tuple(dict.fromkeys(piece for piece in pieces if len(piece) > 12))


def fill(template: str, **values: str) -> str:
    """Fill in `$name` placeholders, once: what a value contains is never taken for a placeholder.

    Raises KeyError for a placeholder without a value.
    """
    return Template(template).substitute(values)
