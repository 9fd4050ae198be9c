"""Subtitles: both published formats, what is chosen for the frames that are shown, and where it stands in a prompt."""

from __future__ import annotations

import json
import math
from pathlib import Path

import bench_data
import pytest

from paravt.agent import EpisodeConfig, run_episode
from paravt.bench.benchmarks import BENCHMARKS
from paravt.engines.scripted import ScriptedEngine
from paravt.errors import VideoError
from paravt.models import QwenVL
from paravt.subtitles import Cue, cues_at, read_cues, subtitle_text
from paravt.types import Sample


def test_srt(tmp_path: Path) -> None:
    (tmp_path / "x.srt").write_text(bench_data.SRT, encoding="utf-8", newline="")
    assert read_cues(str(tmp_path / "x.srt")) == (
        Cue(0.2, 1.0, "Good & early"),
        Cue(0.9, 2.6, "a line that goes on"),
        Cue(2.6, 2.7, "a line that goes on"),
        Cue(3600.0, 3601.0, "far away"),
    )


def test_srt_without_empty_lines_or_numbers(tmp_path: Path) -> None:
    text = "1\n00:00:01,000 --> 00:00:02,000\n42\n2\n00:00:03.5 --> 00:00:04.0 X1:0\nyes\n\n01:05,0 --> 01:06,0\nno"
    (tmp_path / "x.srt").write_text(text)
    assert read_cues(str(tmp_path / "x.srt")) == (Cue(1.0, 2.0, "42"), Cue(3.5, 4.0, "yes"), Cue(65.0, 66.0, "no"))


def test_both_shapes_of_json(tmp_path: Path) -> None:
    bench_data.longvideobench(tmp_path)
    assert read_cues(str(tmp_path / "subtitles" / "v1_en.json"), 100.0) == (
        Cue(0.0, 2.0, "hello there"),
        Cue(6.0, math.inf, "to the end"),
    )
    short, late = read_cues(str(tmp_path / "subtitles" / "v2_en.json"), 100.0)
    assert (short.start, short.text) == (pytest.approx(1.5), "short")
    assert (late.start, late.end) == (pytest.approx(7.0), pytest.approx(8.0))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.json", "{", "not JSON"),
        ("x.json", '{"a": 1}', "no subtitles in a form that is known"),
        ("x.json", '[1, {"text": "a"}, {"timestamp": [null, 2], "text": "a"}, {"timestamp": [1, 2]}]', "no subtitles"),
        ("x.srt", "", "no subtitles"),
        ("x.srt", "some text\n\nmore", "no subtitles"),
    ],
)
def test_files_that_hold_none(name: str, text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(VideoError, match=reason):
        read_cues(str(tmp_path / name))


def test_what_covers_a_frame_is_chosen_once() -> None:
    cues = [
        Cue(0.0, 4.0, "a"),
        Cue(3.0, 6.0, "b"),
        Cue(6.0, 7.0, "b"),  # a caption that rolls
        Cue(7.6, 7.8, "short"),  # counts as 7.2 to 8.2
        Cue(9.0, 10.0, "between frames"),
        Cue(12.0, math.inf, "open"),
    ]
    chosen = cues_at(cues, [3.5, 3.6, 6.5, 8.1, 11.0, 40.0, 20.0])
    assert [cue.text for cue in chosen] == ["a", "b", "short", "open"]
    assert cues_at(cues, []) == []


def test_the_block_of_a_sample(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(
        json.dumps([{"timestamp": [101.5, 103], "text": "hi"}, {"timestamp": [104, None], "text": "bye"}])
    )
    metadata = {"subtitles": str(tmp_path / "x.json"), "subtitles_offset": 100.0}
    sample = Sample("s", "v", "q", metadata=metadata)
    block = "\nWhat is said at these frames:\n[1.5 - 3 seconds] hi\n[from 4 seconds] bye"
    assert subtitle_text(sample, [2.0, 6.0]) == block
    assert subtitle_text(sample, [0.0]) == ""
    assert subtitle_text(Sample("s", "v", "q"), [2.0]) == ""


async def test_an_episode_reads_what_is_said_at_its_frames_before_the_question(tmp_path: Path, tiny: QwenVL) -> None:
    loaded = BENCHMARKS["longvideobench_subtitles"].load(bench_data.longvideobench(tmp_path))
    engine = ScriptedEngine(tiny.chat, {"main": ["<think>\nx\n</think>\n<answer>D</answer>"]})
    episode = await run_episode(loaded.samples[0], engine, EpisodeConfig(frame_budget=4))
    prompt = episode.main.segments[0].text
    said, asked = prompt.index("hello there"), prompt.index("Question: What is it?")
    assert prompt.rindex("seconds>") < said < prompt.index("to the end") < asked
    assert "before" not in prompt
    plain = BENCHMARKS["longvideobench"].load(tmp_path)
    episode = await run_episode(plain.samples[0], engine, EpisodeConfig(frame_budget=4))
    assert "What is said" not in episode.main.segments[0].text


async def test_subtitles_that_are_gone_leave_the_episode_unscored(tmp_path: Path, tiny: QwenVL) -> None:
    loaded = BENCHMARKS["longvideobench_subtitles"].load(bench_data.longvideobench(tmp_path))
    read_cues.cache_clear()
    (tmp_path / "subtitles" / "v1_en.json").unlink()
    engine = ScriptedEngine(tiny.chat, {"main": ["<answer>D</answer>"]})
    episode = await run_episode(loaded.samples[0], engine, EpisodeConfig(frame_budget=4))
    assert not episode.scored
    assert "subtitles cannot be read" in episode.errors[0].message
