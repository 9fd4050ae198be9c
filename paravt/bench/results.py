"""A run's directory: how it was made, what was asked, and one line of JSON for each question that was played.

    recipe.json    the configuration: model, mode, prompts, budgets, sampling, seed; one for each directory
    benches.json   the benchmarks with their faults and how they are broken down
    samples.jsonl  the questions with their right answers
    rows.jsonl     what was said: whole episodes, appended as they end
    grades.jsonl   what a judge said of open answers, if there was one

All numbers are computed from these files. A line is one write: a process that is killed loses the rows it was playing
and leaves at most one line cut off, which the next one removes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from mmap import mmap
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paravt.bench.loaded import Loaded
from paravt.bench.stored import GRADE, HEAD, RECIPE, checked, read_json
from paravt.episodes import episode_from_dict, episode_to_dict
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.types import Episode, Sample, Score, Segment, Trace

Key = tuple[str, str]
"""(benchmark, sample id)."""


@dataclass(frozen=True)
class Result:
    """One attempt at one question. Its episode has texts, times and counts, but no token ids."""

    bench: str
    tries: int
    """Attempts in the process that played it, this one included."""
    place: str
    """The server, or "local"."""
    episode: Episode

    @property
    def key(self) -> Key:
        return self.bench, self.episode.sample.id


@dataclass(frozen=True)
class Run:
    """A run as its files tell it."""

    path: Path
    recipe: Mapping[str, Any]
    benches: Mapping[str, Loaded]
    results: Mapping[Key, Result]
    """The one that counts for each sample: the last that did not fail, or else the last."""
    grades: Mapping[Key, Score]
    judge: str | None
    """Who graded open answers, if anybody did. Those without a grade have none, rather than one by another measure."""
    strangers: int = 0
    """Rows that do not belong here: of another configuration, or of a question that is asked no more, or otherwise."""

    @property
    def config(self) -> str:
        return recipe_hash(self.recipe)

    @cached_property
    def samples(self) -> dict[Key, Sample]:
        return {(bench.name, sample.id): sample for bench in self.benches.values() for sample in bench.samples}

    def of(self, bench: Loaded) -> list[Result]:
        """The results of a benchmark, in the order of its samples."""
        keys = [(bench.name, sample.id) for sample in bench.samples]
        return [self.results[key] for key in keys if key in self.results]

    def grade(self, result: Result) -> Score | None:
        if self.judge is None:
            return None
        return self.grades.get(result.key, Score.unscored("the judge has not graded this answer"))


_NEEDED = ("recipe.json", "benches.json", "samples.jsonl")
_SAMPLE, _BENCHES = TypeAdapter(Sample), TypeAdapter(list[Loaded])


def recipe_text(recipe: Mapping[str, Any]) -> str:
    return json.dumps(recipe, indent=1, sort_keys=True)


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """Names a configuration; the same on every machine."""
    return _hash(recipe)


def question_hash(sample: Sample) -> str:
    """Names what is asked: a row of a question that has changed since is not reused. Of files, their names."""
    files = [Path(path).name for path in (sample.video, str(sample.metadata.get("subtitles", "")))]
    return _hash([*files, sample.question, sample.options, sample.type])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------------------------------------------- writing


def add_result(out: Path, result: Result, config: str) -> None:
    """`config` is the hash of the configuration. Raises OSError."""
    _append(out / "rows.jsonl", _result_to_dict(result, config))


def _append(path: Path, row: Mapping[str, Any]) -> None:
    """A line, all of it or nothing: a disk that fills up in the middle of it leaves the file as it was."""
    line = (json.dumps(row) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) or 0 :]
        except OSError as error:
            file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from error


def cut_last_line(path: Path) -> int:
    """Remove what follows the last line break, if the file is there; how many bytes that was. Raises OSError."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with path.open("r+b") as file:
        with mmap(file.fileno(), 0) as view:
            size, end = len(view), view.rfind(b"\n") + 1
        file.truncate(end)
    return size - end


def _result_to_dict(result: Result, config: str) -> dict[str, Any]:
    episode = result.episode
    slim = replace(
        episode,
        main=_slim(episode.main),
        crops=tuple(replace(crop, trace=crop.trace and _slim(crop.trace)) for crop in episode.crops),
        sample=replace(episode.sample, metadata={}),
    )
    row = episode_to_dict(slim)
    row["sample"] = {"id": episode.sample.id, "asked": question_hash(episode.sample)}
    return {"bench": result.bench, "config": config, "tries": result.tries, "place": result.place} | row


def _slim(trace: Trace) -> Trace:
    """Without ids and log-probabilities: nothing is trained on these rows, and they would be most of the file."""

    def segment(one: Segment) -> Segment:
        return replace(one, ids=(), logprobs=None)

    return replace(trace, segments=tuple(map(segment, trace.segments)))


