"""Scaling out on one machine: episodes a second of `paravt rl` with more processes, servers, staleness.

    python benchmarks/scale.py [--vllm-python PYTHON] [--repeats 3 --steps 6]

Every side is a run of the same recipe (recipes/lab/rl/full.yaml with the package's small checkpoint, always the same
number of frames, weights that hardly move), which is ended when it has been measured:

- learner processes: 1 and 2 (torchrun, FSDP2, gloo);
- staleness: 0, 1, 2, with the local engine and with a server;
- engine: the local one and a vLLM server;
- servers: 1 and 2.

All sides are measured once in each round, one after the other, from the end of the third step on, so that nothing of
the start is counted. Printed are ratios to the first side of each comparison, of the same round: median (least - most).
A server, a learner and an engine of its own are processes that want a core each; where there are fewer cores, look at
the CPU seconds of an episode (all processes together), which say what a side costs, rather than at episodes a second.
Below it stands what every side sampled: compare only what is alike. Servers are started once. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt.ask import shipped_model
from paravt.engines.vllm import CPU_ARGUMENTS, ServerProcess, SpawnConfig, serve_arguments
from paravt.models import load_model

RECIPE = Path(__file__).parents[1] / "recipes" / "lab" / "rl" / "full.yaml"
WARM = 3
"""Steps before those that are measured: servers and caches are warm then, and runs are as far ahead as they may be."""
PATIENCE = 900.0
"""Seconds for a run, or for servers to start."""
CONTEXT = 2048
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Side:
    name: str
    processes: int = 1
    staleness: int = 0
    servers: int = 0
    """0: the local engine."""


LOCAL = Side("local engine")
SERVER = Side("1 vLLM server", servers=1)
COMPARISONS: tuple[tuple[str, tuple[Side, ...]], ...] = (
    ("learner processes", (LOCAL, Side("local engine, 2 processes", processes=2))),
    ("staleness, local engine", (LOCAL, *(Side(f"local engine, staleness {k}", staleness=k) for k in (1, 2)))),
    ("engine", (LOCAL, SERVER)),
    ("servers", (SERVER, Side("2 vLLM servers", servers=2))),
    ("staleness, server", (SERVER, *(Side(f"1 vLLM server, staleness {k}", staleness=k, servers=1) for k in (1, 2)))),
)


@dataclass(frozen=True)
class Measured:
    """A run's steps after the first `WARM` ones."""

    wall: float
    cpu: float
    """Seconds, of all processes of the run and its servers."""
    episodes: int
    unscored: int
    dropped: int
    """Groups that were too old."""
    truncated: float
    """Share of tokens whose importance weight was cut."""
    tokens: float
    """Sampled, by main agents and sub-agents."""
    mismatch: float

    @property
    def rate(self) -> float:
        return self.episodes / self.wall

    @property
    def cost(self) -> float:
        return self.cpu / self.episodes


