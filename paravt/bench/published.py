"""The table that the paper's authors published: accuracy in percent, mIoU for Charades-STA; None where there is none.

All open models were run by them under one protocol: 64 frames, a prompt for each baseline. MMVU is, by all that can be
inferred, its 625 multiple-choice questions. There are no published figures by duration or category.
"""

from __future__ import annotations

from collections.abc import Mapping

COLUMNS: Mapping[str, str] = {
    "videomme": "Video-MME w/o",
    "videomme_subtitles": "Video-MME w/",
    "longvideobench": "LongVideoBench",
    "lvbench": "LVBench",
    "mlvu": "MLVU",
    "mmvu": "MMVU",
    "charades": "Charades-STA",
}
"""Benchmarks by their names, and their headings."""

PUBLISHED: Mapping[str, tuple[float | None, ...]] = {
    "GPT-4o": (71.9, 77.2, 66.7, 34.7, 64.6, 66.7, None),
    "Gemini 1.5 Pro": (75.0, 81.3, 64.4, 33.1, 74.3, 65.8, None),
    "Qwen2.5-VL-7B (direct)": (55.7, 64.5, 46.4, 32.2, 47.8, 65.4, 31.6),
    "Video-R1-7B": (57.6, 66.0, 57.4, 36.9, 61.6, 61.3, 25.4),
    "VideoChat-R1-7B": (50.4, 58.2, 49.2, 23.8, 58.7, 65.0, 31.5),
    "VideoRFT-7B": (58.5, 65.6, 55.1, 38.0, 44.9, 42.7, 18.7),
    "Time-R1-7B": (58.9, 66.2, 56.0, 38.2, 60.5, 63.4, 34.7),
    "ReWatch-R1-7B": (58.8, 65.0, 53.6, 38.5, 60.1, 59.8, 20.2),
    "Video-Thinker-7B": (61.9, 65.3, 56.0, None, 65.2, 64.5, 29.0),
    "Qwen3-VL-8B (tool)": (59.9, 68.4, 52.2, 33.1, 58.3, 68.0, 49.3),
    "Conan-7B": (55.5, 62.8, 54.5, 38.2, 59.2, 64.0, 25.4),
    "LongVT-RFT-7B": (59.5, 66.0, 54.7, 37.9, 59.4, 63.4, 23.4),
    "SAGE-7B": (44.1, 52.4, 37.4, 31.8, 49.7, 55.7, 28.9),
    "VideoZoomer-7B": (45.3, 48.3, 39.6, 22.9, 46.2, 61.6, None),
    "ParaVT-8B": (62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1),
    "ParaVT-8B, sequential": (61.4, 68.8, None, 37.5, 64.1, None, None),
}
"""In the order of `COLUMNS`. The two closed models are the best official figures."""

NOTES = (
    "Published figures are the authors' own, of their evaluation; ours are of the rows that each run has played. "
    "Theirs count failed requests as wrong answers; MLVU is the mean over rows, as theirs; MMVU is the multiple-choice "
    "part, as theirs seems to be. Video-Thinker's LVBench figure was withheld (training data overlap), VideoZoomer's "
    "Charades-STA figure does not exist."
)
