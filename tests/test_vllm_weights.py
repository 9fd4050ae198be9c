"""What the vLLM engine promises of weights, against servers with vLLM's endpoints over real sockets.

Locked here: an update is whole, in order and made again; a server that fails at it or samples with stale weights is
found, left out and brought back; several processes share what the first one moves; a run ends where sampler and learner
disagree.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from test_rl import BASE, SMALL, metrics
from vllm_server import QUICK, WARM, FakeVLLM, Learner, Make, frame, load, paired_ranks, prompt, until

from paravt.ask import shipped_model
from paravt.cli import main
from paravt.config import RLRecipe, load_recipe
from paravt.engines.vllm import VLLMConfig, VLLMEngine, open_transfer
from paravt.engines.vllm.canary import Canary, difference
from paravt.engines.vllm.transfer import _PATIENCE, Policy
from paravt.errors import EngineError, RecipeError
from paravt.lab import suite
from paravt.lab.factory import train_rl
from paravt.models import QwenVL, load_model
from paravt.run_engine import open_vllm
from paravt.watch import WatchConfig, check_mismatch

SEQUENCE = [
    "pause?mode=wait", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache",
    "reset_encoder_cache", "resume",
]  # fmt: skip


async def test_an_update_is_whole_and_in_order(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make, tmp_path: Path
) -> None:
    engine = make_engine(fakes)
    for version in (4, 5):
        await load(engine, version, version / 10)
        for server in fakes:
            assert server.weights == pytest.approx(version / 10)
            assert server.label.endswith(f"-{version}")
    for server in fakes:
        assert server.events == ["init_weight_transfer_engine", *SEQUENCE, *SEQUENCE]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1  # that of the current policy
    assert engine._learner.scored == 2  # type: ignore[attr-defined]  # equal canaries are scored once
    await engine.close()
    assert not list(tmp_path.glob("*.safetensors"))


async def test_requests_wait_for_an_update_that_is_under_way(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes[:1])
    await load(engine, 1, 0.1)
    fakes[0].delay = 0.3
    before = asyncio.ensure_future(engine.generate(prompt(vllm_model.chat), WARM))
    await until(lambda: fakes[0].running > 0)
    update = asyncio.ensure_future(load(engine, 2, 0.2))
    await asyncio.sleep(0)
    after = asyncio.ensure_future(engine.generate(prompt(vllm_model.chat, episode=1), WARM))
    await update
    versions = [(await each)[0].policy_version for each in (before, after)]
    assert versions[1] == 2
    logprobs = [(await each)[0].logprobs[0] for each in (before, after)]  # type: ignore[index]
    assert logprobs[1] == pytest.approx(-0.2)


async def test_an_update_that_fails_once_is_made_again(fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes)
    await load(engine, 1, 0.1)
    fakes[0].refuses = 1
    await load(engine, 2, 0.2)
    assert [server.weights for server in fakes] == pytest.approx([0.2, 0.2])
    assert all(member.ready for member in engine._members)


async def test_a_server_that_fails_to_update_is_left_out_and_comes_back(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes)
    await load(engine, 1, 0.1)
    fakes[0].refuses = 3
    await load(engine, 2, 0.2)
    assert [member.ready for member in engine._members] == [False, True]
    completions = await asyncio.gather(
        *(engine.generate(prompt(vllm_model.chat, [frame(i)], i), WARM) for i in range(6))
    )
    assert {completion.policy_version for (completion,) in completions} == {2}
    assert fakes[0].requests == []
    await until(lambda: engine._members[0].ready)
    assert fakes[0].weights == pytest.approx(0.2)


async def test_a_server_that_comes_back_while_the_weights_are_replaced_gets_the_newer_ones(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(fakes)
    await load(engine, 1, 0.1)
    await asyncio.to_thread(fakes[0].kill)
    await until(lambda: not engine._members[0].ready)
    fakes[0].events.clear()
    fakes[0].slow = True
    await asyncio.to_thread(fakes[0].start)
    await until(lambda: "start_weight_update" in fakes[0].events)
    await load(engine, 2, 0.2)  # the file of the first weights is gone now
    assert [member.ready for member in engine._members] == [False, True]
    fakes[0].slow = False
    await until(lambda: engine._members[0].ready)
    assert fakes[0].weights == pytest.approx(0.2)
    assert "once more, with newer weights" in caplog.text


async def test_a_bug_in_the_care_for_a_server_is_not_swallowed(
    vllm_model: QwenVL, fakes: list[FakeVLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = open_transfer("file", directory=tmp_path, address="127.0.0.1", device="cpu")
    config = VLLMConfig(**QUICK)  # type: ignore[arg-type]
    engine = VLLMEngine(vllm_model.chat, vllm_model.banned_ids, Learner(), transfer, config, [fakes[0].url])
    await load(engine, 1, 0.1)

    async def broken() -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(engine._members[0].server, "healthy", broken)
    care = engine._members[0].task
    assert care is not None
    await until(care.done)
    with pytest.raises(ValueError, match="a bug"):
        await engine.close()
    assert not list(tmp_path.glob("*.safetensors"))  # all else is done first


async def test_a_stale_server_is_found_by_its_canary(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes)
    await load(engine, 1, 0.1)
    fakes[1].stale = True
    await load(engine, 2, 0.2)
    assert [member.ready for member in engine._members] == [True, False]
    assert "0.1 from the learner's" in engine._members[1].reason
    assert fakes[1].label == fakes[0].label  # it says that it is up to date
    await engine.generate(prompt(vllm_model.chat), WARM)
    fakes[1].stale = False
    await until(lambda: engine._members[1].ready)


async def test_a_server_that_nobody_looks_after_is_a_bug_that_is_shown(
    fakes: list[FakeVLLM], make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(fakes)
    await load(engine, 1, 0.1)

    async def broken() -> bool:
        raise KeyError("a bug")

    monkeypatch.setattr(engine._members[0].server, "healthy", broken)
    await until(lambda: engine._members[0].task.done())  # type: ignore[union-attr]
    with pytest.raises(KeyError, match="a bug"):
        await load(engine, 2, 0.2)


async def test_a_run_without_a_right_server_ends(fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes)
    await load(engine, 1, 0.1)
    for server in fakes:
        server.stale = True
    with pytest.raises(EngineError, match=r"no server samples with the learner's weights: http.*0\.1 from the learner"):
        await load(engine, 2, 0.2)


async def test_an_update_waits_for_a_server_while_there_is_none(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes[:1])
    await load(engine, 1, 0.1)
    await asyncio.to_thread(fakes[0].kill)
    update = asyncio.ensure_future(load(engine, 2, 0.2))
    await until(lambda: not engine._members[0].ready)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(fakes[0].start)
    await update
    assert fakes[0].weights == pytest.approx(0.2)
    await engine.generate(prompt(vllm_model.chat), WARM)


async def test_a_server_that_never_was_there_is_waited_for_so_long(fakes: list[FakeVLLM], make_engine: Make) -> None:
    await asyncio.to_thread(fakes[0].kill)
    engine = make_engine(fakes[:1], start_timeout=0.5)
    with pytest.raises(EngineError, match=r"no server took the weights: http.*not healthy after 0\.5 seconds"):
        await load(engine, 1, 0.1)
    fakes[0].start()


class Moving:
    """A spawned server that is somewhere else when it has been asked for a while."""

    alive = True

    def __init__(self, later: str) -> None:
        self.later, self.asked = later, 0

    @property
    def url(self) -> str:
        self.asked += 1
        return "http://127.0.0.1:9" if self.asked < 4 else self.later

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def last_words(self) -> str:
        return ""


async def test_a_server_that_moves_while_it_is_waited_for_is_found(
    vllm_model: QwenVL, fakes: list[FakeVLLM], tmp_path: Path
) -> None:
    transfer = open_transfer("file", directory=tmp_path, address="127.0.0.1", device="cpu")
    config = VLLMConfig(**(QUICK | dict(start_timeout=600.0, patience=600.0)))  # type: ignore[arg-type]
    moving = Moving(fakes[0].url)
    engine = VLLMEngine(vllm_model.chat, vllm_model.banned_ids, Learner(), transfer, config, processes=[moving])
    try:
        with anyio.fail_after(60):
            await load(engine, 1, 0.1)
        assert engine._members[0].url == fakes[0].url
        assert engine._members[0].ready
    finally:
        await engine.close()


async def test_several_processes_share_what_the_first_one_moves(
    vllm_model: QwenVL, fakes: list[FakeVLLM], tmp_path: Path
) -> None:
    transfer = open_transfer("file", directory=tmp_path, address="127.0.0.1", device="cpu")
    config = VLLMConfig(**QUICK)  # type: ignore[arg-type]
    ranks = paired_ranks()
    engines = [
        VLLMEngine(
            vllm_model.chat, vllm_model.banned_ids, ranks[0], transfer, config, [server.url for server in fakes]
        ),
        VLLMEngine(vllm_model.chat, vllm_model.banned_ids, ranks[1], None, config),  # servers of the first one's making
    ]
    try:
        for version, value in ((1, 0.1), (2, 0.2)):
            fakes[1].stale = version == 2
            await asyncio.gather(*(load(engine, version, value) for engine in engines))
            assert [rank.scored for rank in ranks] == [1, 1] if version == 1 else [2, 2]
            for engine in engines:
                assert [member.ready for member in engine._members] == [True, version == 1]
                (completion,) = await engine.generate(prompt(vllm_model.chat), WARM)
                assert completion.policy_version == version
        fakes[1].stale = False
        await until(lambda: all(member.ready for engine in engines for member in engine._members))
        assert [event for event in fakes[0].events if event == "update_weights"] == ["update_weights"] * 2
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
    transfer = open_transfer("gloo", directory=tmp_path, address="127.0.0.1", device="cpu")
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.bfloat16)}
    got: dict[str, torch.Tensor] = {}
    group: list[Any] = []

    async def init(told: Any) -> None:
        def join() -> Any:
            store = dist.TCPStore(told["host"], told["port"], told["world_size"], False)
            return dist.ProcessGroupGloo(store, told["rank_offset"], told["world_size"], _PATIENCE)

        group.append(await asyncio.to_thread(join))

    async def update(told: Any) -> None:
        def receive() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
                got[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group[0].broadcast([got[name]], options).wait()

        await asyncio.to_thread(receive)

    connection = await transfer.connect(1, init)
    await transfer.send(connection, Policy(1, "x-1", weights), update)
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("address", ["no-such-host.invalid", "198.51.100.7"])
async def test_a_wrong_address_for_gloo_holds_up_nobody(address: str, tmp_path: Path) -> None:
    """Nobody can be reached there: the server's side finds out, while all the rest goes on."""
    transfer = open_transfer("gloo", directory=tmp_path, address=address, device="cpu")

    async def init(told: Any) -> None:
        raise EngineError(f"the server cannot reach {told['host']}")

    with pytest.raises(EngineError, match=f"cannot reach {address}|engine.address: {address}: cannot listen there"):
        with anyio.fail_after(30):
            await transfer.connect(1, init)


