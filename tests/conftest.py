from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import Server
from rows import write_media
from vllm_server import IMAGE_TOKENS, QUICK, FakeVLLM, Learner

from paravt.data.traces import RowConfig, TraceBuilder
from paravt.engines.vllm import VLLMConfig, VLLMEngine, open_transfer
from paravt.lab.tiny import TinyShape, build_model, build_processor, train_tokenizer
from paravt.models import QwenVL
from paravt.prompts import Prompts
from paravt.video import FrameReader

CASES = Path(__file__).parent / "cases"
LONG = str(CASES / "video" / "longgop.mp4")
"""120 s at 5 fps."""

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-python", help="an interpreter that has vLLM: its servers are tested too")
    parser.addoption("--vllm-url", help="a running vLLM server (docs/scale.md) with the package's small checkpoint")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--vllm-python") or config.getoption("--vllm-url"):
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vllm: no --vllm-python and no --vllm-url"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    skipped = sum("vllm: no --vllm" in reason for reason in reasons)
    if skipped:
        terminalreporter.section("vLLM NOT TESTED", sep="!", red=True, bold=True)
        said = f"{skipped} tests of vLLM's servers were skipped: give --vllm-python PYTHON or --vllm-url URL"
        terminalreporter.line(said, red=True)


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


@pytest.fixture(scope="session")
def vllm_model() -> QwenVL:
    """Of which the vocabulary and the sizes of frames are used."""
    shape = TinyShape(frame_side=96)
    tokenizer = train_tokenizer([Prompts().system, "<12.5 seconds> 0123456789"], Prompts().fixed_phrases())
    return QwenVL(build_model(tokenizer, shape), build_processor(tokenizer, shape))


@pytest.fixture
def fakes(vllm_model: QwenVL) -> Iterator[list[FakeVLLM]]:
    running = [FakeVLLM(vllm_model.chat, IMAGE_TOKENS) for _ in range(2)]
    for server in running:
        server.start()
    yield running
    for server in running:
        server.hangs = False
        server.kill()


@pytest.fixture
async def make_engine(vllm_model: QwenVL, tmp_path: Path) -> AsyncIterator[Callable[..., VLLMEngine]]:
    made: list[VLLMEngine] = []

    def engine(servers: Sequence[FakeVLLM], learner: Learner | None = None, **options: Any) -> VLLMEngine:
        transfer = open_transfer("file", directory=tmp_path, address="127.0.0.1", device="cpu")
        config = VLLMConfig(**(QUICK | options))
        urls = [server.url for server in servers]
        made.append(VLLMEngine(vllm_model.chat, vllm_model.banned_ids, learner or Learner(), transfer, config, urls))
        return made[-1]

    yield engine
    for each in made:
        await each.close()
