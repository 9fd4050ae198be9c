"""A run on a cluster of Ray, here of two nodes on one machine.

Locked here: a run that loses a process and then a node ends with the metrics of one that lost nothing, bit by bit, and
has used every prompt once; what is wrong with the run itself ends it at once, in one line; workers that decode give
what a reader gives, also when one is lost in the middle of a request; a server whose actor is lost comes back at
another address, and every process of the run finds it there.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import LONG
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError
from ray.train import WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal import exceptions
from test_rl import BASE, metrics
from test_rl import recipe as small_recipe
from test_rl_ranks import ENVIRONMENT, PATIENCE, checkpoint, children, episodes, wait_for
from vllm_server import IMAGE_TOKENS, QUICK, WARM, frame, load, paired_ranks, prompt, spawn_config, until

from paravt.chat import TokenChat
from paravt.cli import main
from paravt.config import VLLMEngineRecipe
from paravt.engines.vllm import SpawnConfig, VLLMConfig, VLLMEngine, open_transfer
from paravt.errors import DataError, RecipeError, VideoError
from paravt.lab.corpus import write_corpus
from paravt.launch import ray as launch
from paravt.launch.decoders import Decoder, Decoders
from paravt.launch.hosts import RayHosts
from paravt.launch.ray import _reason
from paravt.models import QwenVL
from paravt.provenance import lock_directory
from paravt.video import FrameReader

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",  # what else runs on the machine is not the cluster's to kill for
}
WITH_RAY = ENVIRONMENT | RAY
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its processes find the package and the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", *RAY):
            patch.setenv(name, WITH_RAY[name])
        # a node that is gone is noticed after 5 seconds, not 15
        head = {"include_dashboard": False, "_system_config": {"health_check_period_ms": 1000}}
        running = Cluster(initialize_head=True, head_node_args=NODE | head)
        try:
            running.add_node(**NODE)
            yield running
        finally:
            ray.shutdown()
            running.shutdown()


@pytest.fixture
def connected(cluster: Cluster) -> Iterator[None]:
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()


def write_recipe(directory: Path, *changes: str) -> Path:
    """Of two prompts a step, about files."""
    questions = directory / "corpus" / "questions.jsonl"
    if not questions.exists():
        write_corpus(directory / "corpus", videos=4, questions=2, seed=0)
    made = small_recipe("full", f"data={{kind: jsonl, path: {questions}}}", "steps=4", "keep_checkpoints=9",
                        "episodes_every=1", *changes)  # fmt: skip
    path = directory / "recipe.yaml"
    path.write_text(made.model_dump_json())
    return path


def line(recipe: Path, out: Path, *options: str) -> list[str]:
    start = [sys.executable, "-c", "from paravt.cli import main; main()", "rl", str(recipe), "--out", str(out)]
    return [*start, "--nproc", "2", *options]


def workers(node: Any, name: str) -> list[int]:
    """Processes of a node whose actor has this name."""
    (raylet,) = node.all_processes["raylet"]
    found = []
    for pid in children(raylet.process.pid):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:  # it has just ended
            continue
        if title.startswith(f"ray::{name}"):
            found.append(pid)
    return found


def said(stderr: str) -> list[str]:
    return [each for each in stderr.splitlines() if each.startswith("paravt:")]


def test_a_run_that_loses_a_process_and_a_node_is_the_same_run(cluster: Cluster, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "run"
    done = subprocess.run(
        line(recipe, whole), capture_output=True, text=True, timeout=PATIENCE, check=False, env=WITH_RAY
    )
    assert done.returncode == 0, done.stderr

    options = ("--ray", cluster.address, "--decode-workers", "2")
    with subprocess.Popen(line(recipe, out, *options), stderr=subprocess.PIPE, text=True, env=WITH_RAY) as process:
        try:
            wait_for(checkpoint(out, 1), process)
            (second,) = cluster.worker_nodes
            assert all(workers(node, "Decoder") for node in (cluster.head_node, second))
            os.kill(workers(second, "RayTrainWorker")[0], signal.SIGKILL)
            wait_for(checkpoint(out, 2), process)
            cluster.remove_node(second, allow_graceful=False)
            cluster.add_node(**NODE)
            _, stderr = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0, stderr
    lost = [each for each in said(stderr) if "going on from the newest checkpoint" in each]
    assert len(lost) == 2, stderr
    assert "of 2 was lost" in lost[0]

    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    used = [group for step in range(1, 5) for group in dict.fromkeys(group for group, _ in episodes(out, step))]
    assert used == [group for step in range(1, 5) for group in dict.fromkeys(g for g, _ in episodes(whole, step))]
    names = [group.split("/", 1)[1] for group in used]
    assert len(names) == len(set(names)) == 8


def test_what_is_wrong_with_a_run_ends_it_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """A reason that comes all the way from the workers that decode."""
    recipe = write_recipe(tmp_path)
    for video in (tmp_path / "corpus").rglob("*.mp4"):
        video.write_bytes(b"no video")
    options = ("--ray", cluster.address, "--decode-workers", "1")
    done = subprocess.run(
        line(recipe, tmp_path / "run", *options),
        capture_output=True, text=True, timeout=PATIENCE, check=False, env=WITH_RAY,
    )  # fmt: skip
    assert done.returncode == DataError.exit_code, done.stderr
    (reason,) = done.stderr.strip().splitlines()
    assert reason.startswith("paravt: none of the 4 episodes of the first step could be scored; the first: ")
    assert ".mp4: not a readable video" in reason


def test_what_cannot_be_is_one_line(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*options: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["rl", str(BASE / "full.yaml"), "--out", str(tmp_path / "run"), *options])
        assert left.value.code == RecipeError.exit_code
        (message,) = capsys.readouterr().err.strip().splitlines()
        return message

    assert refused("--ray", "local", "--decode-workers", "2").startswith("paravt: --decode-workers: the lab's videos")
    assert refused("--ray", "127.0.0.1:1").startswith("paravt: --ray 127.0.0.1:1: no Ray cluster there (")
    assert refused("--ray", "a..b:1").startswith("paravt: --ray a..b:1: no Ray cluster there (")
    assert refused("--ray", "ray://head:10001").startswith("paravt: --ray ray://head:10001: not the address of")
    with lock_directory(tmp_path / "run"):
        assert refused("--ray", cluster.address).endswith("run: another process is running there")
    with lock_directory(tmp_path / "run" / "ray"):  # its processes have not started yet, or start anew
        assert refused("--ray", cluster.address).endswith("ray: another process is running there")
    assert not ray.is_initialized()
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "paravt.launch.ray")
    assert refused("--ray", "local") == "paravt: --ray needs Ray: pip install 'paravt[ray]'"


def test_nobody_waits_for_machines_to_join_a_cluster_of_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_cluster", lambda address, wanted: nullcontext())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0})
    command = ["rl", str(BASE / "full.yaml"), "--out", str(tmp_path), "--ray", "local", "--set", "model.device=cuda"]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert capsys.readouterr().err == "paravt: --ray local: this machine is too small (1 GPU, it has 0)\n"


def test_ray_still_has_what_is_turned_off() -> None:
    """Under another name its own handling of Ctrl-C would be back, and a wait for machines would be a failure."""
    assert hasattr(TorchTrainer, "_register_sigint_handler")
    assert hasattr(exceptions, "WorkerGroupStartupTimeoutError")


def test_what_was_lost_is_told_from_what_is_wrong() -> None:
    def reason(*causes: Exception) -> str:
        return _reason(WorkerGroupError("they failed", dict(enumerate(causes))), len(causes))

    heard = RuntimeError("Connection closed by peer\nand a stack")
    assert reason(heard, ActorDiedError()) == "process 1 of 2 was lost"
    assert reason(DataError("cannot be read"), ActorDiedError()) == "process 1 of 2 was lost"
    assert reason(heard) == "process 0 of 1 failed (Connection closed by peer)"
    assert reason(ConnectionResetError("gone"), heard) == "process 0 of 2 failed (gone)"
    for wrong in (DataError("no rows"), FloatingPointError("not a number"), OSError(errno.ENOSPC, "disk full")):
        with pytest.raises(type(wrong)) as ended:
            reason(heard, wrong)
        assert ended.value is wrong
    with pytest.raises(WorkerGroupError):  # a bug
        reason(TypeError("of ours"))


async def test_workers_give_what_a_reader_gives(connected: None, tmp_path: Path) -> None:
    decoders, reader = Decoders.place(2), FrameReader(workers=1)
    windows, size = [(1.0, 2.0), (2.0, 500.0)], (64, 64)
    assert await decoders.ainfo(LONG) == reader.info(LONG)
    for ours, theirs in zip(
        await decoders.aread_many(LONG, windows, size), reader.read_many(LONG, windows, size), strict=True
    ):
        assert ours.missing == theirs.missing
        for one, other in zip(ours.frames, theirs.frames, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one.time, one.key) == (other.time, other.key)
                assert one.pixels.dtype == other.pixels.dtype
                assert (one.pixels == other.pixels).all()
    first, again = await decoders.aread(LONG, (1.0,), size), await decoders.aread(LONG, (1.0,), size)
    assert first.frames[0] is again.frames[0]
    with pytest.raises(VideoError, match=r"gone\.mp4: no such file"):
        await decoders.aread(str(tmp_path / "gone.mp4"), (1.0,), size)
    assert decoders.asked_again == 0


class Stuck(Decoder):
    """The first one that is asked leaves its number and gives no answer."""

    def __init__(self, sign: Path) -> None:
        super().__init__()
        self._sign = sign

    async def read(self, path: str, windows: Any, size: Any) -> Any:
        try:
            with self._sign.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return await super().read(path, windows, size)
        return await asyncio.sleep(PATIENCE)


async def test_a_worker_that_is_lost_with_a_request(connected: None, tmp_path: Path) -> None:
    sign = tmp_path / "asked"
    actors = [ray.remote(num_cpus=1, max_restarts=-1)(Stuck).remote(sign) for _ in range(2)]
    decoders = Decoders(actors)
    request = asyncio.ensure_future(decoders.aread(LONG, (1.0,), (64, 64)))
    deadline = time.monotonic() + PATIENCE
    while not (sign.exists() and sign.read_text()):
        assert time.monotonic() < deadline
        assert not request.done()
        await asyncio.sleep(0.05)
    os.kill(int(sign.read_text()), signal.SIGKILL)
    expected = FrameReader(workers=1).read(LONG, (1.0,), (64, 64)).frames[0]
    frame = (await asyncio.wait_for(request, PATIENCE)).frames[0]
    assert frame is not None
    assert expected is not None
    assert (frame.pixels == expected.pixels).all()
    assert decoders.asked_again == 1

    for actor in actors:
        ray.kill(actor)
    frame = (await asyncio.wait_for(decoders.aread(LONG, (2.0,), (64, 64)), PATIENCE)).frames[0]  # read here
    assert frame is not None
    assert decoders.asked_again == 3


class Mortal(Decoder):
    """Ends as native code does that meets the wrong bytes."""

    async def info(self, path: str) -> Any:
        if path.endswith("deadly.mp4"):
            ctypes.string_at(0)
        return await super().info(path)


async def test_a_video_that_ends_whoever_reads_it_ends_no_run(connected: None) -> None:
    """It ends two workers and a process for it alone, never one that learns; then nobody is asked again."""
    actors = [ray.remote(num_cpus=1, max_restarts=-1)(Mortal).remote() for _ in range(2)]
    decoders = Decoders(actors, Mortal)
    for _ in range(3):
        with pytest.raises(VideoError, match=r"deadly\.mp4: the processes that read it crash"):
            await asyncio.wait_for(decoders.ainfo("deadly.mp4"), PATIENCE)
    assert decoders.asked_again == 2
    assert (await asyncio.wait_for(decoders.ainfo(LONG), PATIENCE)).duration > 100


# ------------------------------------------------------------------ servers


MAIN = """
import json, sys
from types import SimpleNamespace
import uvicorn
from vllm_server import FakeVLLM