def write_benches(out: Path, benches: Iterable[Loaded]) -> None:
    """Write down what a run is about: `samples.jsonl` and `benches.json`. Benchmarks that the directory knew before,
    and that are not named now, stay. Raises OSError."""
    known = read_benches(out) if (out / "benches.json").exists() else {}
    known |= {bench.name: bench for bench in benches}
    rows = [{"bench": bench.name, **asdict(sample)} for bench in known.values() for sample in bench.samples]
    write_whole(out / "samples.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    about = [
        {name: value for name, value in asdict(replace(bench, samples=())).items() if name != "samples"}
        for bench in known.values()
    ]
    write_whole(out / "benches.json", json.dumps(about, indent=1) + "\n")


def add_grade(out: Path, result: Result, judge: str, grade: Score) -> None:
    """Raises OSError."""
    sample, answer = result.episode.sample, result.episode.answer
    _append(out / "grades.jsonl", {
        "bench": result.bench, "id": sample.id, "answer": answer, "reference": sample.answer, "judge": judge,
        "value": grade.value, "explanation": grade.explanation,
    })  # fmt: skip


# ---------------------------------------------------------------------------------------------------- reading


def read_run(path: str | Path) -> Run:
    """Raises DataError if the directory holds no run, or one that cannot be read."""
    out = Path(path)
    if missing := [name for name in _NEEDED if not (out / name).is_file()]:
        raise DataError(f"{out}: not the directory of an evaluation (no {', '.join(missing)} in it)")
    recipe, benches = _read_recipe(out / "recipe.json"), read_benches(out)
    asked = {(bench.name, sample.id): sample for bench in benches.values() for sample in bench.samples}
    hashes = {key: question_hash(sample) for key, sample in asked.items()}
    config = recipe_hash(recipe)
    results: dict[Key, Result] = {}
    strangers = 0
    for number, row in enumerate(read_rows(out / "rows.jsonl"), 1):
        head = checked(HEAD, row, f"{out / 'rows.jsonl'}:{number}")
        key = head.bench, head.sample.id
        if head.config != config or head.sample.asked != hashes.get(key):
            strangers += 1
            continue
        result = result_from_row(row, asked[key])
        if result.episode.scored or key not in results or not results[key].episode.scored:
            results[key] = result
    grades, judge = _read_grades(out, results)
    return Run(out, recipe, benches, results, grades, judge, strangers)


def _read_recipe(path: Path) -> Mapping[str, Any]:
    recipe = read_json(path.read_bytes(), path)
    checked(RECIPE, recipe, path)
    found: Mapping[str, Any] = recipe
    return found


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Of directories, those of runs: themselves, or those that are in them. Raises DataError if one has none."""
    out: list[Path] = []
    for path in paths:
        inside = sorted((file.parent for file in path.glob("*/benches.json")), key=_natural)
        found = [path] if (path / "benches.json").is_file() else inside
        if not found:
            raise DataError(f"{path}: no run of an evaluation, and none in it")
        out += found
    return list(dict.fromkeys(out))


def _natural(path: Path) -> list[tuple[str, int]]:
    """Sorts K4 before K16."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", path.name)]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of rows. Raises DataError, with the line's number, for what is none; a last line without
    its end was cut off, and is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            row = read_json(line, f"{path}:{number}")
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: not a row")
            yield row


def result_from_row(row: Mapping[str, Any], sample: Sample) -> Result:
    """Raises DataError."""
    plain = {"id": "", "video": "", "question": "", "options": []}
    try:
        episode = episode_from_dict({**row, "sample": plain})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the row of {row['bench']} {sample.id} is no episode: {error}") from error
    return Result(row["bench"], row["tries"], row["place"], replace(episode, sample=sample))


def read_benches(out: Path) -> dict[str, Loaded]:
    """The benchmarks of a run, by their names, with their samples. Raises DataError."""
    samples: dict[str, list[Sample]] = {}
    for number, row in enumerate(read_rows(out / "samples.jsonl"), 1):
        sample = checked(_SAMPLE, row, f"{out / 'samples.jsonl'}:{number}")
        samples.setdefault(str(row.get("bench")), []).append(sample)
    path = out / "benches.json"
    benches = checked(_BENCHES, read_json(path.read_bytes(), path), path)
    return {bench.name: replace(bench, samples=tuple(samples.get(bench.name, ()))) for bench in benches}


def _read_grades(out: Path, results: Mapping[Key, Result]) -> tuple[dict[Key, Score], str | None]:
    """Grades count for the very answer and reference that the judge saw, and only those of the last judge: two of them
    are two measures."""
    path = out / "grades.jsonl"
    said = [checked(GRADE, row, f"{path}:{number}") for number, row in enumerate(read_rows(path), 1)]
    judge = said[-1].judge if said else None
    grades: dict[Key, Score] = {}
    for grade in said:
        result = results.get((grade.bench, grade.id))
        if result is None or grade.judge != judge or grade.value is None:
            continue
        episode = result.episode
        if (episode.answer, episode.sample.answer) == (grade.answer, grade.reference):
            grades[result.key] = Score(grade.value, grade.answer, grade.explanation)
    return grades, judge
