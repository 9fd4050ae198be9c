"""Two processes and one make the same update: however rows are spread, with a rank of few rows, of none, or of none
with an image; sharded parameters, the same global weights, gradients summed and clipped by their global norm."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_learner import batch, configure, fresh_model, weights_of
from torch.distributed.device_mesh import init_device_mesh

from paravt.learner import Learner, LearnerConfig, LoRA
from paravt.loss import LossConfig
from paravt.models import load_model
from paravt.optim import OptimizerConfig

# With a large eps AdamW's first step is proportional to the gradient; with the usual one it would be its sign, which is
# noise where the gradient is.
PLAIN = configure(optimizer=OptimizerConfig(learning_rate=1.0, eps=1.0, clip_grad_norm=0.5))
CASES: dict[str, tuple[LearnerConfig, tuple[list[int], list[int]]]] = {
    "few rows": (replace(PLAIN, token_budget=150, activation_checkpointing=True, logits_chunk=4),
                 ([0, 1, 2, 3, 4, 5, 8], [7])),
    "no rows": (PLAIN, ([0, 1, 2, 3, 4, 5, 7, 8], [])),
    "reference": (replace(PLAIN, loss=LossConfig(kl_coef=0.5)), ([0, 2, 4], [1, 5, 8])),
    "adapters": (replace(PLAIN, lora=LoRA(rank=4, alpha=64)), ([0, 2, 4, 7], [1, 3])),
    "bfloat16": (replace(PLAIN, param_dtype=torch.bfloat16), ([0, 2, 4], [1, 5, 8])),
}  # fmt: skip


def run(config: LearnerConfig, chosen: list[int], everyone: list[int], mesh: Any, out: Path | None) -> dict[str, Any]:
    """Two steps on the chosen rows, weighted as parts of everyone's."""
    torch.manual_seed(0)  # of the adapters
    model = fresh_model()
    rows = batch(model)
    weights = dict(zip(everyone, weights_of([rows[i] for i in everyone]), strict=True))
    mine = [rows[i] for i in chosen]
    learner = Learner(model, config, mesh)
    old = learner.logprobs(mine)
    reference = learner.reference_logprobs(mine) if config.loss.kl_coef else None
    steps = [asdict(learner.step(mine, [weights[i] for i in chosen], old, reference)) for _ in range(2)]
    if out is not None:
        learner.merge_and_export(out)
        if config.lora is not None:
            learner.save_adapters(out / "adapter")
    return {"old": dict(zip(chosen, old, strict=True)), "steps": steps, "weights": learner.weights()}


def worker(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, (config, shares) in CASES.items():
        result = run(config, shares[rank], sorted(shares[0] + shares[1]), mesh, directory / name)
        torch.save(result, directory / f"{name} {rank}.pt")
    model = fresh_model(torch.bfloat16)
    learner = Learner(model, PLAIN, mesh)
    rows = batch(model)[:1]
    loss = learner.step(rows, weights_of(rows)).loss
    found = {p.dtype for p in learner.scorer.parameters()}, learner.config.param_dtype, np.isfinite(loss)
    torch.save(found, directory / f"half {rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (directory,), nprocs=2)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_update_of_one(name: str, results: Path) -> None:
    config, shares = CASES[name]
    everyone = sorted(shares[0] + shares[1])
    bound = 1e-5 if config.param_dtype is None else 0.05
    alone = run(replace(config, token_budget=100_000), everyone, everyone, None, None)
    ranks = [torch.load(results / f"{name} {rank}.pt", weights_only=False) for rank in (0, 1)]
    for result in ranks:
        for row, logprobs in result["old"].items():
            np.testing.assert_allclose(logprobs, alone["old"][row], rtol=0, atol=max(bound, 1e-5))
        for step, expected in zip(result["steps"], alone["steps"], strict=True):
            for key in ("loss", "grad_norm", "entropy"):
                assert step[key] == pytest.approx(expected[key], rel=10 * bound, abs=bound), key
            if config.param_dtype is None:
                assert step["token_means"] == pytest.approx(expected["token_means"], rel=1e-3, abs=1e-5)
    start = fresh_model().module.state_dict()
    updates = [torch.cat([(w - start[n]).flatten() for n, w in r["weights"].items()]) for r in (*ranks, alone)]
    assert torch.equal(updates[0], updates[1])
    assert alone["steps"][0]["grad_norm"] > config.optimizer.clip_grad_norm, "so that the bound is at work"
    assert updates[2].abs().max() > 1e-3
    difference = (updates[0] - updates[2]).norm() / updates[2].norm()
    assert difference < (1e-4 if config.param_dtype is None else 0.2), difference


def test_shards_of_a_model_in_16_bits_are_float32(results: Path) -> None:
    for rank in (0, 1):
        found = torch.load(results / f"half {rank}.pt", weights_only=False)
        assert found == ({torch.float32}, torch.bfloat16, True), "gathered as the model was"


def test_ranks_have_equally_many_microbatches(results: Path) -> None:
    for name in CASES:
        first, second = (torch.load(results / f"{name} {r}.pt", weights_only=False)["steps"] for r in (0, 1))
        assert first[0]["microbatches"] == second[0]["microbatches"]
    assert torch.load(results / "few rows 1.pt", weights_only=False)["steps"][0]["microbatches"] > 1


def test_what_a_sharded_learner_exports_loads(results: Path) -> None:
    for name in ("few rows", "adapters"):
        expected = torch.load(results / f"{name} 0.pt", weights_only=False)["weights"]
        loaded = load_model(results / name).module.state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
    assert (results / "adapters" / "adapter" / "adapter_model.safetensors").exists()
