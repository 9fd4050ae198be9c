"""What a path holds: runs of reinforcement learning, supervised training or an evaluation, a suite, or episodes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from paravt.errors import DataError
from paravt.report.episode_files import Decode, Spec, evaluated_line, plain_line
from paravt.report.evaluations import Known, bench_line, read_known
from paravt.report.reading import Notes, parse, part, read_metrics, read_object, read_text, real_directory
from paravt.report.schema import Run, RunKind, Table

_MOST_WARNINGS = 200
_STEP = re.compile(r"step-(\d{1,12})\.jsonl")
_SEED = re.compile(r"[-_., =]*(?:seed)?[-_., =]*$", re.IGNORECASE)
_HOLDS = (
    "a run has recipe.json and metrics.jsonl, an evaluation benches.json, a suite plan.json; files of episodes end in "
    ".json or .jsonl"
)


@dataclass
class Source:
    """A run: where its files are. What changes while it goes on is read when it is asked for."""

    kind: RunKind
    name: str
    path: Path
    """Its directory, or the directory of its one file."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Path, ...] = ()
    """Of training: files whose columns belong side by side."""
    made: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[], list[Spec]] = list
    tables: list[Table] = field(default_factory=list)
    roots: tuple[Path, ...] = ()
    """Where videos may be opened, if the user names no directories."""
    evaluation: Known | None = None
    """Of runs of `paravt eval`."""
    group: str = ""
    """The name of all runs that differ in nothing but the seed; "" until all of them are known."""

    def describe(self, notes: Notes) -> Run:
        """All but the episodes, as its files are now."""
        warnings = (read_text(self.path / "warnings.txt", self.path, notes) or "") if self.kind == "rl" else ""
        return {
            "id": "",
            "name": self.name,
            "group": self.group or self.name,
            "kind": self.kind,
            "seed": _seed(self.recipe),
            "made": {**_versions(self.path, notes), **self.made},
            "recipe": json.dumps(self.recipe, indent=1) if self.recipe else None,
            "warnings": [line for line in warnings.splitlines() if line.strip()][:_MOST_WARNINGS],
            "metrics": read_metrics(self.metrics, self.path, notes) if self.metrics else None,
            "tables": self.tables,
            "episodes": [],
        }


def find_sources(paths: Sequence[Path], notes: Notes) -> list[Source]:
    """The runs of some paths, in their order. Raises DataError for a path that holds none."""
    out: list[Source] = []
    for path in paths:
        if not os.path.lexists(path):
            raise DataError(f"{path}: there is no such file or directory")
        found = _file(path) if path.is_file() else _directory(path, notes)
        if not found and path.is_dir():
            found = [source for inside in _inside(path, notes) for source in _directory(inside, notes)]
        if not found:
            raise DataError(f"{path}: holds no run: {_HOLDS}")
        out += found
    _tell_apart(out)
    _name_groups(out)
    return out


def _directory(path: Path, notes: Notes) -> list[Source]:
    if (path / "plan.json").is_file() and (path / "stages").is_dir():
        from paravt.report.suites import suite_sources

        return suite_sources(path, notes)
    if (path / "benches.json").is_file():
        return [_evaluation(path, notes)]
    recipe = read_object(path / "recipe.json", path, notes)
    if "stages" in recipe:
        return sft_sources(path, path.name, recipe)
    if "rollout" in recipe or (path / "metrics.jsonl").is_file() or _steps(path):
        return [rl_source(path, path.name, recipe)]
    if "evaluation" in recipe:
        return [lab_source(path, path.name, recipe)]
    specs = _saved(path)
    return [Source("episodes", path.name, path, files=lambda: _saved(path), roots=(path,))] if specs else []


def _file(path: Path) -> list[Source]:
    if path.suffix not in (".json", ".jsonl") or not _holds_episodes(path):
        return []
    spec = Spec(path, path.parent, _step(path.name), plain_line)
    return [Source("episodes", path.stem, path.parent, files=lambda: [spec], roots=(path.parent,))]


def _inside(path: Path, notes: Notes) -> list[Path]:
    try:
        found = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    own = [entry for entry in found if real_directory(entry, path, notes)]
    if found and not own:
        raise DataError(f"{path}: its directories are links out of it; name what they lead to")
    return sorted(own, key=natural)


