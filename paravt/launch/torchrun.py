"""Several processes on this machine, started and watched by torch's own launcher (what `torchrun` runs).

Several machines: `torchrun --nnodes ... -m paravt sft RECIPE --out DIR` (or `rl`) on each, with a directory that all of
them see.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paravt.errors import WorkerError


def start(module: str, arguments: Sequence[str], processes: int) -> None:
    """Run `python -m module arguments` in each process, and wait for them. If one fails, all are ended.

    A process that fails says why itself: then this exits with its code. Raises WorkerError for one that was killed.
    """
    # Its own account of a failure would come after that line, and is a screen long.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="paravt-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=5,
            virtual_local_rank=True,
        )
        _launch(config, [module, *arguments])


def _launch(config: LaunchConfig, arguments: Sequence[str]) -> None:
    try:
        elastic_launch(config, sys.executable)("-m", *arguments)
    except SignalException as error:  # Ctrl-C, or an end that was asked for; the processes have it too
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        # Those that only heard of a failure leave with 1, or were ended: the largest code is that of the first.
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        loudest = max(codes.values())
        killed = [rank for rank, code in codes.items() if code < 0 and (loudest < 0 or code != -signal.SIGTERM)]
        if loudest > 1 or not killed:
            raise SystemExit(loudest) from None
        how = signal.Signals(-codes[killed[0]]).name
        raise WorkerError(f"process {killed[0]} of {config.nproc_per_node} was killed ({how})") from None
