"""A chat server for tests: it answers with what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from app_server import AppServer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from paravt.engines.base import Prompt
from paravt.types import Message, TextPart

DROPPED = "\0dropped"
"""An answer whose connection breaks off in the middle of it."""


class Server(AppServer):
    """A chat server that answers with what it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.models = ["served"]
        self.models_body: bytes | None = None
        self.answers: list[Any] = []
        """Each a text, a status code, a whole message, the bytes of a body, or DROPPED."""
        self.delay = 0.0
        self.running = self.most_running = 0
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> Any:
            if self.models_body is not None:
                return Response(self.models_body, media_type="application/json")
            rows = [{"id": name, "object": "model", "created": 0, "owned_by": "t"} for name in self.models]
            return {"object": "list", "data": rows}

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Any:
            body = await request.json()
            self.requests.append(body)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await asyncio.sleep(self.delay)
            self.running -= 1
            answer = self.answers.pop(0) if self.answers else self.default(body)
            if isinstance(answer, int):
                return JSONResponse({"error": {"message": f"told to fail with {answer}"}}, status_code=answer)
            if answer == DROPPED:
                return StreamingResponse(_broken())
            if isinstance(answer, bytes):
                return Response(answer, media_type="text/html" if answer.startswith(b"<") else "application/json")
            message = answer if isinstance(answer, dict) else {"content": answer}
            finish = message.pop("finish_reason", "stop")
            return {
                "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
                "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107},
            }  # fmt: skip

        super().__init__(app)

    def default(self, body: dict[str, Any]) -> str | int:
        return "<answer>B</answer>"


async def _broken() -> AsyncIterator[bytes]:
    yield b'{"id": '
    raise ConnectionError("told to break off")


def prompt(text: str = "q") -> Prompt:
    return Prompt((), (), (Message("user", (TextPart(text),)),))


def parts_text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "[image]") for part in content)
