"""Typed failures. Each has one boundary where it is caught:

VideoError     raised by `video/`; the agent turns it into an error reply (crop) or an unscored episode (overview).
EngineError    raised by `engines/`; the same.
ModelError     raised while a model or a processor is loaded; the command line prints it.
RecipeError    raised while a recipe is validated, before anything is loaded; the command line prints it.
WorkerError    raised when one of a run's processes was killed; the command line prints it.
DataError      raised for a row or a file that cannot be used; readers skip and count, or the command line prints.

Every message is one line: what, where, what to do.
"""

from __future__ import annotations


class ParaVTError(Exception):
    """Base of all failures that are the project's own; `kind` is a stable code for logs and exit codes."""

    kind = "error"
    exit_code = 1


class VideoError(ParaVTError):
    kind = "video"
    exit_code = 3

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[VideoError], tuple[str, str]]:
        """Between processes, too."""
        return type(self), (self.path, self.reason)


class EngineError(ParaVTError):
    kind = "engine"
    exit_code = 5


class ModelError(ParaVTError):
    kind = "model"
    exit_code = 4


class RecipeError(ParaVTError):
    kind = "recipe"
    exit_code = 2


class WorkerError(ParaVTError):
    kind = "worker"
    exit_code = 1


class DataError(ParaVTError):
    kind = "data"
    exit_code = 6


def first_line(error: BaseException) -> str:
    """What another library's error says, as a part of such a message: its first line, or its name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


EXIT_CODES = {cls.kind: cls.exit_code for cls in (VideoError, EngineError, ModelError, RecipeError, DataError)}
"""Of kinds in `EpisodeError`; others (a timeout) are the engine's."""
