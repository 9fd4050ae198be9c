"""The prompts, one text file each. A `$name` in a file is filled in; the filled-in text is never scanned again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from string import Template

_FILES = resources.files(__name__)


def _read(name: str) -> str:
    return (_FILES / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


QWEN_TOOLS = _read("tools_qwen")
"""What the chat templates of the Qwen family write into the system turn when they are given tools."""

SUBTITLES = _read("subtitles")
"""What stands before a question that is asked with subtitles; `$lines` are theirs."""

_PLACEHOLDERS = {"question": ("question",), "crop": ("start", "end", "question"), "tools": ("schemas",)}


@dataclass(frozen=True)
class Prompts:
    """The texts of an episode. Pass other ones to use a checkpoint with the prompts that it was trained with."""

    system: str = _read("system")
    system_sequential: str = _read("system_sequential")
    system_direct: str = _read("system_direct")
    question: str = _read("question")
    choice: str = _read("choice")
    temporal: str = _read("temporal")
    crop: str = _read("crop")
    final: str = _read("final")
    tools: str = _read("tools")
    """For chat servers with a model of another family; see `OpenAIEngine`. Chat templates have a text of their own."""

    def __post_init__(self) -> None:
        for field in fields(self):
            text, known = getattr(self, field.name), _PLACEHOLDERS.get(field.name, ())
            try:
                Template(text).substitute(dict.fromkeys(known, ""))
            except (ValueError, KeyError) as error:
                wanted = ", ".join(f"${name}" for name in known) or "none"
                raise ValueError(f"prompt {field.name}: a placeholder that is not one of: {wanted}") from error

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
