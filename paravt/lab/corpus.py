"""The lab's videos as files with questions about them, and its scripted teacher for the trace factory."""

from __future__ import annotations

import json
import random
from pathlib import Path

from paravt.chat import TokenChat
from paravt.engines.base import Engine, Prompt, stable_seed
from paravt.engines.scripted import ScriptedEngine
from paravt.episode_config import EpisodeConfig
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.lab.questions import Question, question, report
from paravt.lab.teacher import Kind, Style, script
from paravt.lab.world import write_video
from paravt.types import Sample

_DIRECT = 0.2
"""Of the teacher's episodes answer from the overview alone."""


def write_corpus(out: Path, videos: int, questions: int, seed: int = 0) -> Path:
    """Write `out/videos/*.mp4` and `out/questions.jsonl`, `questions` different ones about each video; returns the
    latter. Videos that are there are kept."""
    folder = out / "videos"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(videos):
        world = f"corpus-{seed}-{number}"
        path = folder / f"{world}.mp4"
        if not path.exists():
            write_whole_video(world, path)
        drawn = (question(world, asked).sample for asked in range(8 * questions))
        for sample in list({one.question: one for one in drawn}.values())[:questions]:
            row = {"id": sample.id, "video": f"videos/{path.name}", "question": sample.question,
                   "options": list(sample.options), "answer": sample.answer, "type": sample.type,
                   **sample.metadata}  # fmt: skip
            lines.append(json.dumps(row))
    write_whole(out / "questions.jsonl", "\n".join(lines) + "\n")
    return out / "questions.jsonl"


def write_whole_video(name: str, path: Path) -> None:
    """`write_video`, but a file that is there is never half of one."""
    partial = path.with_suffix(".partial")
    write_video(name, partial)
    partial.replace(path)


def asked_of(sample: Sample) -> Question:
    """The question that a sample of a corpus is. Raises DataError if it is none."""
    world, _, number = sample.id.rpartition("/")
    if sample.metadata.get("world") == world and number.isdigit():
        asked = question(world, int(number), sample.video)
        if (asked.sample.question, asked.sample.answer) == (sample.question, sample.answer):
            return asked
    raise DataError(f"sample {sample.id}: no question of `paravt lab questions`; the lab's teacher knows no others")


class LabTeacher:
    """A teacher that knows the right windows. In every style but "clean" it keeps the format as badly as that says."""

    def __init__(self, chat: TokenChat, style: Style = "clean") -> None:
        self.identity = {"kind": "lab", "style": style}
        self._chat, self._style = chat, style

    def engine(self, sample: Sample, config: EpisodeConfig) -> Engine:
        """For one episode. Raises DataError for a question that is not the lab's."""
        asked = asked_of(sample)
        world = str(sample.metadata["world"])
        draw = random.Random(stable_seed("lab teacher", config.seed, sample.id))
        called: Kind = "sequential" if config.dispatch == "sequential" else "parallel"
        kind: Kind = "direct" if draw.random() < _DIRECT else called
        said = script(asked, kind, config.frame_budget, world, self._style, draw)["main"]
        turns = iter(str(turn) for turn in said)

        def step(prompt: Prompt) -> str:
            if prompt.trace.startswith("crop/"):
                return " " + report(world, [frame.time for frame in prompt.images])
            return next(turns, "<think>\n</think>\n<answer>.</answer>")

        return ScriptedEngine(self._chat, step)

    async def close(self) -> None:
        return None
