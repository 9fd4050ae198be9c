"""The vLLM engine on servers of vLLM itself, with the package's small checkpoint.

Locked here: what a server says of its tokens is what the learner says of them, within 1e-4, before and after every
update of weights, one of the vision tower alone included; a canary finds a server with other weights; two processes
of a run share a server; a run goes on when one of its two servers is killed in the middle of a step, starts it again,
brings it up to date and gives it work, and leaves no process behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from rich.console import Console
from test_rl import BASE, SMALL, metrics

from paravt.ask import shipped_model
from paravt.chat import text_message, timestamp
from paravt.config import RLRecipe, load_recipe
from paravt.engines.base import Completion, Prompt, Sampling
from paravt.engines.vllm import (
    CPU_ARGUMENTS,
    ServerProcess,
    SpawnConfig,
    VLLMConfig,
    VLLMEngine,
    open_transfer,
    serve_arguments,
)
from paravt.errors import EngineError
from paravt.lab.factory import train_rl
from paravt.learner import Learner, LearnerConfig
from paravt.models import QwenVL, load_model
from paravt.types import Frame, ImagePart, Message, Row, TextPart

pytestmark = pytest.mark.vllm
T = 0.7
WITHIN = 1e-4
BATCH = 4096
"""Tokens, of the server: as many as its longest context."""
STARTING = 400.0
"""Seconds for servers to start, on a busy machine; a run of a few steps takes less."""


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given = request.config.getoption("--vllm-url")
    if given:
        yield given
        return
    model = load_model(shipped_model())
    arguments = serve_arguments(
        str(shipped_model()),
        dtype="float32",
        context=BATCH,
        images=64,
        sequences=16,
        pixels=(model.chat.frame_factor**2, model.chat.max_pixels),
        transfer="file",
        more=CPU_ARGUMENTS,
    )
    python = request.config.getoption("--vllm-python")
    server = ServerProcess(SpawnConfig(python, arguments, {}, (), tmp_path_factory.mktemp("vllm")), 0)
    server.start()
    try:
        deadline = time.monotonic() + STARTING
        while True:
            assert server.alive, server.last_words()
            assert time.monotonic() < deadline, server.last_words()
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{server.url}/health", timeout=30).status_code == 200:
                    break
            time.sleep(1)
        yield server.url
    finally:
        server.stop()


class Alone:
    """One process, with a learner that is trained by hand."""

    def __init__(self, model: QwenVL) -> None:
        self.learner = Learner(model, LearnerConfig(temperature=T))

    async def gather(self, value: Any) -> list[Any]:
        return [value]

    async def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return self.learner.logprobs(rows, temperature=1.0)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.learner.weights()

    @torch.no_grad()
    def change(self, part: str, by: float) -> None:
        """Noise on the weights of a part of the model."""
        draw = torch.Generator().manual_seed(1)
        for name, weight in self.learner.model.module.named_parameters():
            if part in name:
                weight += by * weight.std() * torch.randn(weight.shape, generator=draw)


@pytest.fixture
def alone() -> Alone:
    return Alone(load_model(shipped_model()))


@pytest.fixture(params=["file", "gloo"])
async def engine(request: pytest.FixtureRequest, url: str, alone: Alone, tmp_path: Path) -> AsyncIterator[VLLMEngine]:
    transfer = open_transfer(request.param, directory=tmp_path, address="127.0.0.1", device="cpu")
    model = alone.learner.model
    config = VLLMConfig(canary_tolerance=WITHIN)
    made = VLLMEngine(model.chat, model.banned_ids, alone, transfer, config, [url])
    yield made
    await made.close()


def prompts(model: QwenVL) -> list[Prompt]:
    """With frames of several sizes, with none, and one that goes on after a turn."""
    draw = np.random.default_rng(3)
    factor = model.chat.frame_factor

    def shown(*sides: tuple[int, int]) -> list[TextPart | ImagePart]:
        out: list[TextPart | ImagePart] = []
        for i, (height, width) in enumerate(sides):
            pixels = draw.integers(0, 256, (height * factor, width * factor, 3), dtype=np.uint8)
            out += [
                TextPart(timestamp(float(i))),
                ImagePart(Frame(float(i), pixels, f"test {i} {pixels.shape} {id(out)}")),
            ]
        return out

    small = (1, 1)
    first = model.chat.open([Message("user", (*shown(*[small] * 40), TextPart("What happens?")))])
    blind = model.chat.open([text_message("user", "What happens?")])
    frames = shown(small, small)
    opening = model.chat.open([Message("user", (*frames, TextPart("What happens?")))])
    said = tuple(model.chat.tokenizer.encode("It is not known", add_special_tokens=False))
    more = model.chat.reply([Message("tool", (*shown(small), TextPart("seen")))], closed=False)
    later = Prompt((*opening.ids, *said, *more.ids), (*opening.images, *more.images))
    return [Prompt(first.ids, first.images), Prompt(blind.ids, ()), later]


def off(learner: Learner, prompt: Prompt, completion: Completion) -> float:
    """The largest |log-probability of the learner - of the server|."""
    ids = np.array([*prompt.ids, *completion.ids])
    mask = np.arange(len(ids)) >= len(prompt.ids)
    row = Row(ids, mask, np.zeros(len(ids)), np.zeros(len(ids)), prompt.images, "g", "e", "main", 0)
    (logprobs,) = learner.logprobs([row])
    return float(np.abs(logprobs[mask] - np.array(completion.logprobs)).max())


async def test_logprobs_are_the_learners_before_and_after_every_update(engine: VLLMEngine, alone: Alone) -> None:
    asked = prompts(alone.learner.model)
    warm = Sampling(max_tokens=24, temperature=T, seed=11)
    before: list[Completion] = []
    changes = [("nothing", 0.0), ("visual", 0.3), ("language_model.layers", 0.1), ("embed_tokens", 0.1)]
    for version, (part, by) in enumerate(changes, start=40):
        alone.change(part, by)
        await engine.load_policy(version, alone.weights())
        found = [(await engine.generate(prompt, warm))[0] for prompt in asked]
        for prompt, completion in zip(asked, found, strict=True):
            engine.chat.check(completion)
            assert completion.policy_version == version
            assert off(alone.learner, prompt, completion) < WITHIN, (part, prompt.images and "images")
        if part == "visual":  # what has images changed, and nothing else
            assert found[0].logprobs != before[0].logprobs
            assert found[1].logprobs == pytest.approx(before[1].logprobs, abs=WITHIN)
        before = found


async def test_samples_of_a_group_differ_and_are_repeatable(engine: VLLMEngine, alone: Alone) -> None:
    await engine.load_policy(1, alone.weights())
    (asked, *_) = prompts(alone.learner.model)
    warm = Sampling(max_tokens=16, temperature=1.5, seed=2**62 + 5)
    group = await engine.generate(asked, warm, n=4)
    assert len({completion.ids for completion in group}) > 1
    # another batch may round differently: a sample is the same nearly always, and its prompt is in the cache
    again = await engine.generate(asked, warm, n=4)
    assert again[0].ids[0] == group[0].ids[0]
    assert again[0].usage.cached_tokens > 0


async def test_more_prompts_at_once_than_a_batch_takes(engine: VLLMEngine, alone: Alone) -> None:
    """All of them with seeds, and none is read in parts; see `CPU_ARGUMENTS`."""
    await engine.load_policy(1, alone.weights())
    (long, *_) = prompts(alone.learner.model)
    words = [tuple(alone.learner.model.chat.tokenizer.encode(str(i), add_special_tokens=False)) for i in range(48)]
    asked = [Prompt((*long.ids, *said), long.images, episode=i) for i, said in enumerate(words)]  # each prompt its own
    done = await asyncio.gather(
        *(engine.generate(each, Sampling(max_tokens=4, temperature=T, seed=i)) for i, each in enumerate(asked))
    )
    assert sum(len(each.ids) for each in asked) > 2 * BATCH
    assert all(completion.policy_version == 1 for (completion,) in done)
    assert engine._members[0].ready
    assert off(alone.learner, asked[7], done[7][0]) < WITHIN


async def test_a_canary_finds_a_server_with_other_weights(engine: VLLMEngine, alone: Alone) -> None:
    await engine.load_policy(1, alone.weights())
    sent = alone.weights()
    alone.change("visual", 0.3)
    with pytest.raises(EngineError, match="no server samples with the learner's weights"):
        await engine.load_policy(2, sent)


def test_three_steps_of_training(url: str, tmp_path: Path) -> None:
    changes = (*SMALL, "deterministic=false", f"engine={json.dumps({'kind': 'vllm', 'servers': [url]})}")
    recipe = load_recipe(RLRecipe, BASE / "full.yaml", changes)
    train_rl(recipe, tmp_path, Console(quiet=True))
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["unscored"] == 0
        assert row["token/tokens"] > 0
        assert row["token/mismatch_max"] < WITHIN
        assert row["token/truncated"] == 0
        assert row["staleness/max"] == 0
    assert not list((tmp_path / "weights").iterdir())


def command_line(out: Path, sets: Sequence[str], *options: str) -> list[str]:
    changes = [part for change in sets for part in ("--set", change)]
    return [sys.executable, "-m", "paravt", "rl", str(BASE / "full.yaml"), "--out", str(out), *options, *changes]


def environment(*directories: Path) -> dict[str, str]:
    """In which a run finds what this process does, and modules in these directories."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, directories), *sys.path])}