def process_table() -> dict[int, tuple[int, float]]:
    """The parent of every process, and its CPU seconds with those of its children that have ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    return found


def cpu_seconds(roots: list[int]) -> float:
    """Of processes and all that they started."""
    table = process_table()
    total, waiting = 0.0, list(roots)
    while waiting:
        at = waiting.pop()
        total += table.get(at, (0, 0.0))[1]
        waiting += [pid for pid, (parent, _) in table.items() if parent == at]
    return total


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(what: Callable[[], bool], failed: Callable[[], str | None]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        said = failed()
        if said is not None or time.monotonic() > deadline:
            raise SystemExit(said or f"not done after {PATIENCE:g} seconds")
        time.sleep(0.01)


def command(side: Side, out: Path, urls: list[str], args: argparse.Namespace) -> list[str]:
    engine = {"kind": "vllm", "servers": urls[: side.servers]} if side.servers else {"kind": "local"}
    changes = [
        f"model.path={shipped_model()}", f"engine={json.dumps(engine)}", "deterministic=false", "gating=false",
        f"episode.frame_budget={args.frames}", f"rollout.prompts={args.prompts}", f"rollout.group_size={args.group}",
        f"rollout.max_staleness={side.staleness}", f"threads={args.threads}", "optimizer.learning_rate=1.0e-7",
        "steps=100000", "checkpoint_every=100000", "episodes_every=100000",
    ]  # fmt: skip
    sets = [part for change in changes for part in ("--set", change)]
    processes = ["--nproc", str(side.processes)] if side.processes > 1 else []
    return [sys.executable, "-m", "paravt", "rl", str(RECIPE), "--out", str(out), *processes, *sets]


def measure(side: Side, out: Path, servers: list[ServerProcess], args: argparse.Namespace) -> Measured:
    used = servers[: side.servers]
    with (out.parent / f"{out.name}.log").open("wb") as log:
        run = subprocess.Popen(
            command(side, out, [server.url for server in servers], args),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
            start_new_session=True,
        )
    metrics = out / "metrics.jsonl"
    roots = [run.pid, *(pid for server in used if (pid := server.pid) is not None)]

    def failed() -> str | None:
        ended = run.poll() is not None
        return f"{side.name}: the run ended: {Path(log.name).read_text()[-2000:]}" if ended else None

    try:
        wait_for(lambda: len(rows(metrics)) >= WARM, failed)
        began = time.perf_counter(), cpu_seconds(roots)
        first = len(rows(metrics))
        wait_for(lambda: len(rows(metrics)) >= first + args.steps, failed)
        ended = time.perf_counter(), cpu_seconds(roots)
    finally:
        end(run)
    steps = rows(metrics)[first : first + args.steps]
    speeds = rows(out / "timings.jsonl")[first : first + args.steps]
    return Measured(
        wall=ended[0] - began[0],
        cpu=ended[1] - began[1],
        episodes=sum(step["episodes"] for step in steps),
        unscored=sum(step["unscored"] for step in steps),
        dropped=sum(step["stale_groups"] for step in steps),
        truncated=statistics.mean(step.get("token/truncated") or 0.0 for step in steps),
        tokens=sum(each["tokens_per_second"] * (each["rollout"] + each["learn"]) for each in speeds),
        mismatch=max(step.get("token/mismatch_max") or 0.0 for step in steps),
    )


def end(run: subprocess.Popen[bytes]) -> None:
    run.send_signal(signal.SIGTERM)
    try:
        run.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(60)


@contextmanager
def started(python: str | None, directory: Path, args: argparse.Namespace) -> Iterator[list[ServerProcess]]:
    """Two servers; none without an interpreter for them."""
    if python is None:
        yield []
        return
    chat = load_model(shipped_model()).chat
    arguments = serve_arguments(
        str(shipped_model()),
        dtype="float32",
        context=CONTEXT,
        images=args.frames + 64,
        sequences=64,
        pixels=(chat.frame_factor**2, chat.max_pixels),
        transfer="file",
        more=CPU_ARGUMENTS,
    )
    config = SpawnConfig(python, arguments, {"OMP_NUM_THREADS": str(args.threads)}, (), directory)
    servers = [ServerProcess(config, number) for number in range(2)]
    try:
        for server in servers:
            server.start()

        def failed() -> str | None:
            return next((server.last_words() for server in servers if not server.alive), None)

        for server in servers:
            wait_for(lambda server=server: healthy(server.url), failed)  # type: ignore[misc]
        yield servers
    finally:
        for server in servers:
            server.stop()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:
        time.sleep(0.5)
        return False


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f} - {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM; without it its sides are left out")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--steps", type=int, default=6, help="of each run, measured")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt, G")
    parser.add_argument("--frames", type=int, default=16, help="of the overview, K")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--only", help="comparisons whose title begins so")
    args = parser.parse_args()
    chosen = [c for c in COMPARISONS if c[0].startswith(args.only or "")]
    if args.vllm_python is None:
        chosen = [c for c in chosen if not any(side.servers for side in c[1])]
        print("!!! vLLM IS NOT MEASURED: give --vllm-python PYTHON (an interpreter that has it)")
    sides = list({side: None for _, compared in chosen for side in compared})
    found: dict[Side, list[Measured]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name, started(args.vllm_python, Path(name), args) as servers:
        for round_ in range(args.repeats):
            for number, side in enumerate(sides):
                found[side].append(measure(side, Path(name) / f"{round_}-{number}", servers, args))
                print(
                    f"round {round_ + 1} of {args.repeats}: {side.name}: {found[side][-1].rate:.2f}/s", file=sys.stderr
                )

    print(
        f"{os.cpu_count()} cores, {args.threads} thread(s) for each process; {args.steps} steps of {args.prompts} x"
        f" {args.group} episodes, {args.frames} frames, {args.repeats} rounds of {len(sides)} sides\n"
    )
    for title, compared in chosen:
        print(f"{title}: against {compared[0].name}")
        for side in compared[1:]:
            pairs = list(zip(found[side], found[compared[0]], strict=True))
            rates, costs = ([f(a) / f(b) for a, b in pairs] for f in (lambda m: m.rate, lambda m: m.cost))
            print(f"  {side.name:30s} episodes/s x {spread(rates)}   CPU seconds an episode x {spread(costs)}")
    print(f"\n{'what was sampled':32s} episodes unscored too old  cut weights  tokens/episode  mismatch  episodes/s")
    for side, runs in found.items():
        episodes = sum(run.episodes for run in runs)
        print(
            f"{side.name:32s}{episodes:9d}{sum(run.unscored for run in runs):9d}{sum(run.dropped for run in runs):8d}"
            f"{statistics.mean(run.truncated for run in runs):13.2%}"
            f"{sum(run.tokens for run in runs) / episodes:16.1f}{max(run.mismatch for run in runs):10.1e}"
            f"{statistics.median(run.rate for run in runs):12.2f}"
        )


if __name__ == "__main__":
    main()
