"""The local engine with many requests at once, with new weights, and with requests and models that fail: a request that
goes wrong, or away, harms no other."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_local_engine import T0, check, frame, fresh_model, prompt

from paravt.engines.base import Prompt, Sampling
from paravt.engines.local import LocalEngine
from paravt.engines.requests import Request
from paravt.errors import EngineError
from paravt.models import QwenVL
from paravt.types import Frame


@pytest.fixture(scope="module")
def model() -> QwenVL:
    return fresh_model()


# ---------------------------------------------------------------------- many requests at once


async def until(condition: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.002)


@pytest.fixture
def endless(model: QwenVL, monkeypatch: pytest.MonkeyPatch) -> QwenVL:
    """The model, but it never stops by itself."""
    stops = sorted(model.chat.stop_ids)
    monkeypatch.setattr(type(model), "banned_ids", property(lambda self: [*sorted(self.chat.vision_ids), *stops]))
    return model


async def test_a_request_joins_while_another_decodes(endless: QwenVL) -> None:
    model = endless
    long, short = prompt(model, frames=[frame(1)]), prompt(model, "320?", [frame(2), frame(3)])
    async with LocalEngine(model) as engine:
        first = asyncio.create_task(engine.generate(long, Sampling(400)))
        await until(lambda: engine.stats.passes > 5)
        (second,) = await engine.generate(short, Sampling(5))
        assert not first.done()
        (done,) = await first
        assert len(done.ids) == 400
        # the short one cost one prefill, and no step of its own
        assert engine.stats.passes == 2 + 400
    check(model, short, second)
    check(model, long, done)


async def test_cancellation_frees_the_slots(endless: QwenVL) -> None:
    model = endless
    async with LocalEngine(model, max_batch=3) as engine:
        stays = asyncio.create_task(engine.generate(prompt(model, "320"), Sampling(300)))
        await until(lambda: engine._active)
        goes = asyncio.create_task(engine.generate(prompt(model), Sampling(20_000, 1.0), 5))
        await until(lambda: len(engine._active) == 3)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        (late,) = await engine.generate(prompt(model, "what?"), Sampling(4))
        assert not stays.done()
        assert len(engine._active) <= 2
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.generate(prompt(model), Sampling(20_000)), 0.1)
        (kept,) = await stays
        await until(lambda: not engine._active)
    check(model, prompt(model, "what?"), late)
    check(model, prompt(model, "320"), kept)


async def test_the_event_loop_is_never_blocked(endless: QwenVL) -> None:
    async with LocalEngine(endless) as engine:
        task = asyncio.create_task(engine.generate(prompt(endless, frames=[frame(1)]), Sampling(200)))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
    assert ticks > 20


def test_several_event_loops(model: QwenVL) -> None:
    engine = LocalEngine(model)
    a, b = (asyncio.run(engine.generate(prompt(model), T0)) for _ in range(2))
    assert a[0].ids == b[0].ids
    asyncio.run(engine.close())


# ---------------------------------------------------------------------- policies


async def test_load_policy_replaces_weights_version_and_cache() -> None:
    model, other = fresh_model(0), fresh_model(1)
    asked = prompt(model, frames=[frame(1)])
    weights = {k: v.clone() for k, v in other.module.state_dict().items() if k != "lm_head.weight"}  # tied: as saved
    async with LocalEngine(model, policy_version=3) as engine:
        (before,) = await engine.generate(asked, T0)
        await engine.load_policy(4, weights)
        assert engine._store.bytes == 0
        (after,) = await engine.generate(asked, T0)
        check(other, asked, after)
        assert (before.policy_version, after.policy_version) == (3, 4)
        assert before.ids != after.ids
        assert after.usage.cached_tokens == 0
        name = "model.language_model.norm.weight"
        for bad in (
            {k: v for k, v in weights.items() if k != name},
            {**weights, "extra": torch.zeros(1)},
            {**weights, name: torch.zeros(3)},
        ):
            with pytest.raises(EngineError, match="policy 5"):
                await engine.load_policy(5, bad)
        (same,) = await engine.generate(asked, T0)
        assert (same.ids, same.policy_version) == (after.ids, 4)


async def test_load_policy_waits_and_is_waited_for(endless: QwenVL) -> None:
    model = endless
    asked = prompt(model)
    async with LocalEngine(model, max_batch=2) as engine:
        before = [asyncio.create_task(engine.generate(asked, Sampling(60, 1.0, seed=i), 3)) for i in range(2)]
        update = asyncio.create_task(engine.load_policy(1, model.module.state_dict()))
        await asyncio.sleep(0)
        after = asyncio.create_task(engine.generate(asked, Sampling(3)))
        await update
        assert all(task.done() for task in before)
        assert {c.policy_version for task in before for c in task.result()} == {0}
        assert (await after)[0].policy_version == 1


async def test_the_model_is_in_eval_mode_while_it_generates(model: QwenVL) -> None:
    model.module.train()
    async with LocalEngine(model) as engine:
        await engine.generate(prompt(model), T0)
    assert not model.module.training


# ---------------------------------------------------------------------- failures


async def test_prompts_that_cannot_be_taken(model: QwenVL, monkeypatch: pytest.MonkeyPatch) -> None:
    good = prompt(model, frames=[frame(1)])
    image = model.chat.image_id
    broken = Frame(0.0, np.zeros((33, 32, 3), np.uint8), "odd")
    bad = [
        Prompt((), ()),
        Prompt((*good.ids, 10**6), good.images),
        Prompt(good.ids, ()),
        Prompt(good.ids, (*good.images, frame(2))),
        Prompt(good.ids, (broken,)),
        Prompt((*good.ids, image), (*good.images, frame(2))),
        Prompt((1, image, 2, image, image, image, 3), (frame(1, 64, 64),)),
    ]
    monkeypatch.setattr(model.module.config.text_config, "max_position_embeddings", len(good.ids))
    bad.append(Prompt((*good.ids, good.ids[-1]), good.images))
    async with LocalEngine(model) as engine:
        for asked in bad:
            with pytest.raises(EngineError) as caught:
                await engine.generate(asked, T0)
            assert "\n" not in str(caught.value)
        (done,) = await engine.generate(good, T0)  # fits exactly: one token can be sampled
        assert (len(done.ids), done.stop_reason) == (1, "length")
        with pytest.raises(ValueError, match="n must be"):
            await engine.generate(good, T0, 0)
        assert engine.stats.passes == 2


async def test_a_failing_model_fails_its_requests_and_the_engine_goes_on(
    endless: QwenVL, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless
    encode = QwenVL.encode_images

    def out_of_memory(self: QwenVL, frames: Sequence[Frame]) -> object:
        if any(f.key.startswith("66/") for f in frames):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 TiB")
        return encode(self, frames)

    monkeypatch.setattr(QwenVL, "encode_images", out_of_memory)
    async with LocalEngine(model) as engine:
        runs = asyncio.create_task(engine.generate(prompt(model), Sampling(100)))
        await until(lambda: engine._active)
        with pytest.raises(EngineError, match=r"CUDA out of memory\.$"):
            await engine.generate(prompt(model, frames=[frame(66)]), T0, 3)
        assert len((await runs)[0].ids) == 100
        norm = model.module.model.language_model.norm.weight
        with torch.no_grad():
            kept = norm.clone()
            norm[0] = torch.nan
        with pytest.raises(EngineError, match="not numbers"):
            await engine.generate(prompt(model), T0)
        with torch.no_grad():
            norm.copy_(kept)
        (done,) = await engine.generate(prompt(model), T0)
    check(model, prompt(model), done)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(LocalEngine, "_prefill"), (LocalEngine, "_step"), (LocalEngine, "_apply"), (Request, "sequences")],
)
async def test_a_dying_worker_fails_its_callers(
    model: QwenVL, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("threading.excepthook", lambda _: None)
    monkeypatch.setattr(owner, name, bug)
    engine = LocalEngine(model, max_batch=2)
    calls = engine.submit([(prompt(model, "what " * i), T0, 3) for i in range(3)])  # more than run at once
    jobs = [
        *calls,
        asyncio.ensure_future(engine.load_policy(1, None)),
        asyncio.ensure_future(engine.generate(prompt(model), T0)),
    ]
    results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 20)
    failed = [str(result) for result in results if isinstance(result, EngineError)]
    if name == "_apply":  # after the requests before it
        assert [isinstance(result, list) for result in results] == [True, True, True, False, False]
    else:
        assert len(failed) == len(jobs)
    assert all("died" in message or "closed" in message for message in failed)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(model), T0)
    await engine.close()


async def test_weights_that_are_none_are_refused_and_the_engine_goes_on(
    model: QwenVL, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = model.module.state_dict()
    async with LocalEngine(model) as engine:
        for convert in (np.asarray, torch.Tensor.tolist):
            weights = {name: convert(weight) for name, weight in state.items()}
            with pytest.raises(EngineError, match=r"^weights of policy 1 are no tensors at .*\(\d+ in all\)$"):
                await asyncio.wait_for(engine.load_policy(1, weights), 20)

        def out_of_memory(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 TiB")

        with monkeypatch.context() as patch:
            patch.setattr(type(model.module), "load_state_dict", out_of_memory)
            with pytest.raises(EngineError, match=r"the model failed: CUDA out of memory\.$"):
                await asyncio.wait_for(engine.load_policy(1, state), 20)
        (done,) = await engine.generate(prompt(model), T0)
    assert done.policy_version == 0
    check(model, prompt(model), done)


async def test_close_fails_what_runs_and_what_comes(endless: QwenVL) -> None:
    engine = LocalEngine(endless, max_batch=2)
    runs = asyncio.create_task(engine.generate(prompt(endless), Sampling(20_000), 5))
    await until(lambda: engine._active)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await runs
    for call in (engine.generate(prompt(endless), T0), engine.load_policy(1, {})):
        with pytest.raises(EngineError, match="closed"):
            await call
    await engine.close()


async def test_load(model: QwenVL, tmp_path: object) -> None:
    model.save(str(tmp_path))
    asked = prompt(model, frames=[frame(1)])
    async with LocalEngine.load(str(tmp_path), max_batch=4) as engine:
        (done,) = await engine.generate(asked, T0)
    check(model, asked, done)
