"""What a tool is: a name, the schema the model reads, and a function that makes its arguments typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ToolArgumentError(ValueError):
    """Arguments a tool can't run with. The message is one line that tells the model what to change."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool the model can call."""

    name: str
    schema: Mapping[str, Any]
    """OpenAI-style: `{"type": "function", "function": {"name", "description", "parameters"}}`.

    The order of `parameters.properties` is the order of positional arguments in python-style calls.
    """
    normalise: Callable[[Mapping[str, object]], tuple[dict[str, Any], bool]]
    """Arguments as the model wrote them -> (typed arguments, whether they had to be repaired).

    Raises ToolArgumentError if the call can't run.
    """

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameter names, in schema order."""
        return tuple(self.schema["function"]["parameters"]["properties"])

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the required parameters, in schema order."""
        return tuple(self.schema["function"]["parameters"]["required"])