def test_nccl_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nccl sends from a GPU, and the model is on cpu; use file or gloo"):
        open_transfer("nccl", directory=tmp_path, address="127.0.0.1", device="cpu")


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
        ({"engine": {"kind": "vllm", "servers": ["http://a", "http://b", "http://a/"]}}, "an address is there twice"),
        ({"engine": {"kind": "vllm", "devices": [""]}}, "an entry names no GPU"),
        ({"engine": {"kind": "vllm", "replicas": 2, "devices": ["0,1", "1,2"]}}, "a GPU is there twice"),
        ({"engine": {"kind": "vllm", "transfer": "nccl"}}, "nccl is between GPUs; give devices"),
        ({"engine": {"kind": "vllm", "environment": {"A=B": "1"}}}, "environment: a name"),
        ({"engine": {"kind": "remote"}}, "'local', 'vllm'"),
    ):
        with pytest.raises(ValueError, match=said):
            recipe(**changes)


def test_servers_that_share_a_gpu_say_how() -> None:
    shared = {"replicas": 2, "devices": ["0", "0"], "arguments": ["--gpu-memory-utilization", "0.4"]}
    assert recipe(engine={"kind": "vllm", **shared}).engine.kind == "vllm"


def test_servers_are_not_spawned_for_several_machines(tmp_path: Path) -> None:
    """They listen on one, and the processes of the others would ask their own."""
    spawning = recipe(engine={"kind": "vllm"})
    model = load_model(shipped_model())
    ranks = SimpleNamespace(first=True, size=4, size_here=2)
    learner = SimpleNamespace(config=SimpleNamespace(param_dtype=None))
    with pytest.raises(RecipeError, match="spawn is for one machine"):
        open_vllm(spawning, spawning.engine, model, tmp_path, ranks, learner)  # type: ignore[arg-type]


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
