"""A run on a cluster of Ray, here of two nodes on one machine.

Locked here: a run that loses a process and then a node ends with the metrics of one that lost nothing, bit by bit, and
has used every prompt once; what is wrong with the run itself ends it at once, in one line; workers that decode give
what a reader gives, also when one is lost in the middle of a request; a server whose actor is lost comes back at
another address, and every process of the run finds it there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import LONG
from ray.cluster_utils import Cluster
from test_rl import metrics
from test_rl import recipe as small_recipe
from test_rl_ranks import ENVIRONMENT, checkpoint, children, episodes

from paravt.config import RLRecipe
from paravt.errors import DataError, VideoError
from paravt.lab.corpus import write_corpus
from paravt.launch.decoders import Decoder, Decoders
from paravt.video import FrameReader

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 200 << 20}
PATIENCE = 500.0
"""Seconds; a busy machine takes its time."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its processes find the package and the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, ENVIRONMENT.get(name, "0"))
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


def wait_for(there: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not there.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, f"no {there}"
        time.sleep(0.02)


def said(stderr: str) -> list[str]:
    return [each for each in stderr.splitlines() if each.startswith("paravt:")]


def test_a_run_that_loses_a_process_and_a_node_is_the_same_run(cluster: Cluster, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "run"
    done = subprocess.run(
        line(recipe, whole), capture_output=True, text=True, timeout=PATIENCE, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr

    options = ("--ray", cluster.address, "--decode-workers", "2")
    with subprocess.Popen(line(recipe, out, *options), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
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
        capture_output=True, text=True, timeout=PATIENCE, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == DataError.exit_code, done.stderr
    (reason,) = done.stderr.strip().splitlines()
    assert reason.startswith("paravt: none of the 4 episodes of the first step could be scored; the first: ")
    assert ".mp4: not a readable video" in reason


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
        import asyncio

        return await asyncio.sleep(PATIENCE)


async def test_a_worker_that_is_lost_with_a_request(connected: None, tmp_path: Path) -> None:
    import asyncio

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
