from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_server import Server
from rows import write_media

from paravt.data.traces import RowConfig, TraceBuilder
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.models import QwenVL
from paravt.prompts import Prompts
from paravt.video import FrameReader

CASES = Path(__file__).parent / "cases"
LONG = str(CASES / "video" / "longgop.mp4")
"""120 s at 5 fps."""

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> QwenVL:
    """A tiny model with random weights."""
    shape = TinyShape()
    tokenizer = train_tokenizer([Prompts().system, "<12.5 seconds> 0123456789 crop_video"], Prompts().fixed_phrases())
    return QwenVL(build_model(tokenizer, shape), build_processor(tokenizer, shape))


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with media under the sentinel paths of the published data; see `rows`."""
    path = tmp_path_factory.mktemp("media")
    write_media(path)
    return path


@pytest.fixture(scope="module")
def builder(tiny: QwenVL, root: Path) -> TraceBuilder:
    """Of rows with these media."""
    return TraceBuilder(tiny.chat, FrameReader(workers=1), RowConfig(root=root, max_pixels=32 * 32))
