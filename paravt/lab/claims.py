"""What the paper claims, and whether the suite's numbers bear it out: each claim a rule over the table.

A claim is made of comparisons. One of them is "reproduced" where it holds and the 95 % intervals over seeds do not
overlap, "not" where the opposite does, "depends" otherwise; a bound has to be outside of the interval. A claim is
reproduced if all of its comparisons are, not if any is not. Rows or columns that are missing make it "not run". The
mean of one seed stands for 0.05 to both sides (`Estimate.reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paravt.lab.intervals import Estimate, compare
from paravt.lab.suite_recipe import Check, Criterion
from paravt.lab.table import Table

Verdict = Literal["reproduced", "not", "depends", "not run"]


@dataclass(frozen=True)
class Finding:
    """A comparison and what came of it."""

    verdict: Verdict
    numbers: str


@dataclass(frozen=True)
class Claim:
    statement: str
    rule: str
    verdict: Verdict
    numbers: str


Get: TypeAlias = Callable[[str, str], "Estimate | None"]
"""`get(row, column)`: `Table.get`, or anything like it."""


def shown(value: Estimate | None) -> str:
    """Two digits, with the interval where there is one."""
    if value is None:
        return "-"
    return f"{value.mean:.2f}" if value.half is None else f"{value.mean:.2f} ± {value.half:.2f}"


def higher(get: Get, column: str, row: str, other: str) -> Finding:
    """The column is higher in one row than in another."""
    one, two = get(row, column), get(other, column)
    numbers = f"{column}: {row} {shown(one)}, {other} {shown(two)}"
    if one is None or two is None:
        return Finding("not run", numbers)
    verdict: dict[str, Verdict] = {"above": "reproduced", "below": "not", "unclear": "depends"}
    return Finding(verdict[compare(one, two)], numbers)


def at_most(get: Get, column: str, row: str, bound: float) -> Finding:
    value = get(row, column)
    numbers = f"{column}: {row} {shown(value)}, at most {bound:g}"
    return Finding("not run", numbers) if value is None else _within(bound - value.mean, value.reach, numbers)


def at_least(get: Get, column: str, row: str, bound: float) -> Finding:
    value = get(row, column)
    numbers = f"{column}: {row} {shown(value)}, at least {bound:g}"
    return Finding("not run", numbers) if value is None else _within(value.mean - bound, value.reach, numbers)


def _within(room: float, reach: float, numbers: str) -> Finding:
    """`room` is how far inside of its bound a mean is: all that it reaches has to be on one side."""
    return Finding("reproduced" if room >= reach else "not" if room < -reach else "depends", numbers)


def fraction(get: Get, column: str, row: str, other: str, share: float) -> Finding:
    """The column is in one row at most a share of what it is in another."""
    one, two = get(row, column), get(other, column)
    numbers = f"{column}: {row} {shown(one)}, {other} {shown(two)}, at most {share:g} of it"
    if one is None or two is None:
        return Finding("not run", numbers)
    scaled = Estimate(tuple(value * share for value in two.values))
    return _within(scaled.mean - one.mean, one.reach + scaled.reach, numbers)


def all_of(findings: Sequence[Finding]) -> Verdict:
    verdicts = {finding.verdict for finding in findings}
    order: tuple[Verdict, ...] = ("not run", "not", "depends")
    return next((verdict for verdict in order if verdict in verdicts), "reproduced")


def claim(statement: str, rule: str, *findings: Finding) -> Claim:
    return Claim(statement, rule, all_of(findings), "; ".join(finding.numbers for finding in findings))


# ---------------------------------------------------------------------------------------------------- the paper's


def skips_the_tool(get: Get) -> Claim:
    return claim(
        "Plain GRPO on the answer alone makes a model with a strong tool prior stop calling (kappa 2.50 to .02)",
        "kappa after vanilla is at most a quarter of the start's",
        fraction(get, "kappa", "vanilla", "sft", 0.25),
    )


def keeps_the_format_broken(get: Get) -> Claim:
    return claim(
        "Plain GRPO does not mend the format (f .13 before, .13 in training)",
        "f in vanilla's training is no higher than the start's, up to .05",
        _no_higher_by(get, ("vanilla", "train/f_graded"), ("sft", "f_graded"), 0.05),
    )


def _no_higher_by(get: Get, one: tuple[str, str], two: tuple[str, str], by: float) -> Finding:
    """The first number is not above the second by more than `by`."""
    first, second = get(*one), get(*two)
    numbers = f"{one[1]}: {one[0]} {shown(first)}; {two[1]}: {two[0]} {shown(second)}"
    if first is None or second is None:
        return Finding("not run", numbers)
    return _within(by - (first.mean - second.mean), first.reach + second.reach, numbers)


def anchoring_mends_the_format(get: Get) -> Claim:
    return claim(
        "Exploration anchoring raises the format (f .35 against vanilla's .13)",
        "f in training is higher with anchoring than in vanilla, and strict format at the end is too",
        higher(get, "train/f_graded", "anchoring", "vanilla"),
        higher(get, "f_strict", "anchoring", "vanilla"),
    )


def gating_keeps_the_calls(get: Get) -> Claim:
    return claim(
        "nFrames gating keeps the model calling (kappa 1.36 against vanilla's .02)",
        "kappa in training is higher with gating than in vanilla",
        higher(get, "train/kappa", "gating", "vanilla"),
    )


def gating_leaves_the_format(get: Get) -> Claim:
    return claim(
        "Gating alone does not mend the format (f .10 against vanilla's .13)",
        "f in training is lower with gating than in vanilla, or not apart from it (then this depends)",
        higher(get, "train/f_graded", "vanilla", "gating"),
    )


def anchoring_leaves_the_calls(get: Get) -> Claim:
    return claim(
        "Anchoring alone keeps few calls (kappa .19 against gating's 1.36)",
        "kappa in training is lower with anchoring than with gating",
        higher(get, "train/kappa", "gating", "anchoring"),
    )


def full_has_both(get: Get) -> Claim:
    return claim(
        "PARA-GRPO has both the format and the calls (f .41, kappa .21 against .13, .02)",
        "f and kappa in training are higher in full than in vanilla",
        higher(get, "train/f_graded", "full", "vanilla"),
        higher(get, "train/kappa", "full", "vanilla"),
    )


def full_is_more_accurate(get: Get) -> Claim:
    return claim(
        "PARA-GRPO is more accurate than plain GRPO (62.1 against 62.0; 65.0 against 64.5)",
        "accuracy over all K is higher in full than in vanilla",
        higher(get, "accuracy", "full", "vanilla"),
    )


def tool_reward_matters(get: Get) -> Claim:
    return claim(
        "Without the tool reward the calls go (kappa .04 against .21)",
        "kappa in training is higher in full than in minus_tool",
        higher(get, "train/kappa", "full", "minus_tool"),
    )


def penalty_matters(get: Get) -> Claim:
    return claim(
        "Without the penalty the format is worse (f .36 against .41)",
        "f in training is higher in full than in minus_penalty",
        higher(get, "train/f_graded", "full", "minus_penalty"),
    )


def parallel_is_better(get: Get) -> Claim:
    return claim(
        "Parallel dispatch is more accurate than sequential on the same checkpoint (65.0 against 64.1)",
        "accuracy over all K is higher with parallel dispatch",
        higher(get, "accuracy", "full", "dispatch-sequential"),
    )


def weak_prior_is_tidy(get: Get) -> Claim:
    return claim(
        "With a weak tool prior the format holds and the tool is not called (f .85, 0 % calls)",
        "in vanilla's training from the weak prior, f is at least .8 and kappa at most .05",
        at_least(get, "train/f_graded", "weak-vanilla", 0.8),
        at_most(get, "train/kappa", "weak-vanilla", 0.05),
    )


def paradox(get: Get) -> Claim:
    return claim(
        "The paradox: the model with the stronger tool prior has the worse format (f .13 against .85)",
        "f in vanilla's training is higher from the weak prior than from the strong one",
        higher(get, "train/f_graded", "weak-vanilla", "vanilla"),
    )


CLAIMS: tuple[Callable[[Get], Claim], ...] = (
    skips_the_tool,
    keeps_the_format_broken,
    paradox,
    weak_prior_is_tidy,
    anchoring_mends_the_format,
    gating_keeps_the_calls,
    gating_leaves_the_format,
    anchoring_leaves_the_calls,
    full_has_both,
    full_is_more_accurate,
    tool_reward_matters,
    penalty_matters,
    parallel_is_better,
)


# ---------------------------------------------------------------------------------------------------- declared


def met(get: Get, check: Check) -> Claim:
    """What became of a target: "reproduced" is met."""
    findings = []
    rules = []
    if check.at_least is not None:
        findings.append(at_least(get, check.column, check.row, check.at_least))
        rules.append(f"{check.column} of {check.row} is at least {check.at_least:g}")
    if check.at_most is not None:
        findings.append(at_most(get, check.column, check.row, check.at_most))
        rules.append(f"{check.column} of {check.row} is at most {check.at_most:g}")
    if check.above is not None:
        findings.append(higher(get, check.column, check.row, check.above))
        rules.append(f"{check.column} of {check.row} is above that of {check.above}, the intervals apart")
    if check.than is not None:
        findings.append(_than(get, check.row, check.column, check.than, check.by))
        rules.append(_than_rule(check.column, check.than, check.by))
    return claim(check.name, " and ".join(rules), *findings)


def criterion_met(get: Get, criterion: Criterion, row: str) -> Claim:
    """Does a start meet a criterion; all seeds of a start are one model, asked other questions."""
    return met(get, Check(row=row, **criterion.model_dump()))


def _than(get: Get, row: str, column: str, other: str, by: float) -> Finding:
    one, two = get(row, column), get(row, other)
    numbers = f"{row}: {column} {shown(one)}, {other} {shown(two)}"
    if one is None or two is None:
        return Finding("not run", numbers)
    return _within(one.mean - two.mean - by, one.reach + two.reach, numbers)


def _than_rule(column: str, other: str, by: float) -> str:
    if by == 0:
        return f"{column} is at least {other}"
    return f"{column} is at least {other} {'+' if by > 0 else '-'} {abs(by):g}"


def all_claims(table: Table) -> list[Claim]:
    return [function(table.get) for function in CLAIMS]
