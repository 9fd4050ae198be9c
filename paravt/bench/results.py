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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter

from paravt.bench.loaded import Fault
from paravt.bench.stored import GRADE, HEAD, RECIPE, checked, read_json
from paravt.episodes import episode_from_dict, episode_to_dict
from paravt.errors import DataError
from paravt.files import write_whole
from paravt.types import Episode, Sample, Score, Segment, Trace

Key = tuple[str, str]
"""(benchmark, sample id)."""


@dataclass(frozen=True)
class Bench:
    """What a run knows about a benchmark beside its samples."""

    name: str
    title: str
    source: str = ""
    breakdown: tuple[str, ...] | None = None
    """Keys of metadata; None: all that sort the samples into a few kinds."""
    macro: str | None = None
    faults: tuple[Fault, ...] = ()
    whole: int | None = None
    """How many questions all shards have together."""


@dataclass(frozen=True)
class Result:
    """One attempt at one question. Its episode has texts, times and counts, but no token ids."""

    bench: str
    config: str
    """The hash of the configuration that it was played with."""
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
    benches: Mapping[str, Bench]
    samples: Mapping[Key, Sample]
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

    def of(self, bench: str) -> list[Result]:
        """The results of a benchmark, in the order of its samples."""
        return [self.results[key] for key in self.samples if key[0] == bench and key in self.results]

    def grade(self, result: Result) -> Score | None:
        if self.judge is None:
            return None
        return self.grades.get(result.key, Score.unscored("the judge has not graded this answer"))


_NEEDED = ("recipe.json", "benches.json", "samples.jsonl")
_SAMPLE, _BENCHES = TypeAdapter(Sample), TypeAdapter(list[Bench])


def recipe_text(recipe: Mapping[str, Any]) -> str:
    return json.dumps(recipe, indent=1, sort_keys=True)


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """Names a configuration; the same on every machine."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def question_hash(sample: Sample) -> str:
    """Names what is asked: a row of a question that has changed since is not reused. Of files, their names."""
    files = [Path(path).name for path in (sample.video, str(sample.metadata.get("subtitles", "")))]
    text = json.dumps([*files, sample.question, sample.options, sample.type])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# ---------------------------------------------------------------------------------------------------- writing


class RowsFile:
    """`rows.jsonl`, open for appending; a context manager. A line that was cut off is removed at first.

    Raises OSError where nothing can be written; what was there before is then as it was.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.cut = _cut_last_line(path)

    def __enter__(self) -> RowsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, result: Result) -> None:
        line = json.dumps(_result_to_dict(result), ensure_ascii=True) + "\n"
        _append(self._file.fileno(), self._file.name, line.encode())


def _append(handle: int, name: str, data: bytes) -> None:
    """All of it or nothing: a disk that fills up in the middle of a line leaves the file as it was."""
    end = os.fstat(handle).st_size
    done = 0
    try:
        while done < len(data):
            done += os.write(handle, data[done:])
    except OSError as error:
        os.ftruncate(handle, end)
        raise OSError(error.errno, error.strerror, name) from error


def _cut_last_line(path: Path) -> int:
    """Remove what follows the last line break; how many bytes that was."""
    with path.open("r+b") as file:
        end = at = file.seek(0, os.SEEK_END)
        while at > 0:
            start = max(0, at - 65_536)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at < end:
            file.truncate(at)
        return end - at


def _result_to_dict(result: Result) -> dict[str, Any]:
    episode = result.episode
    slim = replace(
        episode,
        main=_slim(episode.main),
        crops=tuple(replace(crop, trace=crop.trace and _slim(crop.trace)) for crop in episode.crops),
        sample=replace(episode.sample, metadata={}),
    )
    row = episode_to_dict(slim)
    row["sample"] = {"id": episode.sample.id, "asked": question_hash(episode.sample)}
    return {"bench": result.bench, "config": result.config, "tries": result.tries, "place": result.place} | row


def _slim(trace: Trace) -> Trace:
    """Without ids and log-probabilities: nothing is trained on these rows, and they would be most of the file."""

    def segment(one: Segment) -> Segment:
        return replace(one, ids=(), logprobs=None)

    return replace(trace, segments=tuple(map(segment, trace.segments)))


