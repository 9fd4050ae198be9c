"""What an episode does where its budgets end: tokens, frames, turns, sub-agents at a time."""

from __future__ import annotations

import math

import pytest
from conftest import CASES
from test_agent import ANSWER, SAMPLE, calls, replies, run, scripted

from paravt.agent import CropDone, CropStarted, EpisodeConfig, Event, run_episode
from paravt.engines.scripted import Delayed, ScriptedEngine
from paravt.models import QwenVL
from paravt.prompts import Prompts
from paravt.types import Sample
from paravt.video import FrameReader


async def test_bad_calls_get_error_replies_and_five_in_a_row_end_the_episode(tiny: QwenVL) -> None:
    bad = '<think>\nx\n</think>\n<tool_call>\n{"name": "crop_video", "argum\n</tool_call>'
    episode = await run(scripted(tiny, [bad] * 5), EpisodeConfig(frame_budget=4, max_turns=5, force_answer=False))
    assert len(episode.turns) == 5
    assert [crop.status for crop in episode.crops] == ["bad"] * 4  # nobody would read a fifth reply
    assert episode.main.text.count("<tool_response>\nerror: ") == 4
    assert (episode.answer, episode.scored, episode.tool_calls) == (None, True, 0)


async def test_a_forced_answer_is_recorded_and_never_strict(tiny: QwenVL) -> None:
    config = EpisodeConfig(frame_budget=4, max_turns=1)
    episode = await run(scripted(tiny, [calls((0, 9)), "C</answer>"], crop_0_0=["x"]), config)
    assert (episode.answer, episode.forced) == ("C", True)
    assert not episode.turns[-1].strict
    assert episode.main.segments[2].text.endswith(f"{Prompts().final}<|im_end|>\n<|im_start|>assistant\n<answer>")
    assert "[0 - 9 seconds] x" in replies(episode)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("C</answer>", "C"), ("C", "C"), ("<think>maybe A</think> B", "B"), ("", None)],
)
async def test_what_a_forced_turn_says_is_the_answer(tiny: QwenVL, text: str, answer: str | None) -> None:
    episode = await run(scripted(tiny, ["hm", text]), EpisodeConfig(frame_budget=4))
    assert (episode.answer, episode.forced, episode.end) == (answer, True, "no_call")


async def test_when_the_tokens_run_out_an_answer_is_still_asked_for(tiny: QwenVL) -> None:
    def engine() -> ScriptedEngine:
        return scripted(tiny, [calls((0, 9)), calls((10, 19)), "B</answer>"], crop_0_0=["x"], crop_1_0=["y " * 400])

    short = await run(engine(), EpisodeConfig(frame_budget=4))
    limit = len(short.main.segments[0].ids) + 400
    episode = await run(engine(), EpisodeConfig(frame_budget=4, max_context_tokens=limit))
    assert (episode.answer, episode.forced, episode.end, episode.scored) == ("B", True, "budget", True)
    assert len(episode.main.ids) <= limit
    trained = await run(engine(), EpisodeConfig(frame_budget=4, max_context_tokens=limit, force_answer=False))
    assert len(trained.main.ids) <= limit


async def test_an_overview_that_does_not_fit_is_nobodys_wrong_answer(tiny: QwenVL) -> None:
    episode = await run(scripted(tiny, [ANSWER]), EpisodeConfig(frame_budget=64, max_context_tokens=300))
    assert (episode.scored, episode.turns, episode.end) == (False, (), "failed")
    assert "use fewer frames" in episode.errors[0].message


async def test_replies_are_cut_text_and_images_together(tiny: QwenVL) -> None:
    def engine() -> ScriptedEngine:
        return scripted(tiny, [calls((0, 9), (10, 19)), ANSWER], crop_0_0=["word " * 60], crop_0_1=["word " * 60])

    free = await run(engine(), EpisodeConfig(frame_budget=4, evidence="both", crop_max_frames=8))
    assert len(free.main.images) == 4 + 16
    limit = len(free.main.ids) - 40
    episode = await run(
        engine(), EpisodeConfig(frame_budget=4, evidence="both", crop_max_frames=8, max_context_tokens=limit)
    )
    block = episode.main.segments[2]
    assert block.text.count("[cut]") == 2
    assert len(block.images) == block.ids.count(tiny.chat.image_id) == 8
    assert len(episode.main.ids) <= limit
    assert episode.answer == "B"


async def test_the_frame_budget_is_shared_by_overview_and_crops(tiny: QwenVL) -> None:
    config = EpisodeConfig(frame_budget=4, max_frames=10, crop_max_frames=4, force_answer=False)
    engine = scripted(tiny, [calls((0, 9), (10, 19), (20, 29)), ANSWER], crop_0_0=["x"], crop_0_1=["y"])
    episode = await run(engine, config)
    assert [len(crop.frame_times) for crop in episode.crops] == [4, 2, 0]
    assert episode.crops[2].status == "skipped"
    assert "no frames are left in the budget" in replies(episode)


async def test_no_more_sub_agents_at_once_than_allowed(tiny: QwenVL) -> None:
    running, most = 0, 0

    def watch(event: Event) -> None:
        nonlocal running, most
        running += isinstance(event, CropStarted) - isinstance(event, CropDone)
        most = max(most, running)

    windows = [(float(i), float(i + 1)) for i in range(0, 60, 10)]
    engine = scripted(tiny, [calls(*windows), ANSWER], **{f"crop_0_{i}": [Delayed(0.02, "x")] for i in range(6)})
    config = EpisodeConfig(frame_budget=4, max_parallel=2)
    episode = await run_episode(SAMPLE, engine, config, reader=FrameReader(), on_event=watch)
    assert (most, episode.tool_calls) == (2, 6)


async def test_a_clip_with_fewer_frames_than_the_budget(tiny: QwenVL) -> None:
    episode = await run(scripted(tiny, [ANSWER]), sample=Sample("s", str(CASES / "video" / "three.mp4"), "?"))
    assert episode.overview_times == (0.0, 0.1, 0.2)
    assert episode.scored


def test_budgets_are_checked_when_they_are_given() -> None:
    with pytest.raises(ValueError, match="frame_budget must be positive"):
        EpisodeConfig(frame_budget=0)
    with pytest.raises(ValueError, match="call_timeout"):
        EpisodeConfig(call_timeout=-1)
    with pytest.raises(ValueError, match="temperature"):
        EpisodeConfig(temperature=math.nan)
    with pytest.raises(ValueError, match="max_context_tokens"):
        EpisodeConfig(max_context_tokens=-5)
    with pytest.raises(ValueError, match="more than max_frames"):
        EpisodeConfig(frame_budget=16, max_frames=2)
