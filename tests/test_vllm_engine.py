"""What the vLLM engine promises of requests, against a server with vLLM's endpoints over real sockets.

Locked here: an image is never another one in silence; a conversation stays at its server, and no server gets more than
its share or its limit; a failed server costs a second try, and gets no request until it has the current weights again;
no completion is of other weights than its version says. `test_vllm_real` says the same of vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.responses import Response
from vllm_server import IMAGE_TOKENS, WARM, FakeVLLM, Make, frame, load, prompt, until

from paravt.engines.base import Prompt
from paravt.engines.vllm.wire import DataUrls, PromptMismatch, collapsed
from paravt.errors import EngineError
from paravt.models import QwenVL

# ---------------------------------------------------------------------------------------------------- one request


async def test_token_ids_go_in_and_come_out(vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes[:1])
    await load(engine, 7, 0.25)
    asked = prompt(vllm_model.chat, [frame(1), frame(2)])
    first, second = await engine.generate(asked, WARM, n=2)
    assert first == second
    assert first.logprobs == (-0.25,) * len(first.ids)
    assert first.stop_reason == "stop"
    assert first.policy_version == 7
    assert first.usage.prompt_tokens == len(asked.ids)
    engine.chat.check(first)
    (body,) = fakes[0].requests
    assert body["token_ids"].count(vllm_model.chat.image_id) == 2  # one for each image; the server expands them
    assert len(body["content_parts"]) == 2
    assert all(part["url"].startswith("data:image/png;base64,") for part in body["content_parts"])
    sent = body["sampling_params"]
    assert {int(token) for token in sent["logit_bias"]} == set(vllm_model.banned_ids)
    assert set(sent["stop_token_ids"]) == vllm_model.chat.stop_ids
    assert (sent["top_p"], sent["top_k"], sent["repetition_penalty"]) == (1.0, 0, 1.0)
    assert (sent["temperature"], sent["seed"], sent["n"]) == (0.7, 5, 2)


async def test_another_expansion_of_the_prompt_is_an_error(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes[:1])
    await load(engine, 0, 0.5)
    fakes[0].tokens_per_image = 9
    with pytest.raises(PromptMismatch, match=r"made 9 placeholders of 1 images, we 4: it resizes frames"):
        await engine.generate(prompt(vllm_model.chat, [frame(1)]), WARM)
    assert len(fakes[0].requests) == 1


async def test_a_server_that_resizes_frames_is_never_let_in(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    fakes[0].tokens_per_image = 16
    with pytest.raises(EngineError, match="it resizes frames; start it with the --mm-processor-kwargs"):
        await load(make_engine(fakes[:1]), 0, 0.5)


async def test_raw_logprobs_are_refused(fakes: list[FakeVLLM], make_engine: Make) -> None:
    fakes[0].raw = True
    with pytest.raises(EngineError, match=r"not the log-probabilities that it samples from.*--logprobs-mode"):
        await load(make_engine(fakes[:1]), 0, 0.5)


async def test_a_refused_request_is_not_sent_elsewhere(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes)
    await load(engine, 0, 0.5)
    for server in fakes:
        server.answers = [400]
    with pytest.raises(EngineError, match="400: told to fail with 400"):
        await engine.generate(prompt(vllm_model.chat), WARM)
    assert sum(len(server.requests) for server in fakes) == 1


async def test_a_prompt_that_does_not_fit_says_so(vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes[:1])
    await load(engine, 0, 0.5)
    assert engine.chat.context_limit == 2048  # the server's, which is shorter than the model's
    word = prompt(vllm_model.chat).ids[-1:]
    with pytest.raises(EngineError, match="a prompt of 2048 tokens: the servers take 2048"):
        await engine.generate(Prompt(word * 2048, ()), WARM)
    with pytest.raises(EngineError, match="fewer image placeholders than 1 frames have"):
        await engine.generate(Prompt(word, (frame(1),)), WARM)
    assert engine._members[0].ready  # none of this is the server's fault
    await engine.generate(Prompt(word * 2045, ()), WARM)
    assert fakes[0].requests[-1]["sampling_params"]["max_tokens"] == 3


def test_placeholders_must_fit_the_frames(vllm_model: QwenVL) -> None:
    asked = prompt(vllm_model.chat, [frame(1), frame(2)])
    pads = [i for i, token in enumerate(asked.ids) if token == vllm_model.chat.image_id]
    assert len(pads) == 2 * IMAGE_TOKENS
    assert collapsed(asked.ids, asked.images, vllm_model.chat).count(vllm_model.chat.image_id) == 2
    for ids, images in (
        (asked.ids, asked.images[:1]),
        (asked.ids, (*asked.images, frame(3))),
        (asked.ids[: pads[-1]] + asked.ids[pads[-1] + 1 :], asked.images),
        (asked.ids[: pads[-1]], asked.images),
    ):
        with pytest.raises(EngineError, match="placeholders"):
            collapsed(ids, images, vllm_model.chat)


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


async def test_a_conversation_stays_where_it_is(vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes)
    await load(engine, 0, 0.5)
    for episode in range(6):
        for _ in range(3):
            await engine.generate(prompt(vllm_model.chat, [frame(episode)], episode), WARM)
    shown = [{body["content_parts"][0]["url"] for body in server.requests} for server in fakes]
    assert sum(len(server.requests) for server in fakes) == 18
    assert not shown[0] & shown[1]
    assert all(shown), "all videos went to one server"


async def test_a_group_shares_a_server_until_that_has_its_share(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes)
    await load(engine, 0, 0.5)
    for episode in range(8):  # one after the other: they all begin with the same frame
        await engine.generate(prompt(vllm_model.chat, [frame(1)], episode), WARM)
    assert sorted(len(server.requests) for server in fakes) == [0, 8]
    for server in fakes:
        server.paused = True
        server.requests.clear()
    asked = [prompt(vllm_model.chat, [frame(1)], 100 + episode) for episode in range(16)]
    tasks = [asyncio.ensure_future(engine.generate(each, WARM)) for each in asked]
    await until(lambda: sum(server.running for server in fakes) == 16)
    assert sorted(server.running for server in fakes) == [4, 12]  # half again as many as the mean
    for server in fakes:
        server.paused = False
    await asyncio.gather(*tasks)


async def test_no_server_gets_more_than_its_limit(vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes, max_concurrency=3)
    await load(engine, 0, 0.5)
    for server in fakes:
        server.paused = True
    asked = [prompt(vllm_model.chat, [frame(i)], i) for i in range(24)]
    tasks = [asyncio.ensure_future(engine.generate(each, WARM)) for each in asked]
    await until(lambda: all(server.running == 3 for server in fakes))
    await asyncio.sleep(0.1)
    for server in fakes:
        server.paused = False
    await asyncio.gather(*tasks)
    assert [server.most_running for server in fakes] == [3, 3]
    assert sum(len(server.requests) for server in fakes) == 24


@pytest.mark.parametrize("how", ["status", "killed", "hangs"])
async def test_what_a_server_fails_at_goes_to_another_one(
    how: str, vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    """Nothing is lost, and the server that failed gets nothing until it has the weights again."""
    engine = make_engine(fakes)
    await load(engine, 3, 0.5)
    victim = fakes[0]
    victim.paused = True
    asked = [asyncio.ensure_future(engine.generate(prompt(vllm_model.chat, [frame(i)], i), WARM)) for i in range(8)]
    await until(lambda: victim.running > 0)
    if how == "status":
        victim.answers = [500]
        victim.paused = False
    elif how == "killed":
        await asyncio.to_thread(victim.kill)
    else:
        victim.hangs = True
        engine._members[0].server._looks._timeout = 0.2
    completions = [completion for (completion,) in await asyncio.gather(*asked)]
    assert [completion.policy_version for completion in completions] == [3] * 8
    if how == "killed":
        assert not engine._members[0].ready
        victim.requests.clear()
        await asyncio.to_thread(victim.start)  # with the weights of the checkpoint that it serves
    victim.hangs = False
    await until(lambda: engine._members[0].ready)
    assert victim.label == fakes[1].label
    assert victim.weights == 0.5
    if how == "killed":
        assert victim.requests == []


async def test_a_server_that_was_started_anew_behind_our_back_is_noticed(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes[:1], health_every=60.0)
    await load(engine, 3, 0.5)
    fakes[0].born()
    asked = asyncio.ensure_future(engine.generate(prompt(vllm_model.chat), WARM))
    # the completion of other weights is thrown away
    await until(lambda: len(fakes[0].requests) > 0)
    engine._members[0].task.cancel()  # type: ignore[union-attr]
    engine._members[0].task = asyncio.create_task(engine._attend(engine._members[0]))
    (completion,) = await asked
    assert completion.policy_version == 3
    assert completion.logprobs == (-0.5,) * len(completion.ids)


async def test_without_a_server_a_request_fails_after_a_while(
    vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make
) -> None:
    engine = make_engine(fakes[:1], patience=0.5)
    await load(engine, 0, 0.5)
    await asyncio.to_thread(fakes[0].kill)
    with pytest.raises(EngineError, match=r"no server for 0\.5 seconds: http.*cannot be reached"):
        await engine.generate(prompt(vllm_model.chat), WARM)
    fakes[0].start()


async def test_closing_fails_what_runs(vllm_model: QwenVL, fakes: list[FakeVLLM], make_engine: Make) -> None:
    engine = make_engine(fakes[:1])
    await load(engine, 0, 0.5)
    fakes[0].delay = 30.0
    asked = asyncio.ensure_future(engine.generate(prompt(vllm_model.chat), WARM))
    await until(lambda: fakes[0].running > 0)
    await engine.close()
    with pytest.raises(EngineError, match="the engine was closed"):
        await asked


# ---------------------------------------------------------------------------------------------------- odd servers


def odd(change: Callable[[dict[str, Any]], object], also_canary: bool) -> type[FakeVLLM]:
    """A server whose rollouts, or all of whose answers, have something else in a choice."""

    class Odd(FakeVLLM):
        async def generate(self, body: dict[str, Any]) -> Any:
            answer = await super().generate(body)
            settings = body["sampling_params"]
            if isinstance(answer, dict) and settings["max_tokens"] > 1 and (also_canary or settings["temperature"] > 0):
                change(answer["choices"][0])
            return Response(json.dumps(answer), media_type="application/json")

    return Odd


def says(logprob: object) -> Callable[[dict[str, Any]], object]:
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=logprob)


def samples(token: object) -> Callable[[dict[str, Any]], object]:
    def change(choice: dict[str, Any]) -> None:
        choice["token_ids"] = [token, *choice["token_ids"][1:]]
        choice["logprobs"]["content"][0]["token_id"] = token

    return change


@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (says(math.nan), "a log-probability is 'NaN'"),
        (says(math.inf), "a log-probability is 'Infinity'"),
        (says(-math.inf), "a log-probability is '-Infinity'"),
        (says(-(10**400)), "a log-probability is '-1000"),
        (says(True), "a log-probability is 'true'"),
        (says(0.5), r"a log-probability is '0\.5'"),
        (samples(-5), "a token id is none of"),
        (samples(1 << 40), "a token id is none of"),
        (samples(True), "a token id is none of"),
        (samples(100_000), "a token id is none of"),
    ],
)
async def test_numbers_that_cannot_be_are_refused(
    canary: bool, change: Any, said: str, vllm_model: QwenVL, make_engine: Make
) -> None:
    """NaN above all: it is neither above nor below any limit, and would pass for the learner's weights."""
    server = odd(change, canary)(vllm_model.chat, IMAGE_TOKENS)
    server.start()
    try:
        engine = make_engine([server])
        if canary:
            with pytest.raises(EngineError, match=said):
                await load(engine, 1, 0.25)
            return
        await load(engine, 1, 0.25)
        with pytest.raises(EngineError, match=said):
            await engine.generate(prompt(vllm_model.chat, [frame(1)]), WARM)
    finally:
        server.kill()


