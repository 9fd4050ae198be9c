"""What the vLLM engine promises, against a server with vLLM's endpoints over real sockets.

Locked here: an image is never another one in silence; a conversation stays at its server, and no server gets more than
its share or its limit; a failed server costs a second try, and gets no request until it has the current weights again;
no completion is of other weights than its version says; servers that sample with stale weights are found and left out.
`test_vllm_real` says the same of vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from test_rl import BASE, SMALL, metrics
from vllm_server import FakeVLLM

from paravt.ask import shipped_model
from paravt.chat import TokenChat
from paravt.cli import main
from paravt.config import RLRecipe, load_recipe
from paravt.engines.base import Prompt, Sampling
from paravt.engines.vllm import SpawnConfig, VLLMConfig, VLLMEngine, open_transfer
from paravt.engines.vllm.canary import Canary, difference
from paravt.engines.vllm.spawn import ServerProcess
from paravt.engines.vllm.wire import DataUrls, PromptMismatch, collapsed
from paravt.errors import EngineError
from paravt.lab import suite
from paravt.lab.factory import train_rl
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.models import QwenVL, load_model
from paravt.prompts import Prompts
from paravt.types import Frame, ImagePart, Message, Row, TextPart
from paravt.watch import WatchConfig, check_mismatch

QUICK = dict(health_every=0.1, patience=10.0, start_timeout=10.0, timeout=20.0)
WARM = Sampling(max_tokens=8, temperature=0.7, seed=5)
IMAGE_TOKENS = 4
"""Of a frame of 64 x 64 px."""


@pytest.fixture(scope="module")
def model() -> QwenVL:
    """Of which the vocabulary and the sizes of frames are used."""
    shape = TinyShape(frame_side=96)
    tokenizer = train_tokenizer([Prompts().system, "<12.5 seconds> 0123456789"], Prompts().fixed_phrases())
    return QwenVL(build_model(tokenizer, shape), build_processor(tokenizer, shape))


class Learner:
    """In the place of the run's: its log-probabilities are those of the weights that it has."""

    first = True

    def __init__(self) -> None:
        self.weights = 0.0
        self.scored = 0

    async def gather(self, value: Any) -> list[Any]:
        return [value]

    async def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        self.scored += len(rows)
        return [np.where(row.mask, -self.weights, 0.0) for row in rows]


def frame(seed: int, side: int = 64) -> Frame:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Frame(float(seed), pixels, f"frame {seed}/{side}")


def prompt(chat: TokenChat, frames: Sequence[Frame] = (), episode: int = 0, trace: str = "main") -> Prompt:
    parts = [part for each in frames for part in (TextPart("<1.0 seconds>"), ImagePart(each))]
    segment = chat.open([Message("user", (*parts, TextPart("what?")))])
    return Prompt(segment.ids, segment.images, trace=trace, episode=episode)


@pytest.fixture
def servers(model: QwenVL) -> Iterator[list[FakeVLLM]]:
    running = [FakeVLLM(model.chat, IMAGE_TOKENS) for _ in range(2)]
    for server in running:
        server.start()
    yield running
    for server in running:
        server.hangs = False
        server.kill()


@pytest.fixture
async def make(model: QwenVL, tmp_path: Path) -> AsyncIterator[Callable[..., VLLMEngine]]:
    made: list[VLLMEngine] = []

    def engine(servers: Sequence[FakeVLLM], learner: Learner | None = None, **options: Any) -> VLLMEngine:
        transfer = open_transfer("file", directory=tmp_path, address="127.0.0.1", device="cpu")
        config = VLLMConfig(**(QUICK | options))
        urls = [server.url for server in servers]
        made.append(VLLMEngine(model.chat, model.banned_ids, learner or Learner(), transfer, config, urls))
        return made[-1]

    yield engine
    for each in made:
        await each.close()


