"""Models that are no directory: what is tried is said at once, and the answer comes at once."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_server import AppServer
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from huggingface_hub import constants

from paravt.ask import shipped_model
from paravt.dry_run import skeleton
from paravt.errors import ModelError
from paravt.models import hub, load_model

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A hub that has one model, and nothing of it but its name."""
    app = FastAPI()

    @app.get("/api/models/{owner}/{name}")
    def info(owner: str, name: str) -> Any:
        if name == "there":
            return {"id": f"{owner}/{name}"}
        return JSONResponse({"error": "?"}, status_code=404, headers={"x-error-code": "RepoNotFound"})

    server = AppServer(app)
    server.start()
    yield server.url
    server.stop()


@pytest.mark.parametrize("load", [load_model, skeleton])
def test_a_hub_that_is_not_there(load: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hub, "ENDPOINT", NOBODY)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError) as caught:
        load("owner/name")
    assert time.monotonic() - started < 15  # loading by itself takes 24 seconds to give up
    assert caplog.messages[0] == f"owner/name: no such directory here; asking the hub at {NOBODY}"
    assert str(caught.value).startswith("owner/name: no such directory here, and the hub cannot be asked: ")
    assert "\n" not in str(caught.value)


def test_a_model_that_the_hub_has_not(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ENDPOINT", endpoint)
    assert hub.find_model("owner/there") is False
    with pytest.raises(ModelError, match="no such model on the hub"):
        load_model("owner/elsewhere")
    with pytest.raises(ModelError, match="not a hub id"):
        load_model("owner/two words")


def test_the_cache_is_used_where_the_hub_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    revision = "0" * 40
    kept = tmp_path / "models--owner--name"
    shutil.copytree(shipped_model(), kept / "snapshots" / revision)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(revision)
    with caplog.at_level(logging.WARNING):
        assert load_model("owner/name", "float32").family.deepstack
    assert "using the copy in the cache" in caplog.messages[1]
