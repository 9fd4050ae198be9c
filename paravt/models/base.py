"""What an adapter says about its model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Frame sizes, rope positions of frames and the placeholders need no entry: what the processor's patch and merge
    sizes do not tell is the same in all of Qwen-VL."""

    faster: Mapping[type, type]
    """For classes of layers, subclasses that do the same faster."""
    deepstack: bool
    """Whether the language model takes features of several depths of the vision tower, not of its end alone."""
