"""The command line, run as users run it: exit codes, one-line errors, results on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_server import Server
from conftest import CASES, LONG

from paravt.lab.demo import question_of_two_scenes
from paravt.lab.questions import question
from paravt.lab.tiny import TinyShape, build_model, build_processor
from paravt.lab.world import world, write_video
from paravt.models import QwenVL


def paravt(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from paravt.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def lab_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "video.mp4"
    write_video("cli-1", path)
    return path


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("missing.mp4", 3, "no such file"),
        ("zero.mp4", 3, "empty"),
        ("facts.json", 3, "not a readable video"),
        ("trunc_nomoov.mp4", 3, "not a readable video"),
        ("audioonly.mp4", 3, "no video stream"),
        ("coveraudio.m4a", 3, "no video stream"),
        (".", 3, "directory"),
    ],
)
def test_a_bad_video_is_one_line_and_exit_code_3(name: str, code: int, message: str) -> None:
    done = paravt("ask", CASES / "video" / name, "What happens?")
    assert done.returncode == code
    assert message in done.stderr.lower()
    assert Path(name).name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_an_unknown_model_and_a_dead_server() -> None:
    done = paravt("ask", LONG, "q", "--model", "./no/such/model")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (4, 1)
    assert "./no/such/model: no such model directory" in done.stderr
    done = paravt("ask", LONG, "q", "--server", "http://127.0.0.1:9", "--served-model", "m")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (5, 1)
    assert "http://127.0.0.1:9/v1: cannot be reached; is the server running?" in done.stderr


def test_contradicting_options_are_wrong_usage(tmp_path: Path) -> None:
    assert paravt("ask", LONG, "q", "--model", "m", "--server", "http://x").returncode == 2
    assert paravt("ask", LONG, "q", "--served-model", "m").returncode == 2
    assert paravt("ask", LONG, "q", "--frames", "0").returncode == 2
    assert paravt("ask", LONG, "q", "--save", tmp_path / "no" / "e.json").returncode == 2
    assert paravt("ask", LONG, " ").returncode == 6


def test_help_lists_everything() -> None:
    top = paravt("--help").stdout
    for command in ("ask", "sft", "lab"):
        assert command in top
        assert paravt(command, "--help").returncode == 0
    for option in ("--model", "--server", "--served-model", "--frames", "--dispatch", "--option", "--json", "--save"):
        assert option in paravt("ask", "--help").stdout


def test_the_shipped_checkpoint_answers_from_parallel_crops(lab_video: Path, tmp_path: Path) -> None:
    asked = question_of_two_scenes("cli-1", str(lab_video)).sample
    saved = tmp_path / "episode.json"
    done = paravt("ask", lab_video, asked.question, "--json", "--save", saved)
    assert done.returncode == 0, done.stderr
    episode = json.loads(done.stdout)
    assert episode == json.loads(saved.read_text())
    assert episode["answer"] == asked.answer
    assert len(episode["crops"]) == 3
    assert {crop["turn"] for crop in episode["crops"]} == {0}  # all in one turn
    seen = [", ".join(world("cli-1").visible(crop["frame_times"])) or "nothing" for crop in episode["crops"]]
    assert [crop["report"] for crop in episode["crops"]] == seen
    assert all(turn["strict"] for turn in episode["turns"])
    assert episode["main"]["segments"][1]["sampled"] is True


def test_the_answer_is_printed_with_its_evidence(lab_video: Path) -> None:
    asked = question("cli-1", 2, families={"what": 1}, choice=0).sample
    done = paravt("ask", lab_video, asked.question, "--dispatch", "sequential", "--frames", "16")
    assert done.returncode == 0, done.stderr
    assert f"Answer: {asked.answer}" in done.stdout
    assert done.stdout.count("ran") == 2
    assert "prompt and" in done.stdout


def test_a_truncated_file_works_and_says_so() -> None:
    done = paravt("ask", CASES / "video" / "trunc_fast.mp4", "What happens?")
    assert done.returncode in (0, 1)  # the checkpoint knows nothing of this clip; it may have no answer
    assert "truncated" in done.stderr


def test_another_checkpoint_directory_works_unchanged(tiny: QwenVL, tmp_path: Path) -> None:
    """Any size: here another width, depth, head count and frame size than the shipped one."""
    shape = TinyShape(hidden=96, layers=4, heads=6, kv_heads=3, feed_forward=160, vision_hidden=32, frame_side=96)
    other = QwenVL(build_model(tiny.chat.tokenizer, shape, seed=1), build_processor(tiny.chat.tokenizer, shape))
    other.save(tmp_path / "other")
    done = paravt("ask", LONG, "What happens?", "--model", tmp_path / "other", "--json", "--frames", "8")
    assert done.returncode in (0, 1), done.stderr  # random weights: any text, or none
    episode = json.loads(done.stdout)
    assert episode["errors"] == []
    assert len(episode["overview_times"]) == 8


def test_a_server_answers(server: Server) -> None:
    done = paravt("ask", LONG, "Which?", "--server", server.url, "--option", "a cat", "--option", "a dog")
    assert done.returncode == 0, done.stderr
    assert "Answer: B" in done.stdout
    question = server.requests[0]["messages"][-1]["content"][-1]["text"]
    assert "A. a cat\nB. a dog\nAnswer with the letter of one option." in question


def test_model_output_cannot_steer_the_terminal(server: Server) -> None:
    server.answers = ["<answer>\x1b[31m[bold red]boo\x07</answer>"]
    done = paravt("ask", LONG, "Which?", "--server", server.url)
    assert "[bold red]boo" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout


def test_lab_video_writes_a_long_video(tmp_path: Path) -> None:
    done = paravt("lab", "video", tmp_path / "v.mp4", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "v.mp4").stat().st_size > 100_000
    lines = done.stdout.splitlines()
    assert 4 <= len(lines) == len(set(lines))


@pytest.mark.parametrize("loop", ["rl", "sft"])
def test_a_training_loop_is_a_command_too(loop: str, tmp_path: Path) -> None:
    """`torchrun -m paravt.rl RECIPE --out DIR` is what one tries first."""
    command = [sys.executable, "-m", f"paravt.{loop}", "none.yaml", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (2, "paravt: none.yaml: No such file or directory\n")
