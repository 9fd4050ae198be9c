"""Rows that cannot be used: each is skipped for one of these reasons, and counted."""

from __future__ import annotations

from typing import Literal

from paravt.errors import DataError

SkipReason = Literal[
    "not_a_row",  # damaged, not JSON, not an object
    "messages",  # no conversation: wrong types, unknown roles or parts
    "no_question",  # an assistant turn that nothing comes before
    "no_answer",  # no assistant turn, or an empty one
    "control_token",  # a text spells a token that would end a turn or stand for an image
    "media_missing",  # no such file
    "media_remote",  # an address on the network: nothing is ever downloaded
    "media_damaged",  # a file that cannot be decoded
    "too_long",
    "videos",  # of a question: none, or several
    "answer",  # of a question: none
    "sample",  # of our own files of questions: a key that is missing or of a wrong type
]


class RowError(DataError):
    """What is wrong with one row; whoever reads rows skips it and counts its `reason`."""

    def __init__(self, reason: SkipReason, message: str) -> None:
        super().__init__(message)
        self.reason: SkipReason = reason
