"""The report of a suite, from its files alone: HTML and Markdown, pictures, a CSV, a summary."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paravt.chat import seconds
from paravt.episodes import load_episodes
from paravt.files import write_whole
from paravt.lab.claims import Claim, all_claims, met
from paravt.lab.columns import collapse_table, contrast_table, section_tables, trained
from paravt.lab.intervals import estimate
from paravt.lab.logs import episodes_file
from paravt.lab.table import RowResult, Table, budgets, read_table
from paravt.report.bands import Band, plot_bands, plot_points, smooth
from paravt.report.pages import render_html, render_markdown
from paravt.types import Crop, Episode

_PANELS = {"f graded": "f_graded", "f strict": "f_strict", "kappa": "kappa", "accuracy": "reward/accuracy",
           "entropy (nats)": "entropy", "junk after the answer": "junk"}  # fmt: skip
_SAMPLES = 3
_RULES = (
    "Means over seeds with 95 % intervals of Student's t. A comparison is reproduced where it holds and the intervals "
    "do not overlap, not reproduced where the opposite does, and depends otherwise; a bound has to be outside of the "
    "interval. One seed has no interval, and its mean stands for 0.05 to both sides: means that are closer than 0.1 "
    "say nothing. Seeds are those of reinforcement learning and of the evaluation's "
    "questions; all start from the same models, and rows without training differ by their questions alone."
)
_COLLAPSE = (
    "If direct answers already pay as much as those with the tool, plain reinforcement learning has no reason to keep "
    "calling. Accuracy of each start at the largest K, in the episodes without and with executed calls, and where "
    "vanilla went from it. All doses are listed, those that do not collapse too."
)
_SAMPLES_NOTE = "The first questions of the first seed at the smallest K, not chosen by hand."


def write_report(directory: Path) -> None:
    """Write everything anew from the files of a suite. Raises DataError if they are not there or not readable."""
    table = read_table(directory)
    pictures = draw(table)
    names = {name: f"{name}.png" for name in pictures}
    for name, data in pictures.items():
        (directory / names[name]).write_bytes(data)
    values = contents(table, pictures)
    write_whole(directory / "report.html", render_html("lab.html.jinja", values, pictures))
    write_whole(directory / "report.md", render_markdown("lab.md.jinja", values, names))
    write_whole(directory / "table.csv", as_csv(table))
    write_whole(directory / "summary.json", json.dumps(summary(table), indent=1) + "\n")


def contents(table: Table, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    """What the templates show."""
    sections = []
    for name, section in table.suite.sections.items():
        tables = section_tables(table, name)
        drawn = [picture for picture in (f"curves-{name}", f"budgets-{name}") if picture in pictures]
        if tables:
            sections.append({"title": section.title, "tables": tables, "pictures": drawn})
    versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    return {
        "about": f"Mode {table.mode}, {table.seeds} {'seed' if table.seeds == 1 else 'seeds'}, {len(table.rows)} rows.",
        "made": versions,
        "unfinished": table.unfinished,
        "rules": _RULES,
        "claims": all_claims(table),
        "targets": targets(table),
        "sections": sections,
        "contrasts": contrast_table(table),
        "collapse_note": _COLLAPSE,
        "collapse": collapse_table(table),
        "criteria": list(criteria(table).items()),
        "samples_note": _SAMPLES_NOTE,
        "samples": samples(table),
    }


def targets(table: Table) -> list[Claim]:
    return [met(table.get, target, target.row) for target in table.suite.targets]


def criteria(table: Table) -> dict[str, list[Claim]]:
    """For every dose, which criteria of a start it meets."""
    return {
        name: [met(table.get, criterion, dose.start) for criterion in table.suite.criteria]
        for name, dose in table.suite.doses.items()
        if dose.start in table.rows
    }


# ---------------------------------------------------------------------------------------------------- numbers


def summary(table: Table) -> dict[str, Any]:
    """All numbers: for each row those of each seed, and the means with their intervals."""
    return {
        "mode": table.mode,
        "seeds": table.seeds,
        "versions": dict(table.versions),
        "unfinished": list(table.unfinished),
        "rows": {name: _row_summary(row) for name, row in table.rows.items()},
        "doses": {name: dose.model_dump() for name, dose in table.suite.doses.items()},
        "claims": [asdict(claim) for claim in all_claims(table)],
        "targets": [asdict(claim) for claim in targets(table)],
        "criteria": {name: [asdict(claim) for claim in claims] for name, claims in criteria(table).items()},
    }


def _row_summary(row: RowResult) -> dict[str, Any]:
    means = {}
    for column in row.columns:
        found = row.estimate(column)
        if found is not None:
            means[column] = {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.n}
    published = row.row.published
    return {
        "section": row.row.section,
        "by_seed": {str(seed): numbers for seed, numbers in row.numbers.items()},
        "means": means,
        "published_at_8B": None if published is None else published.model_dump(exclude_none=True),
    }


def as_csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "column", "mean", "low", "high", "seeds"])
    for name, row in table.rows.items():
        for column in row.columns:
            if (found := row.estimate(column)) is not None:
                writer.writerow([name, column, found.mean, found.low, found.high, found.n])
    return out.getvalue()


# ---------------------------------------------------------------------------------------------------- pictures


def draw(table: Table) -> dict[str, bytes]:
    out = {}
    for name in table.suite.sections:
        rows = [row for row in table.rows.values() if row.row.section == name]
        if any(row.curves for row in trained(rows)):
            out[f"curves-{name}"] = plot_bands(_curves(trained(rows), _PANELS), "step")
        if any(row.numbers for row in rows):
            out[f"budgets-{name}"] = plot_bands(_budgets(rows), "K", log_x=True)
    pairs = table.suite.contrasts.values()
    rows = [table.rows[row] for pair in pairs for row in (pair.strong, pair.weak) if row in table.rows]
    if any(row.curves for row in rows):
        out["contrast"] = plot_bands(_curves(rows, {k: _PANELS[k] for k in ("f graded", "kappa", "accuracy")}), "step")
    k = max(table.budgets)
    points = {}
    for name, dose in table.suite.doses.items():
        direct, tool, ended = (
            table.get(dose.start, f"accuracy/K{k}/direct"),
            table.get(dose.start, f"accuracy/K{k}/tool"),
            table.get(dose.vanilla, "kappa"),
        )
        if direct and tool and ended:
            points[name] = (direct.mean - tool.mean, ended.mean)
    if points:
        out["collapse"] = plot_points(points, f"start: direct - tool accuracy at K = {k}", "kappa after vanilla")
    return out


def _curves(rows: Sequence[RowResult], panels: Mapping[str, str]) -> dict[str, dict[str, Band]]:
    return {title: {row.title: _band(row, key) for row in rows if row.curves} for title, key in panels.items()}


def _band(row: RowResult, key: str) -> Band:
    """A metric over the steps that all seeds have, smoothed, with its interval."""
    lines = [smooth([_number(line.get(key)) for line in curve]) for curve in row.curves.values()]
    found = [estimate(values) for values in zip(*lines, strict=False)]
    mean = [math.nan if e is None else e.mean for e in found]
    low = [math.nan if e is None or e.low is None else e.low for e in found]
    high = [math.nan if e is None or e.high is None else e.high for e in found]
    return list(range(1, len(found) + 1)), mean, low, high


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _budgets(rows: Sequence[RowResult]) -> dict[str, dict[str, Band]]:
    """Accuracy and kappa of the last checkpoint over K."""
    out: dict[str, dict[str, Band]] = {}
    for what in ("accuracy", "kappa"):
        for row in rows:
            known = budgets([row])
            found = [e for k in known if (e := row.estimate(f"{what}/K{k}")) is not None]
            if len(found) == len(known) and known:
                reach = [e.half or 0.0 for e in found]
                low = [e.mean - r for e, r in zip(found, reach, strict=True)]
                high = [e.mean + r for e, r in zip(found, reach, strict=True)]
                out.setdefault(what, {})[row.title] = (known, [e.mean for e in found], low, high)
    return out


# ---------------------------------------------------------------------------------------------------- samples


def samples(table: Table) -> list[dict[str, Any]]:
    """The same questions as several rows answered them."""
    rows = [table.rows[name] for name in table.suite.samples if name in table.rows]
    seed = min((seed for row in rows for seed in row.evaluations), default=None)
    if seed is None:
        return []
    budget = min(table.budgets)
    files = {row.title: episodes_file(row.evaluations[seed], budget) for row in rows
             if seed in row.evaluations}  # fmt: skip
    played = {name: load_episodes(path) for name, path in files.items() if path.exists()}
    shown: dict[str, dict[str, Any]] = {}
    for name, episodes in played.items():
        for episode in episodes[:_SAMPLES]:
            sample = episode.sample
            entry = shown.setdefault(sample.id, {"question": sample.question, "answer": sample.answer or "-",
                                                 "budget": budget, "episodes": []})  # fmt: skip
            entry["episodes"].append({"row": name, **_shown_episode(episode)})
    return list(shown.values())


def _shown_episode(episode: Episode) -> dict[str, Any]:
    turns = [
        {"text": turn.text, "reports": [_report(crop) for crop in episode.crops if crop.turn == number]}
        for number, turn in enumerate(episode.turns)
    ]
    right = episode.rewards["accuracy"].value
    said = "no answer" if episode.answer is None else f"answer {episode.answer}"
    return {"summary": f"{said}; accuracy {'unscored' if right is None else f'{right:.2f}'}", "turns": turns}


def _report(crop: Crop) -> str:
    window = f"[{seconds(crop.window.start_time)} - {seconds(crop.window.end_time)} s] " if crop.window else ""
    return f"{window}{crop.status}: {crop.report if crop.report is not None else crop.error or '-'}"
