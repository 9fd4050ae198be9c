"""Protocols that write calls and answers as our own models do, and differ in what they are told.

Qwen3-VL is given the tool and nothing else. LongVT is told in the turn of the user to reason, call and answer; its
tool wants the name of the video too. Video-R1 reasons with doubts and corrections, without a tool. `DIRECT` is asked as
our own models are. In all of them an answer without its tag is an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paravt.bench.protocols.common import opening, plain_answer
from paravt.episode_config import EpisodeConfig
from paravt.protocol import PARAVT, Opening, Scene
from paravt.tools import CROP_VIDEO
from paravt.types import Turn


def _parse(text: str, config: EpisodeConfig) -> Turn:
    """As our own turns; one that neither calls nor has an `<answer>` answers with what follows its reasoning."""
    turn = PARAVT.parse(text, config)
    return turn if turn.answer is not None or turn.calls else replace(turn, answer=plain_answer(turn.text))


def _qwen3_vl(scene: Scene) -> Opening:
    return opening(scene, system=False, tools=[CROP_VIDEO.schema])


def _longvt(scene: Scene) -> Opening:
    return opening(scene, tools=[_with_required_path()])


def _with_required_path() -> Mapping[str, Any]:
    function = CROP_VIDEO.schema["function"]
    parameters = {**function["parameters"], "required": list(CROP_VIDEO.parameters)}
    return {**CROP_VIDEO.schema, "function": {**function, "parameters": parameters}}


def _video_r1(scene: Scene) -> Opening:
    return opening(scene, options="Options:")


DIRECT = replace(PARAVT, parse=_parse)
QWEN3_VL = replace(DIRECT, first=_qwen3_vl)
LONGVT = replace(DIRECT, first=_longvt)
VIDEO_R1 = replace(DIRECT, first=_video_r1)
