"""A server with vLLM's endpoints, for tests that need no model: what it says follows from the weights it was sent."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app_server import AppServer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from safetensors.torch import load_file

from paravt.chat import TokenChat
from paravt.engines.base import Prompt, Sampling
from paravt.engines.vllm import SpawnConfig, VLLMEngine
from paravt.types import Frame, ImagePart, Message, Row, TextPart


class FakeVLLM:
    """Weights are one number, `w` (or how many tensors there are), and every token that it samples, some digits that
    follow from the seed, has log-probability -w."""

    def __init__(self, chat: TokenChat, tokens_per_image: int) -> None:
        self.chat, self.tokens_per_image = chat, tokens_per_image
        self.requests: list[dict[str, Any]] = []
        """Rollouts: requests for a single token or the canary are not in it."""
        self.events: list[str] = []
        """What changed its state, in order."""
        self.running = self.most_running = 0
        self.delay = 0.0
        self.answers: list[int] = []
        """Status codes that rollouts get instead of an answer."""
        self.healthy = True
        self.hangs = False
        self.slow = False
        """Does not begin with an update."""
        self._port = socket.socket()  # kept for it while it is not there: nobody else's gets that port meanwhile
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.born()

    def born(self) -> None:
        """As a process that was just started."""
        self.weights: float = 999.0
        self.label = "default"
        self.paused = False
        # ways to be wrong
        self.stale = getattr(self, "stale", False)
        """Takes the name of new weights, and goes on with the old ones."""
        self.refuses = getattr(self, "refuses", 0)
        """Updates that it fails at."""
        self.raw = getattr(self, "raw", False)
        """Log-probabilities before bias and temperature."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            while self.hangs:
                await asyncio.sleep(0.05)
            return Response(status_code=200 if self.healthy else 503)

        @app.get("/v1/models")
        def models() -> Any:
            return {"data": [{"id": "policy", "max_model_len": 2048}]}

        @app.get("/get_world_size")
        def world_size() -> Any:
            return {"world_size": 1}

        @app.get("/weight_info")
        def weight_info() -> Any:
            return {"weight_version": self.label}

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> Any:
            return await self.generate(await request.json())

        @app.post("/{what}")
        async def order(what: str, request: Request) -> Any:
            body = await request.json() if await request.body() else {}
            self.events.append(what + (f"?{request.url.query}" if request.url.query else ""))
            while self.slow and what == "start_weight_update":
                await asyncio.sleep(0.01)
            if what == "pause":
                self.paused = True
            elif what == "resume":
                self.paused = False
            elif what == "update_weights":
                if self.refuses:
                    self.refuses -= 1
                    return JSONResponse({"error": "told to refuse"}, status_code=500)
                if not self.stale or self.weights == 999.0:
                    sent = load_file(body["update_info"]["path"])
                    self.weights = float(sent["w"]) if "w" in sent else float(len(sent))
            elif what == "finish_weight_update":
                self.label = body["weight_version"]
            return {"success": True}

        return app

    async def generate(self, body: dict[str, Any]) -> Any:
        settings = body["sampling_params"]
        rollout = settings["max_tokens"] > 1 and settings["temperature"] > 0
        if rollout:
            self.requests.append(body)
        self.running += rollout
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay if rollout else 0)
            while self.paused or (self.hangs and rollout):
                await asyncio.sleep(0.01)
        finally:
            self.running -= rollout
        if rollout and self.answers:
            code = self.answers.pop(0)
            return JSONResponse({"error": {"message": f"told to fail with {code}"}}, status_code=code)
        prompt: list[int] = []
        for token in body["token_ids"]:
            prompt += [token] * (self.tokens_per_image if token == self.chat.image_id else 1)
        words = [int(token) for token, bias in settings.get("logit_bias", {}).items() if bias > 0]
        text = str(settings["seed"] % 1000) if settings["temperature"] > 0 and not words else "012"
        ids = words or [*self.chat.tokenizer.encode(text, add_special_tokens=False), self.chat.end_id]
        ids = ids[: settings["max_tokens"]]
        logprob = 0.0 if words and not self.raw else -self.weights
        choice = {
            "finish_reason": "stop" if ids[-1] == self.chat.end_id else "length",
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token in ids]},
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
        }
        return {"prompt_token_ids": prompt, "choices": [choice] * settings.get("n", 1), "usage": {}}

    # ------------------------------------------------------------------ the process

    def start(self) -> None:
        self.born()
        self._server = AppServer(self.app(), self._port.getsockname()[1])
        self._server.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.getsockname()[1]}"

    def kill(self) -> None:
        self._server.kill()


def spawn_config(directory: Path, main: str, model: str, path: str = "") -> SpawnConfig:
    """Starts a process that runs the text `main` where vLLM's command line would be, and has modules of `path`, too."""
    package = directory / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(main)
    found = os.pathsep.join([str(directory), *([path] if path else [])])
    return SpawnConfig(sys.executable, (model,), {"PYTHONPATH": found}, (), directory / "logs")


# ---------------------------------------------------------------------------------------------------- what asks it

QUICK = dict(health_every=0.1, patience=10.0, start_timeout=10.0, timeout=20.0)
WARM = Sampling(max_tokens=8, temperature=0.7, seed=5)
IMAGE_TOKENS = 4
"""Of a frame of 64 x 64 px."""


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


def paired_ranks() -> list[Learner]:
    """The learners of a run of two processes, which are both in this one."""
    if sys.version_info < (3, 11):
        pytest.skip("asyncio.Barrier is of Python 3.11")
    meeting = asyncio.Barrier(2)
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

    return [Rank(0), Rank(1)]


def frame(seed: int, side: int = 64) -> Frame:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Frame(float(seed), pixels, f"frame {seed}/{side}")


def prompt(chat: TokenChat, frames: Sequence[Frame] = (), episode: int = 0, trace: str = "main") -> Prompt:
    parts = [part for each in frames for part in (TextPart("<1.0 seconds>"), ImagePart(each))]
    segment = chat.open([Message("user", (*parts, TextPart("what?")))])
    return Prompt(segment.ids, segment.images, trace=trace, episode=episode)


async def load(engine: VLLMEngine, version: int, value: float) -> None:
    learner = engine._learner
    assert isinstance(learner, Learner)
    learner.weights = value
    await engine.load_policy(version, {"w": torch.tensor(value)})


async def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


Make = Callable[..., VLLMEngine]
