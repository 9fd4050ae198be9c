"""Questions about videos and rows of published data: reading them, and going through them in a reproducible order."""

from paravt.data.samples import read_question_rows, read_samples
from paravt.data.stream import Cursor, Draw, SampleStream

__all__ = ["Cursor", "Draw", "SampleStream", "read_question_rows", "read_samples"]
