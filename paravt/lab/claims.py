"""What the paper claims, and whether the suite's numbers bear it out: each claim a rule over the table.

A rule is made of comparisons. One of them is "reproduced" where it holds and the 95 % intervals over seeds do not
overlap, "not" where the opposite does, "depends" otherwise; a bound has to be outside of the interval. A claim is
reproduced if all of its comparisons are, not if any is not. Rows or columns that are missing make it "not run". The
mean of one seed stands for 0.05 to both sides (`Estimate.reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paravt.lab.intervals import Estimate, compare
from paravt.lab.suite_recipe import Criterion
from paravt.lab.table import Table

Verdict = Literal["reproduced", "not", "depends", "not run"]


@dataclass(frozen=True)
class Finding:
    """A comparison and what came of it."""

    verdict: Verdict
    numbers: str


Get: TypeAlias = Callable[[str, str], "Estimate | None"]
"""`get(row, column)`: `Table.get`, or anything like it."""
Comparison: TypeAlias = Callable[[Get], Finding]


@dataclass(frozen=True)
class Rule:
    statement: str
    words: str
    """What the comparisons say together."""
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True)
class Claim:
    """A rule and what came of it."""

    statement: str
    rule: str
    verdict: Verdict
    numbers: str


def judge(rule: Rule, get: Get) -> Claim:
    findings = [comparison(get) for comparison in rule.comparisons]
    numbers = "; ".join(finding.numbers for finding in findings)
    return Claim(rule.statement, rule.words, all_of(findings), numbers)


def all_of(findings: Sequence[Finding]) -> Verdict:
    verdicts = {finding.verdict for finding in findings}
    order: tuple[Verdict, ...] = ("not run", "not", "depends")
    return next((verdict for verdict in order if verdict in verdicts), "reproduced")


# ---------------------------------------------------------------------------------------------------- comparisons


def higher(column: str, row: str, other: str) -> Comparison:
    """The column is higher in one row than in another."""

    def find(get: Get) -> Finding:
        one, two = get(row, column), get(other, column)
        numbers = f"{column}: {row} {shown(one)}, {other} {shown(two)}"
        if one is None or two is None:
            return Finding("not run", numbers)
        verdict: dict[str, Verdict] = {"above": "reproduced", "below": "not", "unclear": "depends"}
        return Finding(verdict[compare(one, two)], numbers)

    return find


def at_most(column: str, row: str, bound: float) -> Comparison:
    def find(get: Get) -> Finding:
        value = get(row, column)
        numbers = f"{column}: {row} {shown(value)}, at most {bound:g}"
        return Finding("not run", numbers) if value is None else _within(bound - value.mean, value.reach, numbers)

    return find


def at_least(column: str, row: str, bound: float) -> Comparison:
    def find(get: Get) -> Finding:
        value = get(row, column)
        numbers = f"{column}: {row} {shown(value)}, at least {bound:g}"
        return Finding("not run", numbers) if value is None else _within(value.mean - bound, value.reach, numbers)

    return find


def fraction(column: str, row: str, other: str, share: float) -> Comparison:
    """The column is in one row at most a share of what it is in another."""

    def find(get: Get) -> Finding:
        one, two = get(row, column), get(other, column)
        numbers = f"{column}: {row} {shown(one)}, {other} {shown(two)}, at most {share:g} of it"
        if one is None or two is None:
            return Finding("not run", numbers)
        scaled = Estimate(tuple(value * share for value in two.values))
        return _within(scaled.mean - one.mean, one.reach + scaled.reach, numbers)

    return find


def no_higher_by(column: str, row: str, other_column: str, other_row: str, by: float) -> Comparison:
    """A number is not above another one by more than `by`."""

    def find(get: Get) -> Finding:
        one, two = get(row, column), get(other_row, other_column)
        numbers = f"{column}: {row} {shown(one)}; {other_column}: {other_row} {shown(two)}"
        if one is None or two is None:
            return Finding("not run", numbers)
        return _within(by - (one.mean - two.mean), one.reach + two.reach, numbers)

    return find


def above_column(column: str, row: str, other: str, by: float) -> Comparison:
    """A column is at least `by` above another one of the same row; below 0, it may be so much under it."""

    def find(get: Get) -> Finding:
        one, two = get(row, column), get(row, other)
        numbers = f"{row}: {column} {shown(one)}, {other} {shown(two)}"
        if one is None or two is None:
            return Finding("not run", numbers)
        return _within(one.mean - two.mean - by, one.reach + two.reach, numbers)

    return find


def _within(room: float, reach: float, numbers: str) -> Finding:
    """`room` is how far inside of its bound a mean is: all that it reaches has to be on one side."""
    return Finding("reproduced" if room >= reach else "not" if room < -reach else "depends", numbers)


def shown(value: Estimate | None) -> str:
    """Two digits, with the interval where there is one."""
    if value is None:
        return "-"
    return f"{value.mean:.2f}" if value.half is None else f"{value.mean:.2f} ± {value.half:.2f}"


# ---------------------------------------------------------------------------------------------------- the paper's

CLAIMS: Mapping[str, Rule] = {
    "skips the tool": Rule(
        "Plain GRPO on the answer alone makes a model with a strong tool prior stop calling (kappa 2.50 to .02)",
        "kappa after vanilla is at most a quarter of the start's",
        (fraction("kappa", "vanilla", "sft", 0.25),),
    ),
    "keeps the format broken": Rule(
        "Plain GRPO does not mend the format (f .13 before, .13 in training)",
        "f in vanilla's training is no higher than the start's, up to .05",
        (no_higher_by("train/f_graded", "vanilla", "f_graded", "sft", 0.05),),
    ),
    "paradox": Rule(
        "The paradox: the model with the stronger tool prior has the worse format (f .13 against .85)",
        "f in vanilla's training is higher from the weak prior than from the strong one",
        (higher("train/f_graded", "weak-vanilla", "vanilla"),),
    ),
    "weak prior is tidy": Rule(
        "With a weak tool prior the format holds and the tool is not called (f .85, 0 % calls)",
        "in vanilla's training from the weak prior, f is at least .8 and kappa at most .05",
        (at_least("train/f_graded", "weak-vanilla", 0.8), at_most("train/kappa", "weak-vanilla", 0.05)),
    ),
    "anchoring mends the format": Rule(
        "Exploration anchoring raises the format (f .35 against vanilla's .13)",
        "f in training is higher with anchoring than in vanilla, and strict format at the end is too",
        (higher("train/f_graded", "anchoring", "vanilla"), higher("f_strict", "anchoring", "vanilla")),
    ),
    "gating keeps the calls": Rule(
        "nFrames gating keeps the model calling (kappa 1.36 against vanilla's .02)",
        "kappa in training is higher with gating than in vanilla",
        (higher("train/kappa", "gating", "vanilla"),),
    ),
    "gating leaves the format": Rule(
        "Gating alone does not mend the format (f .10 against vanilla's .13)",
        "f in training is lower with gating than in vanilla, or not apart from it (then this depends)",
        (higher("train/f_graded", "vanilla", "gating"),),
    ),
    "anchoring leaves the calls": Rule(
        "Anchoring alone keeps few calls (kappa .19 against gating's 1.36)",
        "kappa in training is lower with anchoring than with gating",
        (higher("train/kappa", "gating", "anchoring"),),
    ),
    "full has both": Rule(
        "PARA-GRPO has both the format and the calls (f .41, kappa .21 against .13, .02)",
        "f and kappa in training are higher in full than in vanilla",
        (higher("train/f_graded", "full", "vanilla"), higher("train/kappa", "full", "vanilla")),
    ),
    "full is more accurate": Rule(
        "PARA-GRPO is more accurate than plain GRPO (62.1 against 62.0; 65.0 against 64.5)",
        "accuracy over all K is higher in full than in vanilla",
        (higher("accuracy", "full", "vanilla"),),
    ),
    "the tool reward matters": Rule(
        "Without the tool reward the calls go (kappa .04 against .21)",
        "kappa in training is higher in full than in minus_tool",
        (higher("train/kappa", "full", "minus_tool"),),
    ),
    "the penalty matters": Rule(
        "Without the penalty the format is worse (f .36 against .41)",
        "f in training is higher in full than in minus_penalty",
        (higher("train/f_graded", "full", "minus_penalty"),),
    ),
    "parallel is better": Rule(
        "Parallel dispatch is more accurate than sequential on the same checkpoint (65.0 against 64.1)",
        "accuracy over all K is higher with parallel dispatch",
        (higher("accuracy", "full", "dispatch-sequential"),),
    ),
}


def all_claims(table: Table) -> list[Claim]:
    return [judge(rule, table.get) for rule in CLAIMS.values()]


# ---------------------------------------------------------------------------------------------------- declared


def met(get: Get, criterion: Criterion, row: str) -> Claim:
    """What became of something that was declared about a row: "reproduced" is met."""
    column, comparisons, words = criterion.column, list[Comparison](), list[str]()
    if criterion.at_least is not None:
        comparisons.append(at_least(column, row, criterion.at_least))
        words.append(f"{column} of {row} is at least {criterion.at_least:g}")
    if criterion.at_most is not None:
        comparisons.append(at_most(column, row, criterion.at_most))
        words.append(f"{column} of {row} is at most {criterion.at_most:g}")
    if criterion.above is not None:
        comparisons.append(higher(column, row, criterion.above))
        words.append(f"{column} of {row} is above that of {criterion.above}, the intervals apart")
    if criterion.than is not None:
        comparisons.append(above_column(column, row, criterion.than, criterion.by))
        margin = f" {'+' if criterion.by > 0 else '-'} {abs(criterion.by):g}" if criterion.by else ""
        words.append(f"{column} is at least {criterion.than}{margin}")
    return judge(Rule(criterion.name, " and ".join(words), tuple(comparisons)), get)