def test_two_processes_of_a_run_share_a_server(url: str, tmp_path: Path) -> None:
    """Each learns from its share of the prompts, and sends requests itself; the first one moves the weights."""
    engine = {"kind": "vllm", "servers": [url], "timeout": 120, "patience": 120, "start_timeout": 60}
    sets = [*SMALL, "deterministic=false", f"engine={json.dumps(engine)}", "reward.functions=[test_rl:uneven]"]
    run = subprocess.run(
        command_line(tmp_path / "run", sets, "--nproc", "2"),
        capture_output=True,
        text=True,
        timeout=STARTING,
        check=False,
        env=environment(),
    )
    assert run.returncode == 0, run.stderr
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["groups"], row["episodes"], row["unscored"]) == (2, 4, 0)  # a group of each
        assert row["token/tokens"] > 0
        assert row["token/mismatch_max"] < WITHIN
        assert row["staleness/max"] == 0


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, waiting = [], [pid]
    while waiting:
        at = waiting.pop()
        below = [child for child, parent in parents.items() if parent == at]
        found += below
        waiting += below
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


PATIENT = """
import time
from pathlib import Path
from paravt.types import Score

def score(episode):
    said = Path({said!r}).read_text()
    if "is out: " in said and "is back" not in said:
        time.sleep({seconds})
    return Score(0.0)
"""


