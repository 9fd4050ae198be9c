"""All benchmarks by name. The paper's table has the seven of `PAPER`, in this order."""

from __future__ import annotations

from paravt.bench.base import Benchmark
from paravt.bench.charades import CHARADES
from paravt.bench.longvideobench import LONGVIDEOBENCH, LONGVIDEOBENCH_SUBTITLES
from paravt.bench.lvbench import LVBENCH
from paravt.bench.mlvu import MLVU
from paravt.bench.mmvu import MMVU
from paravt.bench.videomme import VIDEOMME, VIDEOMME_SUBTITLES

PAPER = (VIDEOMME.name, VIDEOMME_SUBTITLES.name, LONGVIDEOBENCH.name, LVBENCH.name, MLVU.name, MMVU.name, CHARADES.name)
BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        VIDEOMME,
        VIDEOMME_SUBTITLES,
        LONGVIDEOBENCH,
        LONGVIDEOBENCH_SUBTITLES,
        LVBENCH,
        MLVU,
        MMVU,
        CHARADES,
    )
}