def natural(path: Path) -> list[tuple[str, int]]:
    """Sorts K4 before K16."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", path.name)]


# ---------------------------------------------------------------------------------------------------- kinds of runs


def rl_source(path: Path, name: str, recipe: Mapping[str, Any]) -> Source:
    anchor, std = part(recipe, "anchor").get("credit"), recipe.get("std", True)

    def files() -> list[Spec]:
        return [
            Spec(file, path, _step(file.name), plain_line, std=std is not False, from_credit=anchor == "marks")
            for file in _steps(path)
        ]

    return Source(
        "rl",
        name,
        path,
        recipe,
        (path / "metrics.jsonl", path / "timings.jsonl"),
        files=files,
        roots=tuple(_data_roots(part(recipe, "data"))),
    )


def sft_sources(path: Path, name: str, recipe: Mapping[str, Any]) -> list[Source]:
    """One for each stage: they count their steps from one, each on data of its own."""
    stages = recipe.get("stages")
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    plain = [stage for stage in names if isinstance(stage, str) and Path(stage).name == stage]
    return [
        Source(
            "sft",
            name if len(plain) == 1 else f"{name}, {stage}",
            path,
            recipe,
            (path / f"{stage}.jsonl", path / f"{stage}.timings.jsonl"),
            {"stage": stage},
        )
        for stage in plain
    ]


def lab_source(path: Path, name: str, recipe: Mapping[str, Any]) -> Source:
    """An evaluation of a suite."""

    def files() -> list[Spec]:
        found = sorted((path / "episodes").glob("K*.jsonl"), key=natural)
        return [Spec(file, path, None, evaluated_line) for file in found]

    return Source("evaluation", name, path, recipe, files=files)


def _evaluation(path: Path, notes: Notes) -> Source:
    recipe = read_object(path / "recipe.json", path, notes)
    known = read_known(path, notes)
    decode: Decode = bench_line(known)
    made = {
        "model": str(part(recipe, "model").get("name", "")),
        "mode": str(part(recipe, "mode").get("name", "")),
        "questions from": ", ".join(known.sources),
    }

    def files() -> list[Spec]:
        return [Spec(path / "rows.jsonl", path, None, decode, last_counts=True)]

    roots = tuple(root for source in known.sources for root in _roots_of(source))
    shown = {name: value for name, value in made.items() if value}
    return Source("evaluation", path.name, path, recipe, made=shown, files=files, roots=roots, evaluation=known)


def _data_roots(data: Mapping[str, Any]) -> Iterable[Path]:
    """The directories of a recipe's data."""
    if data.get("kind") == "jsonl":
        yield from _roots_of(data.get("path"))
    elif data.get("kind") == "rows":
        yield from _roots_of(data.get("root"))
        files = data.get("files")
        for file in files if isinstance(files, list) else ():
            yield from _roots_of(file)


def _roots_of(value: object) -> Iterable[Path]:
    """A directory that is there, or that of a file that is there; never the root of the file system."""
    if not isinstance(value, str) or not value:
        return
    path = Path(value)  # `os.path` says no to what cannot be a name, where `Path` raises
    root = path if os.path.isdir(path) else path.parent if os.path.isfile(path) else None
    if root is not None and root.resolve() != Path(root.resolve().anchor):
        yield root


# ---------------------------------------------------------------------------------------------------- files


def _steps(path: Path) -> list[Path]:
    """The files of episodes of a training, in order."""
    return sorted(
        (file for file in (path / "episodes").glob("step-*.jsonl") if _STEP.fullmatch(file.name)), key=natural
    )


def _step(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def _saved(path: Path) -> list[Spec]:
    """Files of episodes that somebody saved to a directory."""
    files = [file for suffix in ("json", "jsonl") for file in path.glob(f"*.{suffix}") if file.is_file()]
    return [
        Spec(file, path, _step(file.name), plain_line) for file in sorted(files, key=natural) if _holds_episodes(file)
    ]


def _holds_episodes(path: Path) -> bool:
    """A look at the beginning: episodes are many, and are read later."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError:
        return False
    first = parse(head.partition(b"\n")[0])
    if isinstance(first, dict):
        return "sample" in first and "main" in first
    return b'"sample"' in head and b'"format"' in head


def _versions(path: Path, notes: Notes) -> dict[str, str]:
    found = read_object(path / "versions.json", path, notes)
    return {"directory": str(path), **{str(name): str(value) for name, value in found.items()}}


def _seed(recipe: Mapping[str, Any]) -> int | None:
    seed = recipe.get("seed", part(recipe, "episode").get("seed"))
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


# ---------------------------------------------------------------------------------------------------- names


def _tell_apart(sources: Sequence[Source]) -> None:
    """Runs of one name get the directory that theirs is in, or else a number."""
    for again in (False, True):
        names = [source.name for source in sources]
        seen: dict[str, int] = {}
        for source in sources:
            if names.count(source.name) > 1:
                seen[source.name] = seen.get(source.name, 0) + 1
                path = source.path.resolve()
                where = path.parent if path.name == source.name else path
                source.name += f" ({seen[source.name]})" if again else f" ({where.name})"


def _name_groups(sources: Sequence[Source]) -> None:
    alike: dict[str, list[Source]] = {}
    for source in sources:
        recipe = {name: value for name, value in source.recipe.items() if name != "seed"}
        key = json.dumps([source.kind, source.made.get("stage"), recipe], sort_keys=True, default=str)
        if not source.group:
            alike.setdefault(key if recipe else source.name, []).append(source)
    taken = {source.group for source in sources}
    for members in alike.values():
        name = members[0].name
        if len(members) > 1:
            name = _SEED.sub("", _beginning([member.name for member in members])) or _several(
                [member.name for member in members]
            )
        while name in taken:
            name += " (another recipe)"
        taken.add(name)
        for member in members:
            member.group = name


def _several(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _beginning(names: Sequence[str]) -> str:
    """What all of them begin with."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same)