async def test_a_canary_that_was_not_ended_by_its_last_token_is_refused(vllm_model: QwenVL, make_engine: Make) -> None:
    server = odd(lambda choice: choice.update(finish_reason="length"), True)(vllm_model.chat, IMAGE_TOKENS)
    server.start()
    try:
        with pytest.raises(EngineError, match="says 'length', its last token says otherwise"):
            await load(make_engine([server]), 1, 0.25)
    finally:
        server.kill()


async def test_a_long_answer_is_no_fault_of_a_server(vllm_model: QwenVL, make_engine: Make) -> None:
    """Of 30,000 tokens, with all that vLLM says of each."""

    def change(choice: dict[str, Any]) -> None:
        row = choice["logprobs"]["content"][0] | {"token": "token_id:27", "bytes": [0] * 40, "top_logprobs": []}
        choice["token_ids"] = [row["token_id"]] * 30_000 + choice["token_ids"][-1:]
        choice["logprobs"]["content"] = [row] * 30_000 + choice["logprobs"]["content"][-1:]

    server = odd(change, False)(vllm_model.chat, IMAGE_TOKENS)
    server.start()
    try:
        engine = make_engine([server])
        await load(engine, 1, 0.25)
        (completion,) = await engine.generate(prompt(vllm_model.chat), WARM)
        assert len(completion.ids) == 30_001
    finally:
        server.kill()
