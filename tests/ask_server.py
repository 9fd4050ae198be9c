"""A real ask server on a free port of this machine, with an engine whose answers the questions themselves choose."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from paravt.agent import EpisodeConfig
from paravt.engines.base import Completion, Engine, Prompt, Sampling
from paravt.engines.scripted import Delayed, ScriptedEngine, Step
from paravt.errors import EngineError
from paravt.models import QwenVL
from paravt.serve.api import create_app
from paravt.serve.security import Access, listen
from paravt.serve.server import AskServer
from paravt.serve.videos import Library
from paravt.turns import render_call

ANSWER = "<think>\nseen\n</think>\n<answer>a cat at 15 seconds</answer>"
WINDOWS = ((10.0, 20.0), (30.0, 40.0))


class Choosing(ScriptedEngine):
    """Two crops and an answer; a question with "hang" in it hangs, with "broken" it fails, with "slow" it takes a
    little. `cancelled` counts the requests that were ended, by their trace."""

    def __init__(self, tiny: QwenVL) -> None:
        super().__init__(tiny.chat, self._choose)
        self.cancelled: Counter[str] = Counter()
        self.running = self.most_running = 0

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int = 1) -> list[Completion]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            done = await super().generate(prompt, sampling, n)
            self.prompts.clear()  # they hold frames
            return done
        except asyncio.CancelledError:
            self.cancelled[prompt.trace] += 1
            raise
        finally:
            self.running -= 1

    def _choose(self, prompt: Prompt) -> Step:
        text = self.chat.tokenizer.decode(prompt.ids)
        if "broken" in text:
            return EngineError("told to fail")
        if prompt.trace != "main":
            return Delayed(math.inf) if "hang" in text else "a <b>cat</b>"
        if "slow" in text:
            return Delayed(0.02, ANSWER)
        calls = "\n".join(render_call("crop_video", {"start_time": a, "end_time": b}) for a, b in WINDOWS)
        return ANSWER if "[10 - 20 seconds]" in text else f"<think>\nlook\n</think>\n{calls}"


class Asking:
    """A running server and a client of it. A context manager."""

    def __init__(
        self,
        engine: Engine,
        library: Library,
        config: EpisodeConfig | None = None,
        access: Access | None = None,
        **options: Any,
    ) -> None:
        listening = listen()
        self.url = listening.url.rstrip("/")
        self.app = create_app(
            engine, library, access or listening.access, config=config or EpisodeConfig(crop_max_frames=2), **options
        )
        self._server = AskServer(self.app)
        self.thread = threading.Thread(target=self._server.run, args=([listening.socket],), daemon=True)

    def __enter__(self) -> Asking:
        self.thread.start()
        while not self._server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.client = httpx2.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()

    def upload(self, path: Path, name: str = "clip.mp4") -> httpx2.Response:
        with path.open("rb") as file:
            return self.client.post("/v1/videos", files={"file": (name, file)})

    def ask(self, video: str, question: str, **fields: Any) -> str:
        """The id of a new ask."""
        body = {"video": video, "question": question, "frame_budget": 4, **fields}
        answer = self.client.post("/v1/ask", json=body)
        assert answer.status_code == 202, answer.text
        id: str = answer.json()["id"]
        return id

    def state(self, id: str) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get(f"/v1/ask/{id}").json()
        return state

    def events(self, id: str, after: int | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """(number, name, data) of the stream, to its end."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        with self.client.stream("GET", f"/v1/ask/{id}/events", headers=headers) as stream:
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            fields: dict[str, str] = {}
            for line in stream.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                elif "event" in fields:
                    yield int(fields["id"]), fields["event"], json.loads(fields["data"])
                    fields = {}
