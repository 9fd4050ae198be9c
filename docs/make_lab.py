"""Write the tables of docs/lab.md and README.md from a run's summary, docs/lab/summary.json: `python docs/make_lab.py`.

A table stands between `<!-- NAME -->` and `<!-- end -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES, SUMMARY = (DOCS / "lab.md", DOCS.parent / "README.md"), DOCS / "lab" / "summary.json"

Summary = Mapping[str, Any]

MAIN = {
    "strict format": "f_strict",
    "in training": "train/f_strict",
    "kappa": "kappa",
    "kappa in training": "train/kappa",
    "accuracy": "accuracy",
    "K = 4": "accuracy/K4",
    "K = 16": "accuracy/K16",
    "K = 64": "accuracy/K64",
    "true reports": "true_reports",
}
SHORT = {name: MAIN[name] for name in ("strict format", "kappa", "accuracy", "K = 4", "K = 64")}
PAPER = {"f (paper, 8 B)": "f", "kappa (paper, 8 B)": "kappa"}
PEERS = {"accuracy": "accuracy", "kappa": "kappa", "bad reports": "faults", "main tokens": "main_tokens"}
COST = {
    "accuracy": "accuracy",
    "K = 4": "accuracy/K4",
    "K = 64": "accuracy/K64",
    "kappa": "kappa",
    "kappa, K = 4": "kappa/K4",
    "kappa, K = 64": "kappa/K64",
    "strict format": "f_strict",
}
FAMILIES = {name: f"accuracy/family/{name}" for name in ("what", "both", "first", "count", "odd", "when")}


def value(row: Summary, column: str) -> str:
    found = row["means"].get(column)
    if found is None:
        return "-"
    digits = 0 if column.endswith("tokens") else 2
    half = "" if found["high"] is None else f" ± {found['high'] - found['mean']:.{digits}f}"
    return f"{found['mean']:.{digits}f}{half}"


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def rows_table(summary: Summary, names: Iterable[str], columns: Mapping[str, str], paper: bool = False) -> str:
    published = PAPER if paper else {}
    lines = []
    for name in names:
        if (row := summary["rows"].get(name)) is not None:
            said = row.get("published_at_8B") or {}
            seeds = str(len(row["by_seed"]))
            cells = [value(row, column) for column in columns.values()]
            lines.append([name, *cells, *(str(said.get(key, "-")) for key in published.values()), seeds])
    return table(["row", *columns, *published, "seeds"], lines)


def section(summary: Summary, name: str, also: Iterable[str] = ()) -> list[str]:
    own = [row for row, found in summary["rows"].items() if found["section"] == name]
    return [*(row for row in also if row in summary["rows"] and row not in own), *own]


def claims(found: Iterable[Mapping[str, str]]) -> str:
    return table(
        ["claim", "", "numbers"], [[one["statement"], f"**{one['verdict']}**", one["numbers"]] for one in found]
    )


def collapse(summary: Summary) -> str:
    """Doses: the start, which criteria it meets, and where plain GRPO went from it."""
    lines = []
    for dose, found in summary["criteria"].items():
        start, after = (summary["rows"].get(summary["doses"][dose][which]) for which in ("start", "vanilla"))
        if start is None or after is None:
            continue
        met = ", ".join(f"{one['statement'].lower()}: {one['verdict']}" for one in found)
        lines.append(
            [
                dose,
                *(value(start, c) for c in ("accuracy/K64/direct", "accuracy/K64/tool", "f_strict", "kappa")),
                *(value(after, c) for c in ("kappa", "f_strict", "accuracy")),
                met,
            ]
        )
    heads = ["dose", "direct, K = 64", "tool, K = 64", "strict format", "kappa"]
    return table([*heads, "kappa after vanilla", "strict after", "accuracy after", "criteria"], lines)


def made(summary: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    seeds = summary["seeds"]
    return f"Mode `{summary['mode']}`, {seeds} seeds; {versions}."


TABLES: Mapping[str, Callable[[Summary], str]] = {
    "made": made,
    "short": lambda s: rows_table(s, ["base", "sft", "vanilla", "gating", "anchoring", "full"], SHORT),
    "main": lambda s: rows_table(s, section(s, "main"), MAIN, paper=True),
    "claims": lambda s: claims(s["claims"]),
    "targets": lambda s: claims(s["targets"]),
    "doses": lambda s: rows_table(s, section(s, "sft", ["base"]), MAIN),
    "collapse": collapse,
    "weak": lambda s: rows_table(s, section(s, "weak", ["sft", "vanilla", "full"]), MAIN, paper=True),
    "dispatch": lambda s: rows_table(
        s, section(s, "dispatch", ["full"]), {**MAIN, "tokens": "tokens", "main tokens": "main_tokens"}
    ),
    "anchoring": lambda s: rows_table(s, section(s, "anchoring", ["anchoring", "anchoring_sequence", "full"]), MAIN),
    "subagents": lambda s: rows_table(
        s, section(s, "subagents", ["vanilla", "gating", "full", "minus_subagents"]), MAIN
    ),
    "peers": lambda s: rows_table(s, section(s, "peers", ["full", "dispatch-sequential"]), PEERS),
    "cost": lambda s: rows_table(s, section(s, "cost", ["full"]), COST),
    "gating": lambda s: rows_table(s, section(s, "gating", ["full"]), COST),
    "families": lambda s: rows_table(s, ["sft", "vanilla", "gating", "anchoring", "full"], FAMILIES),
}


def written(text: str, summary: Summary) -> str:
    """The page with its tables made anew."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{TABLES[match[1]](summary)}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)


if __name__ == "__main__":
    found = json.loads(SUMMARY.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8"), found), encoding="utf-8")
        print(page)
