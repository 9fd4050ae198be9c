"""An episode as the pages get it: every text, window, token and picture where it belongs, whatever the episode holds.

Locked here: turns have what stood before them, the forced prefix apart; credit is dealt out to sampled tokens in order,
and credit that does not fit is none; a frame without pixels is a reason; numbers are finite; nothing is a path.
"""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import LONG
from PIL import Image

from paravt.agent import EpisodeConfig, run_episode
from paravt.engines.scripted import Cut, ScriptedEngine
from paravt.episodes import episode_from_dict, episode_to_dict
from paravt.models import QwenVL
from paravt.report.episode_view import Credit, call_texts, crop_view, episode_row, episode_view
from paravt.report.pictures import Picture, data_uri, frame_picture
from paravt.turns import parse_turn, render_call
from paravt.types import Episode, EpisodeError, Frame, Sample, Score
from paravt.video import FrameReader

CALLS = "\n".join(render_call("crop_video", {"start_time": a, "end_time": a + 8}) for a in (10, 300))
FIRST = f"look</think>\n{CALLS}\n<tool_call>\n<script>\n</tool_call>"
SAMPLE = Sample("s", LONG, "Which?", ("a cat", "a dog"), "B", "choice")


@pytest.fixture
async def episode(tiny: QwenVL) -> Episode:
    """Two turns and a forced answer: a call that runs, one past the end, one that is none; a turn that was cut off."""
    engine = ScriptedEngine(tiny.chat, {"main": [FIRST, Cut("I go on"), "B"], "crop/0/0": ["a cat, so A"]})
    config = EpisodeConfig(frame_budget=4, crop_max_frames=4, max_turns=2, think_prefix=True)
    return await run_episode(SAMPLE, engine, config, reader=FrameReader())


async def test_turns_have_what_stood_before_them_and_crops_what_became_of_them(episode: Episode) -> None:
    view = episode_view(episode, id="e1")
    assert json.loads(json.dumps(view, allow_nan=False)) == view
    assert (view["id"], view["video"], view["video_url"]) == ("e1", "longgop.mp4", None)
    assert [turn["failure"] for turn in view["turns"]] == [
        "a call that cannot be read",
        "cut off at the token limit",
        "a forced answer",
    ]
    assert [[piece["kind"] for piece in turn["pieces"]] for turn in view["turns"]] == [
        ["context", "forced", "sampled"]
    ] * 3
    context, forced, sampled = view["turns"][0]["pieces"]
    assert (context["images"], forced["text"], sampled["text"]) == (4, "<think>\n", FIRST + "<|im_end|>")
    assert "image_pad" not in context["text"]
    assert "<15.0 seconds><45.0 seconds>" in context["text"]
    assert view["turns"][2]["pieces"][1]["text"] == "<answer>"
    for turn, parsed in zip(view["turns"], episode.turns, strict=True):
        assert turn["text"] == parsed.text
        assert turn["text"] + "<|im_end|>" * (turn["index"] != 1) == "".join(p["text"] for p in turn["pieces"][1:])
    assert sum(piece["tokens"] for turn in view["turns"] for piece in turn["pieces"]) == len(episode.main.ids)

    ran, late, bad = view["crops"]
    assert (ran["status"], ran["start"], ran["end"], ran["report"]) == ("ran", 10, 18, "a cat, so A")
    assert [piece["kind"] for piece in ran["pieces"]] == ["context", "sampled"]
    assert json.loads(ran["call"]) == {"name": "crop_video", "arguments": {"start_time": 10, "end_time": 18}}
    assert (late["status"], late["start"], late["end"]) == ("bad", 300, 308)  # what it asked for
    assert "past the end" in str(late["error"])
    assert (bad["status"], bad["start"], bad["call"], bad["pieces"]) == ("bad", None, "<script>", [])


async def test_pictures_are_those_of_the_frames_and_a_frame_without_pixels_is_a_reason(episode: Episode) -> None:
    view = episode_view(episode)
    assert [shown["time"] for shown in view["overview"]] == list(episode.overview_times)
    for shown, frame in zip(view["overview"], episode.main.images, strict=True):
        assert shown["picture"] == data_uri(frame.pixels, 96)
    assert len(view["crops"][0]["frames"]) == 4
    saved = episode_from_dict(json.loads(json.dumps(episode_to_dict(episode))))
    assert all(shown["picture"] is None and shown["why"] for shown in episode_view(saved)["overview"])
    asked: list[tuple[str, int]] = []

    def pictures(frame: Frame, widest: int) -> Picture:
        asked.append((frame.key, widest))
        return Picture("data:,x")

    assert episode_view(saved, pictures)["crops"][0]["frames"][0]["picture"] == "data:,x"
    assert asked == [(f.key, 96) for f in episode.main.images] + [(f.key, 160) for f in episode.crops[0].trace.images]


