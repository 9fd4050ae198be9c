"""Calls as the chat templates of the Qwen family describe them; the frames of every window come back.

Qwen3-VL is given the tool and nothing else. LongVT is told in the user's turn to reason, call and answer; its tool
wants the name of the video too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paravt.bench.protocols.common import opening, plain_answer
from paravt.episode_config import EpisodeConfig
from paravt.protocol import PARAVT, Opening, Protocol, Scene
from paravt.tools import CROP_VIDEO
from paravt.turns import parse_turn
from paravt.types import Turn


def parse(text: str, config: EpisodeConfig) -> Turn:
    """As our own turns; a turn that neither calls nor has an `<answer>` answers with what follows its reasoning."""
    turn = parse_turn(text)
    return turn if turn.answer is not None or turn.calls else replace(turn, answer=plain_answer(turn.text))


def qwen3_vl(texts: Mapping[str, str]) -> Protocol:
    def first(scene: Scene) -> Opening:
        return opening(scene, texts["user"], tools=[CROP_VIDEO.schema])

    return replace(PARAVT, first=first, parse=parse)


def longvt(texts: Mapping[str, str]) -> Protocol:
    def first(scene: Scene) -> Opening:
        return opening(scene, texts["user"], system=texts["system"], tools=[_with_required_path()])

    return replace(PARAVT, first=first, parse=parse)


def _with_required_path() -> Mapping[str, Any]:
    function = CROP_VIDEO.schema["function"]
    parameters = {**function["parameters"], "required": list(CROP_VIDEO.parameters)}
    return {**CROP_VIDEO.schema, "function": {**function, "parameters": parameters}}
