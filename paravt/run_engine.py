"""The engine of a run and what plays episodes on it, as its recipe says."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paravt.config import RLRecipe, VLLMEngineRecipe
from paravt.engines.base import Engine
from paravt.engines.local import LocalEngine
from paravt.engines.lockstep import LockstepEngine
from paravt.engines.vllm import (
    CPU_ARGUMENTS,
    ServerProcess,
    SpawnConfig,
    Spawned,
    VLLMEngine,
    open_transfer,
    serve_arguments,
)
from paravt.episode_config import EpisodeConfig
from paravt.errors import RecipeError
from paravt.judge import Judge
from paravt.learner import Learner
from paravt.models import QwenVL
from paravt.ranks import Ranks
from paravt.rollout import Rollout
from paravt.types import Row
from paravt.video import FrameSource


def open_rollout(recipe: RLRecipe, model: QwenVL, reader: FrameSource, served: Engine | None = None) -> Rollout:
    """Episodes of a recipe on an engine, which has to be closed: `served`, or a local one of the model."""
    judge = Judge(recipe.judge.url, recipe.judge.model) if recipe.judge else None
    if served is not None:
        return Rollout(served, reader, recipe.rollout_config(), judge)
    engine = LocalEngine(model, max_batch=recipe.rollout.max_concurrent)
    if not recipe.deterministic:
        return Rollout(engine, reader, recipe.rollout_config(), judge)
    lockstep = LockstepEngine(engine, reader)
    return Rollout(lockstep, lockstep.reader, recipe.rollout_config(), judge, lockstep.episode)


class Hosts(Protocol):
    """Other places for servers than the machine of this process."""

    @property
    def address(self) -> str:
        """Of the machine of this process, as they reach it."""

    def server(self, config: SpawnConfig, number: int, starts: bool) -> Spawned:
        """Server number `number`. One process of the run `starts` and stops it, the others follow it."""


class _Scorer:
    """What servers are held against: the learner, in all processes of the run."""

    def __init__(self, ranks: Ranks, learner: Learner) -> None:
        self._ranks, self._learner = ranks, learner

    async def gather(self, value: Any) -> list[Any]:
        return await self._ranks.gather(value)

    async def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return await self._ranks.call(partial(self._learner.logprobs, temperature=1.0), rows)


def open_vllm(
    recipe: RLRecipe,
    engine: VLLMEngineRecipe,
    model: QwenVL,
    out: Path,
    ranks: Ranks,
    learner: Learner,
    hosts: Hosts | None = None,
) -> VLLMEngine:
    """The vLLM engine of a recipe. `model` is the learner's, of which only the vocabulary and the image processor are
    used. Servers to start run on `hosts`, or on this machine: then processes but the first one learn of them from it.
    Raises EngineError for what cannot be started.
    """
    dtype = str(learner.config.param_dtype or model.module.dtype).removeprefix("torch.")
    transfer = None
    processes: list[Spawned] = []
    if ranks.first:
        directory = Path(engine.directory) if engine.directory else out / "weights"
        if engine.directory is None:
            shutil.rmtree(directory, ignore_errors=True)  # what a killed run left
        address = hosts.address if hosts is not None and "address" not in engine.changed else engine.address
        transfer = open_transfer(engine.transfer, directory=directory, address=address, device=str(model.device))
    if engine.servers == "spawn" and (ranks.first or hosts is not None):
        spawn = SpawnConfig(
            python=engine.python,
            arguments=_arguments(recipe, engine, model, dtype),
            environment=engine.environment,
            devices=engine.devices,
            logs=out / "servers",
        )
        numbers = range(engine.replicas)
        if hosts is None and ranks.size > ranks.size_here:
            raise RecipeError(
                "engine.servers: spawn is for one machine, and this run has several: start servers and give their"
                " addresses, or use --ray"
            )
        if hosts is None:
            processes = [ServerProcess(spawn, number) for number in numbers]
        else:
            processes = [hosts.server(spawn, number, ranks.first) for number in numbers]
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