def test_a_server_that_is_killed_in_the_middle_of_a_step(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = request.config.getoption("--vllm-python")
    if not python:
        pytest.skip("a server that is not ours cannot be killed; give --vllm-python")
    out = tmp_path / "run"
    engine = {"kind": "vllm", "servers": "spawn", "replicas": 2, "python": python}
    engine |= {"health_every": 1, "start_timeout": STARTING / 2}
    steps = 20
    # while the server is away, a reward of the user's takes its time: there have to be steps left when it is back
    (tmp_path / "patient.py").write_text(PATIENT.format(said=str(tmp_path / "said"), seconds=0.5))
    sets = [*SMALL, "deterministic=false", f"engine={json.dumps(engine)}", f"steps={steps}", "rollout.group_size=8"]
    sets += ["reward.functions=[patient:score]"]
    with (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(command_line(out, sets), stdout=said, stderr=said, env=environment(tmp_path))
    try:

        def wait_for(what: Any) -> None:
            deadline = time.monotonic() + STARTING
            while not what():
                assert run.poll() is None, (tmp_path / "said").read_text()
                assert time.monotonic() < deadline, (tmp_path / "said").read_text()
                time.sleep(0.05)

        wait_for(lambda: (out / "metrics.jsonl").exists() and metrics(out))
        servers = [pid for pid in children(run.pid) if " serve " in command(pid) and "keeper.py" not in command(pid)]
        assert len(servers) == 2
        ours = children(run.pid)
        time.sleep(0.3)
        port = command(servers[0]).partition("--port ")[2].split()[0]
        os.kill(servers[0], signal.SIGKILL)
        wait_for(lambda: f":{port} is back" in (tmp_path / "said").read_text())
        ours += children(run.pid)
        assert run.wait(timeout=STARTING) == 0, (tmp_path / "said").read_text()
    finally:
        run.kill()
        run.wait(60)
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["unscored"] == 0
        assert row["token/mismatch_max"] < WITHIN
    assert "is out: " in (tmp_path / "said").read_text()
    assert [command(pid) for pid in ours if command(pid)] == []
    (log,) = [path for path in (out / "servers").iterdir() if f":{port}" in path.read_text()]
    again = log.read_text().rpartition("Started server process")[2]
    canaries = again.count("POST /finish_weight_update")
    assert canaries > 1  # at its return, and with every update since
    assert again.count("POST /inference/v1/generate") > canaries + 1, "it was given no rollouts"