async def load(engine: VLLMEngine, version: int, value: float) -> None:
    learner = engine._learner
    assert isinstance(learner, Learner)
    learner.weights = value
    await engine.load_policy(version, {"w": torch.tensor(value)})


async def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


Make = Callable[..., VLLMEngine]

# ---------------------------------------------------------------------------------------------------- one request


async def test_token_ids_go_in_and_come_out(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers[:1])
    await load(engine, 7, 0.25)
    asked = prompt(model.chat, [frame(1), frame(2)])
    first, second = await engine.generate(asked, WARM, n=2)
    assert first == second
    assert first.logprobs == (-0.25,) * len(first.ids)
    assert first.stop_reason == "stop"
    assert first.policy_version == 7
    assert first.usage.prompt_tokens == len(asked.ids)
    engine.chat.check(first)
    (body,) = servers[0].requests
    assert body["token_ids"].count(model.chat.image_id) == 2  # one for each image; the server expands them
    assert len(body["content_parts"]) == 2
    assert all(part["url"].startswith("data:image/png;base64,") for part in body["content_parts"])
    sent = body["sampling_params"]
    assert {int(token) for token in sent["logit_bias"]} == set(model.banned_ids)
    assert set(sent["stop_token_ids"]) == model.chat.stop_ids
    assert (sent["top_p"], sent["top_k"], sent["repetition_penalty"]) == (1.0, 0, 1.0)
    assert (sent["temperature"], sent["seed"], sent["n"]) == (0.7, 5, 2)


async def test_another_expansion_of_the_prompt_is_an_error(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers[:1])
    await load(engine, 0, 0.5)
    servers[0].tokens_per_image = 9
    with pytest.raises(PromptMismatch, match=r"made 9 placeholders of 1 images, we 4: it resizes frames"):
        await engine.generate(prompt(model.chat, [frame(1)]), WARM)
    assert len(servers[0].requests) == 1


