"""Directories of runs for reports: a large one, and a hostile one. Made of the real dataclasses, written as runs write
them, without a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paravt.config import RLRecipe
from paravt.episodes import save_episodes
from paravt.lab.questions import question
from paravt.lab.world import DURATION, frame, world
from paravt.metrics import MetricsFile, rollout_metrics
from paravt.rollout import Group
from paravt.turns import parse_turn, render_call
from paravt.types import (
    BadToolCall,
    Crop,
    Episode,
    EpisodeError,
    Frame,
    Sample,
    Score,
    Segment,
    Trace,
    Usage,
    Window,
)
from paravt.video import overview_times, window_times

HOSTILE = (
    "</script><script>document.body.dataset.hacked='1'</script><img src=x onerror=\"document.body.dataset.hacked='1'\">"
    " \"'`<!-- ]]> ${x} {{x}}\n\r\u2028\u2029\u202e\x00\x1b[2J \ud800 javascript:alert(1)"
)
"""A text that is markup, script, a line break, and no text at all, all at once."""
HOSTILE_NAME = "a\"b'<img src=x onerror=alert(1)>\n&c"
"""Of a file or a directory."""
_PREFIX = "<think>\n"


def sampled(text: str, version: int = 0) -> Segment:
    """A sampled segment with one id for each word."""
    words = spell(text)
    ids = tuple(1000 + len(word) for word in words)
    logprobs = tuple(-0.01 * (n % 50) for n in range(len(words)))
    return Segment(ids, True, text, logprobs, policy_version=version, usage=Usage(200, len(ids)))


def spell(text: str) -> list[str]:
    """Tags, words with what stands before them, and everything else."""
    return re.findall(r"<\|?/?\w+\|?>|\s*\w+|\s*[^\w\s]|\s+", text)


def prompt(text: str, frames: Sequence[Frame] = ()) -> Segment:
    shown = "".join(f"<{one.time:.1f} seconds><|vision_start|><|image_pad|><|vision_end|>" for one in frames)
    return Segment(tuple(range(len(frames) + len(text) // 4)), False, f"{shown}{text}", images=tuple(frames))


def episode(sample: Sample, number: int, budget: int = 8, calls: int = 3) -> Episode:
    """An episode about a lab video: a turn with calls, and one that answers. Every third one answers wrongly, every
    fifth has something after its answer, one call in four fails."""
    shown = world(sample.video)
    overview = [frame(shown, time) for time in overview_times(DURATION, budget)]
    windows = [Window(32.0 * n, 32.0 * n + 16) for n in range(calls)]
    blocks = "\n".join(render_call("crop_video", {"start_time": w.start_time, "end_time": w.end_time}) for w in windows)
    first = f"I look at {calls} of the places at once.\n</think>\n{blocks}<|im_end|>"
    said = str(sample.answer) if number % 3 else "nothing"
    last = f"The reports agree on it.\n</think>\n<answer>{said}</answer>{' And so on.' * (number % 5 == 0)}<|im_end|>"
    header = f"<|im_end|>\n<|im_start|>assistant\n{_PREFIX}"
    turns = tuple(parse_turn(_PREFIX + text) for text in (first, last))
    crops = tuple(_crop(shown, n, window, turns[0].calls[n], number) for n, window in enumerate(windows))
    reports = "\n".join(f"[{c.window}] {c.report or c.error}" for c in crops)
    main = Trace(
        "main",
        "main",
        (prompt(f"{sample.question}{header}", overview), sampled(first), prompt(f"{reports}{header}"), sampled(last)),
        "stop",
        0.5,
    )
    right = float(said == sample.answer)
    scores = {"accuracy": Score(right, said, ""), "format": Score(0.9), "tool": Score(0.3 + 0.5 * right)}
    return Episode(
        sample, budget, "parallel", main, turns, crops, turns[-1].answer, duration=float(DURATION),
        overview_times=tuple(one.time for one in overview), timings={"total": 1.5, "main": 0.5, "crops": 0.9},
        rewards={**scores, "total": Score(sum(score.value or 0 for score in scores.values()))},
        errors=tuple(EpisodeError("engine", f"crop/0/{c.index}", str(c.error), True) for c in crops if c.error),
    )  # fmt: skip


def _crop(shown: Any, index: int, window: Window, call: Any, number: int) -> Crop:
    frames = [frame(shown, time) for time in window_times(window.start_time, window.end_time, 1.0, 8)]
    seen = shown.visible([one.time for one in frames])
    report = f"I see {', '.join(seen) or 'nothing'} from {window.start_time:g} seconds on."
    trace = Trace(f"crop/0/{index}", "crop", (prompt("What is there?", frames), sampled(report + "<|im_end|>")), "stop")
    times = tuple(one.time for one in frames)
    if (number + index) % 4 == 0:
        error = "the engine broke"
        return Crop(0, index, "failed", call, window, None, None, times, error=error, seconds=0.1)
    return Crop(0, index, "ran", call, window, report, trace, times, seconds=0.4)


def credit(one: Episode, advantage: float) -> dict[str, Any]:
    """Of each trace, in the form of `paravt.credit`: structural tokens of the main trace get something more."""
    out = {}
    for trace in one.traces:
        tokens = [token for segment in trace if segment.sampled for token in spell(segment.text)]
        paid = [advantage + 0.5 * (len(token) > 2 and token[0] == "<" and trace.role == "main") for token in tokens]
        out[trace.name] = {"advantages": paid, "spelled": tokens}
    return out


def group(step: int, number: int, size: int) -> Group:
    sample = question(f"rl-{step}-{number}", 0).sample
    budget = (4, 8, 16)[number % 3]
    episodes = tuple(episode(sample, n + number, budget, calls=1 + (n + step) % 4) for n in range(size))
    return Group(f"{step}/{sample.id}@0", number, episodes)


def write_run(out: Path, *, steps: int = 25, groups: int = 10, size: int = 8, seed: int = 0) -> Path:
    """A run of reinforcement learning with steps * groups * size episodes: 2,000 by default."""
    write_recipe(out, seed)
    metrics, timings = MetricsFile(out / "metrics.jsonl"), MetricsFile(out / "timings.jsonl")
    for step in range(1, steps + 1):
        made = [group(step, number, size) for number in range(groups)]
        metrics.add(step, {**rollout_metrics(made), "entropy": 1.0 / (step + seed), "token/mismatch": 1e-6})
        timings.add(step, {"rollout": 2.0, "learn": 1.0, "tokens_per_second": 900.0 + step})
        episodes = [(one.id, each) for one in made for each in one.episodes]
        paid = [credit(each, n / size - 0.5) for one in made for n, each in enumerate(one.episodes)]
        save_episodes(episodes, out / "episodes" / f"step-{step:06d}.jsonl", paid)
    (out / "warnings.txt").write_text("step 3: kappa 0.1 is below 0.5\n")
    return out


def write_recipe(out: Path, seed: int = 0, **changes: Any) -> None:
    out.mkdir(parents=True, exist_ok=True)
    recipe = RLRecipe.model_validate({"model": {"kind": "pretrained", "path": "start"}, "seed": seed, **changes})
    (out / "recipe.json").write_text(recipe.model_dump_json(indent=1) + "\n")
    (out / "versions.json").write_text(json.dumps({"python": "3.12", "paravt": "0.1.0"}))


def hostile_episode(number: int) -> Episode:
    """Every text of it is hostile, its video is a file that nobody may see, and its numbers are no numbers."""
    text = f"{HOSTILE} {number}"
    sample = Sample(text, "/etc/passwd", text, (text, HOSTILE), text, "choice", {text: text})
    made = episode(sample, number)
    bad = Crop(0, 9, "bad", BadToolCall(text, text), None, text, None, (1.0, float("nan")), (text,), text)
    frames = (
        Frame(0.5, made.main.images[0].pixels, f"lab:{HOSTILE}:star:0"),
        Frame(1.5, made.main.images[0].pixels, text),
    )
    main = replace(
        made.main, segments=(prompt(text, frames), sampled(text), *made.main.segments[2:]), seconds=float("inf")
    )
    unknown: tuple[Any, ...] = ("constructor", "__proto__", text)
    odd = [replace(bad, index=10 + n, status=status) for n, status in enumerate(unknown)]
    crops = (*(replace(crop, report=text, error=text, missing=(text,)) for crop in made.crops), bad, *odd)
    return replace(
        made, main=main, turns=(parse_turn(text), parse_turn(f"<think>{text}</think><tool_call>{text}</tool_call>")),
        crops=crops, answer=text, overview_times=(0.5, 1.5, float("nan")), duration=float("nan"),
        rewards={"total": Score(float("nan"), text, text), "accuracy": Score.unscored(text), text: Score(0.5)},
        errors=(EpisodeError(text, text, text, False),), timings={text: float("inf"), "total": 1.0},
        end=unknown[number % 3],
    )  # fmt: skip


def write_hostile_run(parent: Path) -> Path:
    """A run whose directory, files and texts are all hostile: names with quotes and newlines, lines that are no
    episodes, links out of the directory."""
    out = parent / HOSTILE_NAME
    write_recipe(out)
    recipe = json.loads((out / "recipe.json").read_text())
    (out / "recipe.json").write_text(json.dumps({**recipe, HOSTILE: HOSTILE, "seed": HOSTILE}))
    (out / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (out / "warnings.txt").write_text(f"{HOSTILE}\n".encode("utf-8", "replace").decode())
    rows = [
        {"step": 1, HOSTILE: 1.0, "kappa": HOSTILE, "f_strict": float("nan"), "loss": 1e308, "constructor": 2.0},
        {"step": HOSTILE},
        {"step": 10**400, "kappa": 1.0},
        {"step": 2, "kappa": 1e400, "loss": -1e308, "__proto__": 1.0, "accuracy/K9": 1e-320},
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "ka')
    episodes = [(f"{HOSTILE}/{n // 4}", hostile_episode(n)) for n in range(8)]
    paid = [{HOSTILE: HOSTILE, "main": {"spelled": [HOSTILE], "advantages": ["x"]}}] * 8
    save_episodes(episodes, out / "episodes" / "step-000001.jsonl", paid)
    wrong: list[Any] = [[], {}, {"format": 1}, {"format": 1, "sample": HOSTILE}, HOSTILE, None]
    lines = "".join(json.dumps(row) + "\n" for row in wrong)
    (out / "episodes" / "step-000002.jsonl").write_text(lines + "[" * 100_000 + "\n\xff\n{")
    (out / "episodes" / "step-000003.jsonl").symlink_to("/etc/passwd")
    (out / "timings.jsonl").symlink_to("/etc/passwd")
    return out
