from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_server import Server

from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.models import QwenVL
from paravt.prompts import Prompts

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