async def test_credit_is_dealt_out_to_sampled_tokens_in_order(episode: Episode) -> None:
    sampled = [segment for segment in episode.main if segment.sampled]
    tokens = sum(len(segment.ids) for segment in sampled)
    credit = Credit(tuple(n / 8 for n in range(tokens)), tuple(f"t{n}" for n in range(tokens)))
    view = episode_view(episode, credit={"main": credit})
    shown = [piece for turn in view["turns"] for piece in turn["pieces"] if piece["kind"] == "sampled"]
    assert [len(piece["logprobs"] or ()) for piece in shown] == [len(segment.ids) for segment in sampled]
    assert [value for piece in shown for value in piece["advantages"] or ()] == list(credit.advantages)
    assert [token for piece in shown for token in piece["spelled"] or ()] == list(credit.spelled)
    assert view["crops"][0]["pieces"][1]["advantages"] is None
    wrong = episode_view(episode, credit={"main": Credit(credit.advantages[1:], credit.spelled[1:])})
    assert all(piece["advantages"] is None for turn in wrong["turns"] for piece in turn["pieces"])


async def test_a_row_of_the_list(episode: Episode) -> None:
    scores = {"total": Score(0.5), "accuracy": Score.unscored("judge down"), "odd": Score(math.inf)}
    failed = replace(episode, rewards=scores, errors=(EpisodeError("video", "overview", "no", scored=False),))
    row = episode_row(failed, id="1", group="g", step=3, advantage=math.nan)
    assert (row["calls"], row["turns"], row["errors"], row["step"], row["truth"]) == (1, 3, 1, 3, "B")
    assert row["failures"] == ["call_malformed", "length", "forced"]
    assert row["rewards"] == {"total": 0.5, "accuracy": None, "odd": None}
    assert row["advantage"] is None
    json.dumps(row, allow_nan=False)


async def test_what_is_not_finite_or_does_not_fit_is_left_out(episode: Episode) -> None:
    segments = [replace(s, logprobs=tuple(-math.inf for _ in s.ids)) if s.sampled else s for s in episode.main]
    odd = replace(
        episode, main=replace(episode.main, segments=tuple(segments)), duration=math.nan, timings={"total": math.inf},
        overview_times=(1.0, math.nan), turns=(*episode.turns, parse_turn("once more")),
    )  # fmt: skip
    view = episode_view(odd)
    json.dumps(view, allow_nan=False)
    assert (view["duration"], view["timings"]) == (0.0, {"total": 0.0})
    assert view["turns"][3]["pieces"] == []
    assert "why" in view["overview"][0]


def test_calls_are_shown_as_they_were_written_where_blocks_and_calls_match() -> None:
    spaced = '<tool_call>{"name":"crop_video",  "arguments":{"start_time":"0:10","end_time":20}}</tool_call>'
    assert call_texts(parse_turn(spaced)) == ['{"name":"crop_video",  "arguments":{"start_time":"0:10","end_time":20}}']
    two = "<tool_code>crop_video(1, 2); crop_video(3, 4)</tool_code>"
    assert [json.loads(call)["arguments"]["start_time"] for call in call_texts(parse_turn(two))] == [1.0, 3.0]


async def test_a_crop_by_itself_while_an_episode_runs(episode: Episode) -> None:
    crop = crop_view(episode.crops[0])
    assert all(shown["picture"] for shown in crop["frames"])
    assert json.loads(crop["call"])["arguments"] == {"start_time": 10.0, "end_time": 18.0}
    assert crop_view(replace(episode.crops[0], trace=None))["frames"][0]["picture"] is None


def test_a_small_picture_stays_small() -> None:
    wide = data_uri(np.full((50, 400, 3), 90, np.uint8), 96)
    image = Image.open(io.BytesIO(base64.b64decode(wide.partition(",")[2])))
    assert (image.format, image.size) == ("WEBP", (96, 12))
    small = frame_picture(Frame(0, np.zeros((32, 32, 3), np.uint8), "k"), 96).uri
    assert Image.open(io.BytesIO(base64.b64decode(str(small).partition(",")[2]))).size == (32, 32)