async def test_a_server_that_resizes_frames_is_never_let_in(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    servers[0].tokens_per_image = 16
    with pytest.raises(EngineError, match="it resizes frames; start it with the --mm-processor-kwargs"):
        await load(make(servers[:1]), 0, 0.5)


async def test_raw_logprobs_are_refused(servers: list[FakeVLLM], make: Make) -> None:
    servers[0].raw = True
    with pytest.raises(EngineError, match=r"not the log-probabilities that it samples from.*--logprobs-mode"):
        await load(make(servers[:1]), 0, 0.5)


async def test_a_refused_request_is_not_sent_elsewhere(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers)
    await load(engine, 0, 0.5)
    for server in servers:
        server.answers = [400]
    with pytest.raises(EngineError, match="400: told to fail with 400"):
        await engine.generate(prompt(model.chat), WARM)
    assert sum(len(server.requests) for server in servers) == 1


async def test_a_prompt_that_does_not_fit_says_so(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers[:1])
    await load(engine, 0, 0.5)
    assert engine.chat.context_limit == 2048  # the server's, which is shorter than the model's
    word = prompt(model.chat).ids[-1:]
    with pytest.raises(EngineError, match="a prompt of 2048 tokens: the servers take 2048"):
        await engine.generate(Prompt(word * 2048, ()), WARM)
    with pytest.raises(EngineError, match="fewer image placeholders than 1 frames have"):
        await engine.generate(Prompt(word, (frame(1),)), WARM)
    assert engine._members[0].ready  # none of this is the server's fault
    await engine.generate(Prompt(word * 2045, ()), WARM)
    assert servers[0].requests[-1]["sampling_params"]["max_tokens"] == 3


def test_placeholders_must_fit_the_frames(model: QwenVL) -> None:
    asked = prompt(model.chat, [frame(1), frame(2)])
    pads = [i for i, token in enumerate(asked.ids) if token == model.chat.image_id]
    assert len(pads) == 2 * IMAGE_TOKENS
    assert collapsed(asked.ids, asked.images, model.chat).count(model.chat.image_id) == 2
    for ids, images in (
        (asked.ids, asked.images[:1]),
        (asked.ids, (*asked.images, frame(3))),
        (asked.ids[: pads[-1]] + asked.ids[pads[-1] + 1 :], asked.images),
        (asked.ids[: pads[-1]], asked.images),
    ):
        with pytest.raises(EngineError, match="placeholders"):
            collapsed(ids, images, model.chat)


def test_data_urls_are_made_once_and_bounded() -> None:
    urls = DataUrls(most=40_000)
    one = urls(frame(1))
    assert urls(frame(1)) is one
    for seed in range(2, 8):
        urls(frame(seed))
    assert urls(frame(1)) is not one
    assert urls(frame(1)) == one
    assert urls._bytes <= 40_000


# ---------------------------------------------------------------------------------------------------- the pool


async def test_a_conversation_stays_where_it_is(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers)
    await load(engine, 0, 0.5)
    for episode in range(6):
        for _ in range(3):
            await engine.generate(prompt(model.chat, [frame(episode)], episode), WARM)
    shown = [{body["content_parts"][0]["url"] for body in server.requests} for server in servers]
    assert sum(len(server.requests) for server in servers) == 18
    assert not shown[0] & shown[1]
    assert all(shown), "all videos went to one server"


async def test_a_group_shares_a_server_until_that_has_its_share(
    model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    engine = make(servers)
    await load(engine, 0, 0.5)
    for episode in range(8):  # one after the other: they all begin with the same frame
        await engine.generate(prompt(model.chat, [frame(1)], episode), WARM)
    assert sorted(len(server.requests) for server in servers) == [0, 8]
    for server in servers:
        server.paused = True
        server.requests.clear()
    asked = [prompt(model.chat, [frame(1)], 100 + episode) for episode in range(16)]
    tasks = [asyncio.ensure_future(engine.generate(each, WARM)) for each in asked]
    await until(lambda: sum(server.running for server in servers) == 16)
    assert sorted(server.running for server in servers) == [4, 12]  # half again as many as the mean
    for server in servers:
        server.paused = False
    await asyncio.gather(*tasks)


async def test_no_server_gets_more_than_its_limit(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers, max_concurrency=3)
    await load(engine, 0, 0.5)
    for server in servers:
        server.paused = True
    asked = [prompt(model.chat, [frame(i)], i) for i in range(24)]
    tasks = [asyncio.ensure_future(engine.generate(each, WARM)) for each in asked]
    await until(lambda: all(server.running == 3 for server in servers))
    await asyncio.sleep(0.1)
    for server in servers:
        server.paused = False
    await asyncio.gather(*tasks)
    assert [server.most_running for server in servers] == [3, 3]
    assert sum(len(server.requests) for server in servers) == 24


@pytest.mark.parametrize("how", ["status", "killed", "hangs"])
async def test_what_a_server_fails_at_goes_to_another_one(
    how: str, model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    """Nothing is lost, and the server that failed gets nothing until it has the weights again."""
    engine = make(servers)
    await load(engine, 3, 0.5)
    victim = servers[0]
    victim.paused = True
    asked = [asyncio.ensure_future(engine.generate(prompt(model.chat, [frame(i)], i), WARM)) for i in range(8)]
    await until(lambda: victim.running > 0)
    if how == "status":
        victim.answers = [500]
        victim.paused = False
    elif how == "killed":
        await asyncio.to_thread(victim.kill)
    else:
        victim.hangs = True
        engine._members[0].server._looks._timeout = 0.2  # type: ignore[union-attr]
    completions = [completion for (completion,) in await asyncio.gather(*asked)]
    assert [completion.policy_version for completion in completions] == [3] * 8
    if how == "killed":
        assert not engine._members[0].ready
        victim.requests.clear()
        await asyncio.to_thread(victim.start)  # with the weights of the checkpoint that it serves
    victim.hangs = False
    await until(lambda: engine._members[0].ready)
    assert victim.label == servers[1].label
    assert victim.weights == 0.5
    if how == "killed":
        assert victim.requests == []


async def test_a_server_that_was_started_anew_behind_our_back_is_noticed(
    model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    engine = make(servers[:1], health_every=60.0)
    await load(engine, 3, 0.5)
    servers[0].born()
    asked = asyncio.ensure_future(engine.generate(prompt(model.chat), WARM))
    # the completion of other weights is thrown away
    await until(lambda: len(servers[0].requests) > 0)
    engine._members[0].task.cancel()  # type: ignore[union-attr]
    engine._members[0].task = asyncio.create_task(engine._attend(engine._members[0]))
    (completion,) = await asked
    assert completion.policy_version == 3
    assert completion.logprobs == (-0.5,) * len(completion.ids)


async def test_without_a_server_a_request_fails_after_a_while(
    model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    engine = make(servers[:1], patience=0.5)
    await load(engine, 0, 0.5)
    await asyncio.to_thread(servers[0].kill)
    with pytest.raises(EngineError, match=r"no server for 0\.5 seconds: http.*cannot be reached"):
        await engine.generate(prompt(model.chat), WARM)
    servers[0].start()


async def test_closing_fails_what_runs(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers[:1])
    await load(engine, 0, 0.5)
    servers[0].delay = 30.0
    asked = asyncio.ensure_future(engine.generate(prompt(model.chat), WARM))
    await until(lambda: servers[0].running > 0)
    await engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await asked


# ---------------------------------------------------------------------------------------------------- weights

SEQUENCE = [
    "pause?mode=wait", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache",
    "reset_encoder_cache", "resume",
]  # fmt: skip


async def test_an_update_is_whole_and_in_order(
    model: QwenVL, servers: list[FakeVLLM], make: Make, tmp_path: Path
) -> None:
    engine = make(servers)
    for version in (4, 5):
        await load(engine, version, version / 10)
        for server in servers:
            assert server.weights == pytest.approx(version / 10)
            assert server.label.endswith(f"-{version}")
    for server in servers:
        assert server.events == ["init_weight_transfer_engine", *SEQUENCE, *SEQUENCE]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # that of the current policy
    assert engine._learner.scored == 2  # type: ignore[attr-defined]  # equal canaries are scored once
    await engine.close()
    assert not list(tmp_path.glob("*.safetensors"))


async def test_requests_wait_for_an_update_that_is_under_way(
    model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    engine = make(servers[:1])
    await load(engine, 1, 0.1)
    servers[0].delay = 0.3
    before = asyncio.ensure_future(engine.generate(prompt(model.chat), WARM))
    await until(lambda: servers[0].running > 0)
    update = asyncio.ensure_future(load(engine, 2, 0.2))
    await asyncio.sleep(0)
    after = asyncio.ensure_future(engine.generate(prompt(model.chat, episode=1), WARM))
    await update
    versions = [(await each)[0].policy_version for each in (before, after)]
    assert versions[1] == 2
    logprobs = [(await each)[0].logprobs[0] for each in (before, after)]  # type: ignore[index]
    assert logprobs[1] == pytest.approx(-0.2)


async def test_an_update_that_fails_once_is_made_again(servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers)
    await load(engine, 1, 0.1)
    servers[0].refuses = 1
    await load(engine, 2, 0.2)
    assert [server.weights for server in servers] == pytest.approx([0.2, 0.2])
    assert all(member.ready for member in engine._members)


async def test_a_server_that_fails_to_update_is_left_out_and_comes_back(
    model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    engine = make(servers)
    await load(engine, 1, 0.1)
    servers[0].refuses = 3
    await load(engine, 2, 0.2)
    assert [member.ready for member in engine._members] == [False, True]
    completions = await asyncio.gather(*(engine.generate(prompt(model.chat, [frame(i)], i), WARM) for i in range(6)))
    assert {completion.policy_version for (completion,) in completions} == {2}
    assert servers[0].requests == []
    await until(lambda: engine._members[0].ready)
    assert servers[0].weights == pytest.approx(0.2)


async def test_a_stale_server_is_found_by_its_canary(model: QwenVL, servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers)
    await load(engine, 1, 0.1)
    servers[1].stale = True
    await load(engine, 2, 0.2)
    assert [member.ready for member in engine._members] == [True, False]
    assert "0.1 from the learner's" in engine._members[1].reason
    assert servers[1].label == servers[0].label  # it says that it is up to date
    await engine.generate(prompt(model.chat), WARM)
    servers[1].stale = False
    await until(lambda: engine._members[1].ready)


async def test_a_run_without_a_right_server_ends(servers: list[FakeVLLM], make: Make) -> None:
    engine = make(servers)
    await load(engine, 1, 0.1)
    for server in servers:
        server.stale = True
    with pytest.raises(EngineError, match=r"no server samples with the learner's weights: http.*0\.1 from the learner"):
        await load(engine, 2, 0.2)


async def test_an_update_waits_for_a_server_while_there_is_none(
    model: QwenVL, servers: list[FakeVLLM], make: Make
) -> None:
    engine = make(servers[:1])
    await load(engine, 1, 0.1)
    await asyncio.to_thread(servers[0].kill)
    update = asyncio.ensure_future(load(engine, 2, 0.2))
    await until(lambda: not engine._members[0].ready)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(servers[0].start)
    await update
    assert servers[0].weights == pytest.approx(0.2)
    await engine.generate(prompt(model.chat), WARM)


async def test_a_server_that_never_was_there_is_waited_for_so_long(servers: list[FakeVLLM], make: Make) -> None:
    await asyncio.to_thread(servers[0].kill)
    engine = make(servers[:1], start_timeout=0.5)
    with pytest.raises(EngineError, match=r"no server took the weights: http.*not healthy after 0\.5 seconds"):
        await load(engine, 1, 0.1)
    servers[0].start()


async def test_several_processes_share_what_the_first_one_moves(
    model: QwenVL, servers: list[FakeVLLM], tmp_path: Path
) -> None:
    meeting = asyncio.Barrier(2) if sys.version_info >= (3, 11) else None
    if meeting is None:
        pytest.skip("asyncio.Barrier is of Python 3.11")
    told: dict[int, Any] = {}

    class Rank(Learner):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.first = rank, rank == 0

        async def gather(self, value: Any) -> list[Any]:
            told[self.rank] = value
            await meeting.wait()
            values = [told[0], told[1]]
            await meeting.wait()
            return values

    transfer = open_transfer("file", directory=tmp_path, address="127.0.0.1", device="cpu")
    config = VLLMConfig(**QUICK)  # type: ignore[arg-type]
    ranks = [Rank(0), Rank(1)]
    engines = [
        VLLMEngine(model.chat, model.banned_ids, ranks[0], transfer, config, [server.url for server in servers]),
        VLLMEngine(model.chat, model.banned_ids, ranks[1], None, config),  # servers of the first one's making
    ]
    try:
        for version, value in ((1, 0.1), (2, 0.2)):
            servers[1].stale = version == 2
            await asyncio.gather(*(load(engine, version, value) for engine in engines))
            assert [rank.scored for rank in ranks] == [1, 1] if version == 1 else [2, 2]
            for engine in engines:
                assert [member.ready for member in engine._members] == [True, version == 1]
                (completion,) = await engine.generate(prompt(model.chat), WARM)
                assert completion.policy_version == version
        servers[1].stale = False
        await until(lambda: all(member.ready for engine in engines for member in engine._members))
        assert [event for event in servers[0].events if event == "update_weights"] == ["update_weights"] * 2
    finally:
        for engine in engines:
            await engine.close()


def test_canaries_may_part_where_two_tokens_are_as_likely() -> None:
    reference = Canary((1, 2, 3, 4), (-0.1, -0.2, -0.7, -0.1))
    assert difference(reference, reference) == 0
    assert difference(Canary((1, 2, 9, 9), (-0.1, -0.2, -0.7001, -5.0)), reference) == pytest.approx(1e-4)
    assert difference(Canary((1, 2, 9, 9), (-0.1, -0.2, -0.2, -5.0)), reference) == pytest.approx(0.5)
    assert difference(Canary((1, 2, 3, 4), (-0.1, -0.2, -0.7, -0.3)), reference) == pytest.approx(0.2)


async def test_gloo_carries_tensors(tmp_path: Path) -> None:
    """The other side here is this process, too: what the worker does with vLLM around it is in `test_vllm_real`."""
    import torch.distributed as dist

    from paravt.engines.vllm.transfer import Policy

    transfer = open_transfer("gloo", directory=tmp_path, address="127.0.0.1", device="cpu")
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.bfloat16)}
    got: dict[str, torch.Tensor] = {}
    group: list[Any] = []

    async def init(told: Any) -> None:
        def join() -> Any:
            store = dist.TCPStore(told["host"], told["port"], told["world_size"], False)
            return dist.ProcessGroupGloo(store, told["rank_offset"], told["world_size"], transfer_patience)

        group.append(await asyncio.to_thread(join))

    async def update(told: Any) -> None:
        def receive() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
                got[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group[0].broadcast([got[name]], options).wait()

        await asyncio.to_thread(receive)

    from paravt.engines.vllm.transfer import _PATIENCE as transfer_patience

    connection = await transfer.connect(1, init)
    await transfer.send(connection, Policy(1, "x-1", weights), update)
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())


def test_nccl_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nccl sends from a GPU, and the model is on cpu; use file or gloo"):
        open_transfer("nccl", directory=tmp_path, address="127.0.0.1", device="cpu")


# ---------------------------------------------------------------------------------------------------- processes

MAIN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", child.pid, flush=True)
open({pids!r}, "a").write(f"{{__import__('os').getpid()}} {{child.pid}}\\n")
if "--fail" in sys.argv:
    raise ValueError("told to fail")
time.sleep(600)
"""


def fake_vllm(directory: Path) -> SpawnConfig:
    package = directory / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(MAIN.format(pids=str(directory / "pids")))
    environment = {"PYTHONPATH": str(directory)}
    return SpawnConfig(sys.executable, ("MODEL",), environment, (), directory / "logs")


def running(directory: Path) -> list[int]:
    """Processes that the fake server consists of, zombies not counted."""
    file = directory / "pids"
    pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [
        pid
        for pid, state in zip(pids, states, strict=True)
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_server_ends_with_all_that_it_started(tmp_path: Path) -> None:
    server = ServerProcess(fake_vllm(tmp_path), 0)
    server.start()
    wait_for(lambda: len(running(tmp_path)) == 2)
    assert server.alive
    server.stop()
    assert not server.alive
    assert running(tmp_path) == []


def test_a_server_does_not_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    fake_vllm(tmp_path)
    code = (
        "import sys, time, pathlib; from paravt.engines.vllm.spawn import ServerProcess, SpawnConfig;"
        f"d = pathlib.Path({str(tmp_path)!r});"
        "ServerProcess(SpawnConfig(sys.executable, ('MODEL',), {'PYTHONPATH': str(d)}, (), d / 'logs'), 0).start();"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    wait_for(lambda: len(running(tmp_path)) == 2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: running(tmp_path) == [])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    config = fake_vllm(tmp_path)
    server = ServerProcess(SpawnConfig(config.python, ("--fail",), config.environment, (), config.logs), 0)
    server.start()
    wait_for(lambda: not server.alive)
    assert "ValueError: told to fail" in server.last_words()
    assert running(tmp_path) == []  # and takes what it started with it
    with pytest.raises(EngineError, match=r"engine\.python: no-such-python: no such program"):
        ServerProcess(SpawnConfig("no-such-python", (), {}, (), tmp_path), 0)


# ---------------------------------------------------------------------------------------------------- recipes


def recipe(**changes: Any) -> RLRecipe:
    return RLRecipe.model_validate({"model": {"kind": "pretrained", "path": "m"}, **changes})


def test_recipes_say_what_cannot_be() -> None:
    assert recipe().engine.kind == "local"
    assert recipe(engine={"kind": "vllm", "servers": ["http://a"]}).engine.kind == "vllm"
    for changes, said in (
        ({"deterministic": True, "engine": {"kind": "vllm"}}, "deterministic runs sample with the local engine"),
        ({"engine": {"kind": "vllm", "servers": ["http://a"], "replicas": 2}}, "are for servers: spawn"),
        ({"engine": {"kind": "vllm", "servers": []}}, "at least 1"),
        ({"engine": {"kind": "vllm", "replicas": 2, "devices": ["0"]}}, "devices: 1 for 2 replicas"),
        ({"engine": {"kind": "remote"}}, "'local', 'vllm'"),
    ):
        with pytest.raises(ValueError, match=said):
            recipe(**changes)


def test_a_mismatch_ends_the_run_with_the_reason() -> None:
    means = {"mismatch": 1.2, "mismatch_max": 9.0, "truncated": 0.25}
    with pytest.raises(EngineError, match=r"step 3: .* 1\.2 > 1 .*at most 9, weights truncated at 25\.0%"):
        check_mismatch(WatchConfig(), 3, means)
    check_mismatch(WatchConfig(stop_mismatch=-1), 3, means)
    check_mismatch(WatchConfig(), 3, {**means, "mismatch": 0.9})


def test_a_run_whose_servers_disagree_ends_before_a_checkpoint(tmp_path: Path) -> None:
    """The whole loop on a server; what it samples has nothing to do with the learner."""
    server = FakeVLLM(load_model(shipped_model()).chat, 1)
    server.start()
    try:
        engine = {"kind": "vllm", "servers": [server.url], "canary_tolerance": 1e9}
        changes = (*SMALL, "deterministic=false", f"engine={json.dumps(engine)}", "reward.functions=[test_rl:uneven]")
        base = BASE / "full.yaml"
        with pytest.raises(EngineError, match="step 1: sampler and learner disagree"):
            train_rl(load_recipe(RLRecipe, base, changes), tmp_path / "ended", Console(quiet=True))
        assert not (tmp_path / "ended" / "checkpoints").exists()
        on = load_recipe(RLRecipe, base, (*changes, "watch.stop_mismatch=-1", "steps=2"))
        train_rl(on, tmp_path / "on", Console(quiet=True))
    finally:
        server.kill()
    rows = metrics(tmp_path / "on")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["unscored"] == 0
        assert row["token/mismatch_max"] >= row["token/mismatch"] > 1
        assert row["token/truncated"] == 1.0  # the learner finds every token much likelier than the server did
        assert row["staleness/max"] == 0
    assert server.events.count("update_weights") == 1 + 3  # at the start, and after every step that was not refused


def test_the_lab_samples_reinforcement_learning_from_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(suite, "run_stages", lambda plan, stages, jobs, console: planned.append((plan, jobs)) or {})
    monkeypatch.setattr(suite, "write_report", lambda out: None)
    command = ["lab", "run", "--only", "vanilla", "--seeds", "1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--engine", "vllm", "--vllm-url", "http://a:1"])
    ((plan, jobs),) = planned
    recipes = {stage.kind: stage.recipe for stage in plan.stages.values()}
    assert recipes["rl"].engine.servers == ("http://a:1",)
    assert not recipes["rl"].deterministic
    assert jobs == 1  # two runs at one server would sample with each other's weights
    for options in (["--engine", "vllm"], ["--vllm-url", "http://a:1"], ["--vllm-python", "p"]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, *options])
    assert "needs --vllm-python or --vllm-url" in " ".join(capsys.readouterr().err.split())
