"""The engine of a run, as its recipe says."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paravt.config import RLRecipe, VLLMEngineRecipe
from paravt.engines.vllm import (
    CPU_ARGUMENTS,
    ServerProcess,
    SpawnConfig,
    VLLMEngine,
    open_transfer,
    serve_arguments,
)
from paravt.episode_config import EpisodeConfig
from paravt.learner import Learner
from paravt.models import QwenVL
from paravt.ranks import Ranks
from paravt.types import Row


class _Scorer:
    """What servers are held against: the learner, in all processes of the run."""

    def __init__(self, ranks: Ranks, learner: Learner) -> None:
        self._ranks, self._learner = ranks, learner

    @property
    def first(self) -> bool:
        return self._ranks.first

    async def gather(self, value: Any) -> list[Any]:
        return await self._ranks.gather(value)

    async def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return await self._ranks.call(partial(self._learner.logprobs, temperature=1.0), rows)


def open_vllm(
    recipe: RLRecipe, engine: VLLMEngineRecipe, model: QwenVL, out: Path, ranks: Ranks, learner: Learner
) -> VLLMEngine:
    """The vLLM engine of a recipe. `model` is the learner's, of which only the vocabulary and the image processor are
    used. Processes but the first one learn of spawned servers from it. Raises EngineError for what cannot be started.
    """
    dtype = str(model.module.dtype).removeprefix("torch.")
    if learner.config.param_dtype is not None:
        dtype = str(learner.config.param_dtype).removeprefix("torch.")
    transfer = None
    processes = []
    if ranks.first:
        directory = Path(engine.directory) if engine.directory else out / "weights"
        if engine.directory is None:
            shutil.rmtree(directory, ignore_errors=True)  # what a killed run left
        transfer = open_transfer(engine.transfer, directory=directory, address=engine.address, device=str(model.device))
        if engine.servers == "spawn":
            spawn = SpawnConfig(
                python=engine.python,
                arguments=_arguments(recipe, engine, model, dtype),
                environment=engine.environment,
                devices=engine.devices,
                logs=out / "servers",
            )
            processes = [ServerProcess(spawn, number) for number in range(engine.replicas)]
    chat = copy.copy(model.chat)  # its context may be shorter than the model's
    config = engine.client_config(1e-3 if dtype == "float32" else 0.3)
    urls = () if engine.servers == "spawn" else engine.servers
    scorer = _Scorer(ranks, learner)
    return VLLMEngine(chat, model.banned_ids, scorer, transfer, config, urls, processes)


def _arguments(recipe: RLRecipe, engine: VLLMEngineRecipe, model: QwenVL, dtype: str) -> tuple[str, ...]:
    limit, factor = model.chat.context_limit, model.chat.frame_factor
    context = min(recipe.episode.max_context_tokens, limit or recipe.episode.max_context_tokens)
    return serve_arguments(
        recipe.model.path,
        dtype=dtype,
        context=context,
        images=min(recipe.episode.max_frames, context // 3),  # each stands between two tokens
        sequences=engine.max_concurrency,
        # no frame of an episode is larger, and a server keeps memory free for the largest image that it takes
        pixels=(factor * factor, min(model.chat.max_pixels, EpisodeConfig.max_pixels)),
        transfer=engine.transfer,
        more=(*(() if engine.devices else CPU_ARGUMENTS), *engine.arguments),
    )
