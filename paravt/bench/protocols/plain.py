"""One turn without tools: an answer at once, or after reasoning as Video-R1 was trained to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paravt.bench.protocols.common import opening, plain_answer
from paravt.episode_config import EpisodeConfig
from paravt.protocol import PARAVT, Opening, Protocol, Scene
from paravt.turns import parse_turn
from paravt.types import Turn


def parse(text: str, config: EpisodeConfig) -> Turn:
    """As our own turns; without an `<answer>`, what follows the reasoning is the answer."""
    turn = parse_turn(text, {})
    return turn if turn.answer is not None or turn.calls else replace(turn, answer=plain_answer(turn.text))


def direct(texts: Mapping[str, str]) -> Protocol:
    """Asked as our own models are. The system text is `EpisodeConfig.prompts.system_direct`."""
    return replace(PARAVT, parse=parse)


def video_r1(texts: Mapping[str, str]) -> Protocol:
    """`<think>` with doubts and corrections, then `<answer>` with nothing but it. No system turn of its own: "system"
    is what the chat template of Qwen2.5-VL writes where none is given."""

    def first(scene: Scene) -> Opening:
        return opening(scene, texts["user"], system=texts["system"], options="Options:")

    return replace(PARAVT, first=first, parse=parse)