def write_samples(out: Path, benches: Iterable[Bench], samples: Mapping[str, Sequence[Sample]]) -> None:
    """Write down what a run is about. Benchmarks that the directory knew before, and that are not named now, stay.

    Raises OSError.
    """
    known = read_benches(out) if (out / "benches.json").exists() else {}
    rows = [row for key, row in sample_rows(out) if key[0] not in samples]
    rows += [{"bench": name, **asdict(sample)} for name, asked in samples.items() for sample in asked]
    write_about(out, {**known, **{bench.name: bench for bench in benches}}.values(), rows)


def write_about(out: Path, benches: Iterable[Bench], samples: Iterable[Mapping[str, Any]]) -> None:
    """`benches.json` and `samples.jsonl`, the latter from its lines. Raises OSError."""
    write_whole(out / "samples.jsonl", "".join(f"{json.dumps(row)}\n" for row in samples))
    write_whole(out / "benches.json", json.dumps([asdict(bench) for bench in benches], indent=1) + "\n")


def add_grade(out: Path, key: Key, answer: str, reference: str, judge: str, grade: Score) -> None:
    """Raises OSError."""
    row = {
        "bench": key[0], "id": key[1], "answer": answer, "reference": reference, "judge": judge, "value": grade.value,
        "explanation": grade.explanation,
    }  # fmt: skip
    with (out / "grades.jsonl").open("ab", buffering=0) as file:
        _cut_last_line(out / "grades.jsonl")
        _append(file.fileno(), file.name, (json.dumps(row) + "\n").encode())


# ---------------------------------------------------------------------------------------------------- reading


def read_run(path: str | Path) -> Run:
    """Raises DataError if the directory holds no run, or one that cannot be read."""
    out = Path(path)
    if missing := [name for name in _NEEDED if not (out / name).is_file()]:
        raise DataError(f"{out}: not the directory of an evaluation (no {', '.join(missing)} in it)")
    recipe = _read_recipe(out / "recipe.json")
    samples = read_run_samples(out)
    asked = {key: question_hash(sample) for key, sample in samples.items()}
    config = recipe_hash(recipe)
    results: dict[Key, Result] = {}
    strangers = 0
    for number, result_row in enumerate(read_rows(out / "rows.jsonl"), 1):
        head = checked(HEAD, result_row, f"{out / 'rows.jsonl'}:{number}")
        key = head.bench, head.sample.id
        if key not in samples or head.config != config or head.sample.asked != asked[key]:
            strangers += 1
            continue
        result = result_from_row(result_row, samples[key])
        if result.episode.scored or key not in results or not results[key].episode.scored:
            results[key] = result
    grades, judge = _read_grades(out, results)
    return Run(out, recipe, read_benches(out), samples, results, grades, judge, strangers)


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
    names = ("bench", "config", "tries", "place")
    values = {name: row[name] for name in names}
    plain = {"id": "", "video": "", "question": "", "options": []}
    try:
        episode = episode_from_dict({**row, "sample": plain})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the row of {row['bench']} {sample.id} is no episode: {error}") from error
    return Result(**values, episode=replace(episode, sample=sample))


def read_benches(out: Path) -> dict[str, Bench]:
    """Raises DataError."""
    path = out / "benches.json"
    return {bench.name: bench for bench in checked(_BENCHES, read_json(path.read_bytes(), path), path)}


def read_run_samples(out: Path) -> dict[Key, Sample]:
    """Raises DataError."""
    path = out / "samples.jsonl"
    return {key: checked(_SAMPLE, row, f"{path}:{n}") for n, (key, row) in enumerate(sample_rows(out), 1)}


def sample_rows(out: Path) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Raises DataError."""
    for number, row in enumerate(read_rows(out / "samples.jsonl"), 1):
        bench, id = row.get("bench"), row.get("id")
        if not isinstance(bench, str) or not isinstance(id, str):
            raise DataError(f"{out / 'samples.jsonl'}:{number}: a question without `bench` and `id`")
        yield (bench, id), row


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