value = dict(zip(sys.argv[3::2], sys.argv[4::2]))
words = json.load(open(sys.argv[2]))
encode = lambda text, add_special_tokens: [words["digits"][int(digit)] for digit in text]
chat = SimpleNamespace(image_id=words["image"], end_id=words["end"], tokenizer=SimpleNamespace(encode=encode))
uvicorn.run(FakeVLLM(chat, words["tokens"]).app(), host=value["--host"], port=int(value["--port"]), log_level="error")
"""


def fake_vllm(directory: Path, chat: TokenChat, tokens: int) -> SpawnConfig:
    """Starts a process that serves what `FakeVLLM` does. The model that it is given is a file of token ids."""
    digits = [chat.tokenizer.encode(str(digit), add_special_tokens=False)[0] for digit in range(10)]
    model = directory / "words.json"
    model.write_text(json.dumps({"image": chat.image_id, "end": chat.end_id, "digits": digits, "tokens": tokens}))
    return spawn_config(directory, MAIN, str(model), ENVIRONMENT["PYTHONPATH"])


def listens(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(10)
        return sock.connect_ex((host, port)) == 0


async def test_a_server_whose_actor_is_lost_comes_back_elsewhere(
    connected: None, vllm_model: QwenVL, tmp_path: Path
) -> None:
    """Of two processes the first one starts the server; the other one finds it."""
    config = VLLMConfig(**(QUICK | dict(patience=PATIENCE, start_timeout=PATIENCE)))  # type: ignore[arg-type]
    spawn = fake_vllm(tmp_path, vllm_model.chat, IMAGE_TOKENS)
    transfer = open_transfer("file", directory=tmp_path / "weights", address="127.0.0.1", device="cpu")
    ranks = paired_ranks()
    with RayHosts.place(VLLMEngineRecipe(kind="vllm")) as hosts:
        engines = [
            VLLMEngine(
                vllm_model.chat, vllm_model.banned_ids, rank, transfer if rank.first else None, config,
                processes=[hosts.server(spawn, 0, starts=rank.first)],
            )
            for rank in ranks
        ]  # fmt: skip
        try:
            await asyncio.gather(*(load(engine, 1, 0.1) for engine in engines))
            urls = [engine._members[0].url for engine in engines]
            assert urls[0] == urls[1]
            for engine in engines:
                (completion,) = await engine.generate(prompt(vllm_model.chat, [frame(0)]), WARM)
                assert completion.policy_version == 1

            ray.kill(hosts._actors[0], no_restart=False)
            await until(lambda: not any(engine._members[0].ready for engine in engines), PATIENCE)
            for engine in engines:  # waits for the server
                (completion,) = await engine.generate(prompt(vllm_model.chat, [frame(0)]), WARM)
                assert completion.policy_version == 1
                assert completion.logprobs[0] == pytest.approx(-0.1)  # type: ignore[index]
            now = [engine._members[0].url for engine in engines]
            assert now[0] == now[1] != urls[0]
            host, port = urls[0].removeprefix("http://").split(":")
            await until(lambda: not listens(host, int(port)), PATIENCE)  # the lost one has not outlived its actor
            await asyncio.gather(*(load(engine, 2, 0.2) for engine in engines))
            for engine in engines:
                (completion,) = await engine.generate(prompt(vllm_model.chat, [frame(0)]), WARM)
                assert completion.policy_version == 2
        finally:
            for engine in engines:
                await engine.close()


@pytest.mark.vllm
def test_a_run_whose_server_is_lost_goes_on(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = request.config.getoption("--vllm-python")
    if not python:
        pytest.skip("servers are started; give --vllm-python")
    engine = {"kind": "vllm", "servers": "spawn", "python": python, "health_every": 1}
    recipe = write_recipe(tmp_path, "deterministic=false", f"engine={json.dumps(engine)}")
    out = tmp_path / "run"
    options = ("--ray", cluster.address)
    with subprocess.Popen(line(recipe, out, *options), stderr=subprocess.PIPE, text=True, env=WITH_RAY) as process:
        try:
            wait_for(checkpoint(out, 1), process)
            (host,) = [pid for node in (cluster.head_node, *cluster.worker_nodes) for pid in workers(node, "Host")]
            os.kill(host, signal.SIGKILL)
            _, stderr = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 0, stderr
    assert "is out: " in stderr
    assert not any("going on from the newest checkpoint" in each for each in said(stderr))
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["unscored"] == 0
        assert row["token/mismatch_max"] < 1e-4
