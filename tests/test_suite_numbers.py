"""The numbers behind the suite's report: intervals, claims as rules over numbers made by hand, columns of episodes made
by hand, the order of stages, the hash of the code, the recipes of the package's own suite."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from paravt.algo import FRAME_BUDGETS, draw_frame_budget, pass_rate_weights
from paravt.config import RLRecipe, load_recipe
from paravt.episodes import episode_from_dict, episode_to_dict
from paravt.errors import RecipeError
from paravt.lab import claims, code
from paravt.lab import suite as suite_module
from paravt.lab.columns import cell
from paravt.lab.evaluation_recipe import EvaluationRecipe
from paravt.lab.intervals import Estimate, compare, estimate
from paravt.lab.numbers import evaluation_numbers, training_numbers
from paravt.lab.progress import chains, time_left
from paravt.lab.stages import Stage, is_done, plan_suite
from paravt.lab.suite_recipe import Criterion, load_suite
from paravt.report.bands import smooth
from paravt.report.pages import markdown_block, markdown_line
from paravt.turns import parse_turn
from paravt.types import Crop, Episode, EpisodeError, Sample, Score, Segment, ToolCall, Trace, Window

# ---------------------------------------------------------------------------------------------------- intervals


def test_the_interval_is_that_of_student() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert found.mean == 3.0
    assert found.half == pytest.approx(1.9632, abs=1e-3)  # 2.776 * 1.5811 / sqrt(5)
    assert (found.low, found.high) == (pytest.approx(1.0368, abs=1e-3), pytest.approx(4.9632, abs=1e-3))


def test_one_seed_has_no_interval_but_a_margin() -> None:
    one, near, far = Estimate((0.50,)), Estimate((0.58,)), Estimate((0.61,))
    assert one.half is None
    assert one.low is None
    assert compare(one, near) == "unclear"
    assert (compare(one, far), compare(far, one)) == ("below", "above")
    assert cell(one, "f_strict") == "0.50"
    assert cell(Estimate((99.0, 101.0)), "tokens") == "100 ± 13"


# ---------------------------------------------------------------------------------------------------- claims


def made_of(values: dict[tuple[str, str], tuple[float, ...]]) -> claims.Get:
    return lambda row, column: Estimate(values[row, column]) if (row, column) in values else None


COLLAPSE = {
    ("sft", "kappa"): (2.0, 2.1, 2.2),
    ("vanilla", "kappa"): (0.01, 0.0, 0.02),
    ("sft", "f_graded"): (0.4, 0.41, 0.42),
    ("vanilla", "train/f_graded"): (0.3, 0.31, 0.32),
    ("gating", "train/f_graded"): (0.24, 0.25, 0.24),
    ("vanilla", "train/kappa"): (0.4, 0.42, 0.41),
    ("full", "train/f_graded"): (0.8, 0.81, 0.82),
    ("full", "train/kappa"): (1.4, 1.41, 1.39),
    ("full", "accuracy"): (0.98, 0.97, 0.99),
    ("vanilla", "accuracy"): (0.45, 0.47, 0.46),
}


def judged(name: str, get: claims.Get) -> claims.Claim:
    return claims.judge(claims.CLAIMS[name], get)


def test_claims_that_the_numbers_bear_out() -> None:
    get = made_of(COLLAPSE)
    for name in ("skips the tool", "keeps the format broken", "gating leaves the format", "full has both",
                 "full is more accurate"):  # fmt: skip
        assert judged(name, get).verdict == "reproduced", name
    assert judged("skips the tool", get).numbers == "kappa: vanilla 0.01 ± 0.02, sft 2.10 ± 0.25, at most 0.25 of it"


@pytest.mark.parametrize(
    ("name", "change", "verdict"),
    [
        ("skips the tool", {("vanilla", "kappa"): (1.3, 1.4, 1.35)}, "not"),
        ("skips the tool", {("vanilla", "kappa"): (0.0, 1.4, 0.4)}, "depends"),
        ("keeps the format broken", {("vanilla", "train/f_graded"): (0.8, 0.81, 0.82)}, "not"),
        ("keeps the format broken", {("vanilla", "train/f_graded"): (0.2, 0.4, 0.8)}, "depends"),
        ("gating leaves the format", {("gating", "train/f_graded"): (0.6, 0.61, 0.62)}, "not"),
        ("gating leaves the format", {("gating", "train/f_graded"): (0.2, 0.4, 0.6)}, "depends"),
        ("gating leaves the format", {("gating", "train/f_graded"): (0.29, 0.3, 0.31)}, "depends"),
        ("full has both", {("full", "train/kappa"): (0.1, 0.11, 0.12)}, "not"),
        ("full has both", {("full", "train/kappa"): (0.1, 0.41, 1.4)}, "depends"),
        ("full is more accurate", {("full", "accuracy"): (0.3, 0.98, 0.97)}, "depends"),
    ],
)
def test_claims_that_they_do_not(name: str, change: dict[tuple[str, str], tuple[float, ...]], verdict: str) -> None:
    assert judged(name, made_of({**COLLAPSE, **change})).verdict == verdict


def test_every_claim_is_not_run_without_its_rows() -> None:
    found = [claims.judge(rule, made_of({})) for rule in claims.CLAIMS.values()]
    assert {claim.verdict for claim in found} == {"not run"}
    assert len({claim.statement for claim in found}) == len(found)


def test_the_weak_prior_is_judged_by_bounds() -> None:
    tidy = {("weak-vanilla", "train/f_graded"): (0.96, 0.97), ("weak-vanilla", "train/kappa"): (0.0, 0.0)}
    assert judged("weak prior is tidy", made_of(tidy)).verdict == "reproduced"
    calling = {**tidy, ("weak-vanilla", "train/kappa"): (0.5, 0.51)}
    assert judged("weak prior is tidy", made_of(calling)).verdict == "not"


def test_targets_are_met_by_whole_intervals() -> None:
    target = Criterion(name="t", column="f_strict", at_least=0.95)
    assert claims.met(made_of({("full", "f_strict"): (0.97, 0.98, 0.97)}), target, "full").verdict == "reproduced"
    assert claims.met(made_of({("full", "f_strict"): (0.90, 0.99, 0.98)}), target, "full").verdict == "depends"
    assert claims.met(made_of({("full", "f_strict"): (0.5, 0.51, 0.5)}), target, "full").verdict == "not"
    start = Criterion(name="t", column="direct", than="tool", by=-0.15)
    tool = {("sft", "tool"): (0.60, 0.61, 0.59)}
    for direct, verdict in (
        ((0.60, 0.61, 0.59), "reproduced"),
        ((0.3, 0.31, 0.29), "not"),
        ((0.2, 0.9, 0.7), "depends"),
    ):
        assert claims.met(made_of({("sft", "direct"): direct, **tool}), start, "sft").verdict == verdict


@pytest.mark.parametrize(
    ("check", "values"),
    [
        # one seed: the value with which the check says "reproduced", "depends" and "not", against 0.5 in the other
        ({"at_least": 0.5}, (0.56, 0.51, 0.44)),
        ({"at_most": 0.5}, (0.44, 0.49, 0.56)),
        ({"above": "other"}, (0.61, 0.59, 0.39)),
        ({"than": "g", "by": -0.2}, (0.41, 0.35, 0.19)),
    ],
)
def test_a_target_of_one_seed_keeps_the_margin(check: dict[str, Any], values: tuple[float, ...]) -> None:
    target = Criterion(name="t", column="f", **check)
    for value, verdict in zip(values, ("reproduced", "depends", "not"), strict=True):
        get = made_of({("row", "f"): (value,), ("row", "g"): (0.5,), ("other", "f"): (0.5,)})
        assert claims.met(get, target, "row").verdict == verdict


def test_claims_of_one_seed_keep_the_margin() -> None:
    for value, verdict in ((0.39, "reproduced"), (0.41, "depends"), (0.59, "depends"), (0.61, "not")):
        get = made_of({("vanilla", "kappa"): (value,), ("sft", "kappa"): (2.0,)})  # a quarter is 0.5
        assert judged("skips the tool", get).verdict == verdict
        get = made_of({("gating", "train/f_graded"): (value,), ("vanilla", "train/f_graded"): (0.5,)})
        assert judged("gating leaves the format", get).verdict == verdict
        get = made_of({("vanilla", "train/f_graded"): (value,), ("sft", "f_graded"): (0.45,)})  # up to 0.5
        assert judged("keeps the format broken", get).verdict == verdict


# ---------------------------------------------------------------------------------------------------- columns

CALL = '<think>\nlook here\n</think>\n<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 9}}\n</tool_call><|im_end|>'  # noqa: E501
ANSWER = "<think>\nthe reports say so\n</think>\n<answer>star</answer>"


def episode(budget: int, right: float, calls: int, windows: int, *, junk: str = "", failed: bool = False) -> Episode:
    texts = [CALL] * calls + [f"{ANSWER}{junk}<|im_end|>"]
    segments = [Segment((1, 2, 3), False, "asked")]
    for text in texts:
        segments += [Segment((4, 5), True, text, (-0.1, -0.2)), Segment((6,), False, "next")]
    crop_trace = Trace("crop", "crop", (Segment((7,) * 10, False, "see"), Segment((8,), True, "star", (-0.5,))), "stop")
    crops = tuple(
        Crop(n, 0, "ran", ToolCall("crop_video", {"start_time": 0.0, "end_time": 9.0}), Window(0, 9), "star",
             crop_trace, (0.5,))
        for n in range(calls)
    )  # fmt: skip
    errors = (EpisodeError("engine", "main", "gone", scored=False),) if failed else ()
    return Episode(
        Sample("s", "v", "what?", answer="star", metadata={"windows": windows, "family": "what"}), budget, "parallel",
        Trace("main", "main", tuple(segments), "stop"), tuple(map(parse_turn, texts)), crops, "star",
        rewards={"accuracy": Score(None if failed else right), **({"true_reports": Score(1.0)} if calls else {})},
        errors=errors,
    )  # fmt: skip


def test_columns_of_an_evaluation() -> None:
    episodes = [
        episode(4, 1.0, 2, 2), episode(4, 0.0, 0, 2), episode(64, 1.0, 0, 1, junk=" and more"),
        episode(64, 1.0, 1, 3), episode(64, 0.0, 3, 1, failed=True),
    ]  # fmt: skip
    found = evaluation_numbers(episodes)
    assert (found["episodes"], found["unscored"]) == (5, 1)
    assert found["accuracy"] == 0.75  # of the four that are scored
    assert (found["accuracy/tool"], found["accuracy/direct"]) == (1.0, 0.5)
    assert (found["accuracy/K4"], found["accuracy/K64"]) == (0.5, 1.0)
    assert (found["accuracy/K4/direct"], found["accuracy/K64/tool"]) == (0.0, 1.0)
    assert (found["kappa"], found["kappa/K4"], found["kappa/K64"]) == (0.75, 1.0, 0.5)
    assert (found["kappa/several"], found["accuracy/several"]) == (1.0, pytest.approx(2 / 3))
    assert (found["f_strict"], found["junk"], found["executed"]) == (0.75, 0.25, 1.0)
    assert found["true_reports"] == 1.0
    assert found["turns/ok"] + sum(v for k, v in found.items() if k.startswith("turns/") and k != "turns/ok") == 1
    assert found["accuracy/type/open"] == found["accuracy/family/what"] == 0.75
    assert found["main_tokens"] == 3 + 3 * (1 + 0.75)  # a turn is 3 tokens with what follows it
    assert found["tokens"] == found["main_tokens"] + 0.75 * 11
    assert "faults" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_columns_of_a_training() -> None:
    rows = [{"step": n, "kappa": float(n), "f_graded": None if n == 1 else 0.5} for n in range(1, 21)]
    found = training_numbers(rows, [{"rollout": 20.0, "learn": 10.0}] * 20)
    assert found == {
        "train/kappa": 10.5, "train/kappa/end": 19.5, "train/f_graded": 0.5, "train/f_graded/end": 0.5,
        "train/minutes": 10.0, "train/steps": 20,
    }  # fmt: skip


def test_an_episode_read_back_is_the_episode() -> None:
    for one in (episode(4, 1.0, 2, 2), episode(64, 0.0, 0, 1, failed=True)):
        row = episode_to_dict(one)
        again = episode_from_dict(row)
        assert episode_to_dict(again) == row
        assert dataclasses.replace(again, rewards={}) == dataclasses.replace(one, rewards={})
    with pytest.raises(ValueError, match="format 2"):
        episode_from_dict({**row, "format": 2})


# ---------------------------------------------------------------------------------------------------- stages


def test_the_suite_of_the_package_can_be_planned() -> None:
    suite, path = load_suite()
    quick = suite.modes["quick"]
    plan = plan_suite(suite, path, quick, list(quick.rows or ()), 1)
    assert [run.row for run in plan.runs] == list(quick.rows or ())
    # three models, one made from the other: what both priors have in common, the strong one, its cold start
    assert Counter(stage.kind for stage in plan.stages.values()) == {"sft": 3, "rl": 4, "evaluation": 6}
    every = plan_suite(suite, path, suite.modes["full"], list(suite.rows), 2)
    names = list(every.stages)
    for stage in every.stages.values():
        assert stage.parent is None or names.index(stage.parent) < names.index(stage.name)
    runs = {(run.row, run.seed): run for run in every.runs}
    assert runs["full", 0].training == runs["dispatch-none", 0].training != runs["full", 1].training
    assert runs["full", 0].evaluation != runs["dispatch-none", 0].evaluation
    assert runs["sft", 0].training is None
    assert runs["sft", 0].evaluation == runs["sft-16", 0].evaluation
    full, sft = (every.stages[runs[row, 1].evaluation].recipe for row in ("full", "sft"))
    assert isinstance(full, EvaluationRecipe)
    assert isinstance(sft, EvaluationRecipe)
    assert (full.seed, full.episode.think_prefix, sft.episode.think_prefix) == (1, True, False)


def test_a_row_can_have_fewer_seeds_than_the_suite() -> None:
    suite, path = load_suite()
    rows = {**suite.rows, "sft": suite.rows["sft"].model_copy(update={"seeds": 2})}
    changed = suite.model_copy(update={"rows": rows})
    plan = plan_suite(changed, path, suite.modes["quick"], ["base", "sft"], 3)
    assert Counter(run.row for run in plan.runs) == {"base": 3, "sft": 2}


def test_a_name_says_what_a_stage_is_made_of() -> None:
    suite, path = load_suite()
    plan = plan_suite(suite, path, suite.modes["quick"], ["vanilla"], 1)
    trunk, strong, start, run, last = plan.stages.values()
    for change in ({"label": "another"}, {"parent": None}):
        assert dataclasses.replace(run, **change).name == run.name  # type: ignore[arg-type]
    assert dataclasses.replace(run, code="another").name != run.name
    assert isinstance(run.recipe, RLRecipe)
    assert run.recipe.model.path == start.model == f"{start.name}/cold-start"
    assert last.recipe.model_dump()["model"]["path"] == f"{run.name}/checkpoints/step-{run.recipe.steps:06d}/model"
    assert [stage.parent for stage in (trunk, strong, start, run, last)] == [
        None, trunk.name, strong.name, start.name, run.name,
    ]  # fmt: skip
    models = {**suite.models, "trunk": suite.models["trunk"].model_copy(update={"set": ("seed=9",)})}
    changed = plan_suite(suite.model_copy(update={"models": models}), path, suite.modes["quick"], ["vanilla"], 1)
    assert not set(changed.stages) & set(plan.stages)  # another first stage, and all that follows from it


def test_the_longest_chain_comes_first() -> None:
    def stage(name: str, parent: str | None) -> Stage:
        made = Stage("rl", name, load_recipe(RLRecipe, RECIPE, ["steps=1"]), parent, "")
        made.__dict__["name"] = name
        return made

    stages = {
        s.name: s for s in (stage("a", None), stage("b", "a"), stage("c", "a"), stage("d", "c"), stage("e", None))
    }
    left = {"a": 1.0, "b": 10.0, "c": 2.0, "d": 3.0, "e": 8.0}
    assert chains(stages, left) == {"a": 11.0, "b": 10.0, "c": 5.0, "d": 3.0, "e": 8.0}
    assert time_left(chains(stages, left), left, 2) == 12.0
    assert time_left(chains(stages, left), left, 8) == 11.0
    assert chains(stages, {"c": 2.0, "d": 3.0}) == {"c": 5.0, "d": 3.0}
    assert time_left({}, {}, 2) == 0.0


class Instant:
    """A worker that is done at once."""

    made: ClassVar[list[Instant]] = []

    def __init__(self, stages: Path, log: Path) -> None:
        self.stages, self.stage, self.started = stages, None, 0.0
        self.ran, self.alive = 0, True
        self.made.append(self)

    def run(self, stage: Stage) -> None:
        self.stage = stage  # type: ignore[assignment]
        (self.stages / stage.name / "done.json").write_text('{"seconds": 1}\n')

    def end(self) -> None:
        self.alive = False


@pytest.mark.parametrize("jobs", [1, 3])
def test_workers_end_after_a_few_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    suite, path = load_suite()
    plan = plan_suite(suite, path, suite.modes["quick"], ["base", "sft", "vanilla", "full"], 2)
    monkeypatch.setattr(suite_module, "_Worker", Instant)
    monkeypatch.setattr(suite_module, "_POLL", 0.0)
    monkeypatch.setattr(Instant, "made", [])
    assert suite_module.run_stages(plan, tmp_path, jobs, Console(quiet=True)) == {}
    assert all(is_done(tmp_path, name) for name in plan.stages)
    assert sum(worker.ran for worker in Instant.made) == len(plan.stages) > 2 * suite_module._STAGES_EACH
    assert max(worker.ran for worker in Instant.made) == suite_module._STAGES_EACH
    assert not any(worker.alive for worker in Instant.made)


@pytest.mark.parametrize(("jobs", "most"), [(1, 2), (2, 2), (3, 3)])
def test_stages_of_several_threads_do_not_share_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, most: int
) -> None:
    suite, path = load_suite()
    plan = plan_suite(suite, path, suite.modes["full"], ["vanilla", "weak-vanilla"], 2)
    at_once = []

    class Counted(Instant):
        def run(self, stage: Stage) -> None:
            super().run(stage)
            at_once.append(sum(worker.stage.threads for worker in self.made if worker.stage is not None))

    monkeypatch.setattr(suite_module, "_Worker", Counted)
    monkeypatch.setattr(suite_module, "_POLL", 0.0)
    monkeypatch.setattr(Instant, "made", [])
    assert {stage.threads for stage in plan.stages.values()} == {1, 2}
    assert suite_module.run_stages(plan, tmp_path, jobs, Console(quiet=True)) == {}
    assert max(at_once) == most


def test_the_code_is_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "paravt"
    (package / "report").mkdir(parents=True)
    (package / "prompts").mkdir()
    files = {
        "a.py": "from paravt.b import x\nimport paravt.prompts\nfrom paravt import report\n", "b.py": "x = 1\n",
        "other.py": "y = 1\n", "report/__init__.py": "z = 1\n", "prompts/__init__.py": "", "prompts/p.txt": "ask",
    }  # fmt: skip
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.setattr(code, "_PACKAGE", package)

    def after(name: str, text: str) -> bool:
        """Is the hash another one with this text in a file?"""
        before = code.code_hash.__wrapped__("paravt.a")
        (package / name).write_text(text)
        return code.code_hash.__wrapped__("paravt.a") != before

    assert after("b.py", "x = 2\n")
    assert not after("b.py", '"""What it is for."""\nx = 2  # why\n\n')
    assert after("prompts/p.txt", "ask nicely")
    assert not after("other.py", "y = 2\n")
    assert not after("report/__init__.py", "z = 2\n")
    assert after("b.py", "def f():\n    'text'\n    return 2\n")
    assert not after("b.py", "def f():\n    return 2\n")


def test_the_code_of_a_training_leaves_out_the_command_line_and_the_report() -> None:
    files = {path.relative_to(code._PACKAGE).as_posix() for path in code._closure("paravt.lab.factory")}
    assert {"rl.py", "sft.py", "learner.py", "algo.py", "lab/world.py"} <= files
    others = {"__main__.py", "cli.py", *(f"lab/{name}.py" for name in ("claims", "results", "stages", "suite"))}
    assert not files & others


# ---------------------------------------------------------------------------------------------------- gating

RECIPE = Path(__file__).parents[1] / "recipes" / "lab" / "rl" / "full.yaml"


def test_frame_budgets_are_drawn_by_their_weights() -> None:
    drawn = Counter(draw_frame_budget(0, f"s{n}", 0, weights=(4, 3, 2, 1, 0)) for n in range(4000))
    assert [drawn[k] / 4000 for k in FRAME_BUDGETS] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0], abs=0.03)
    assert draw_frame_budget(1, "s", 2, weights=(1, 1, 1, 1, 1)) == draw_frame_budget(
        1, "s", 2, weights=(2, 2, 2, 2, 2)
    )


def test_weights_by_pass_rate_prefer_what_is_passed_half_of_the_time() -> None:
    assert pass_rate_weights([0.5, None, 1.0, 0.1]) == pytest.approx([0.25, 0.25, 0.05, 0.09])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["budget_weights=[1, 2]"], "2 for 5 frame_budgets"),
        (["budget_weights=pass_rate", "gating=false"], "need gating"),
        (["budget_weights=[1, 2, 3, 4, 0]"], "budget_weights"),
    ],
)
def test_impossible_weights_are_refused(change: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(RLRecipe, RECIPE, change)
    assert load_recipe(RLRecipe, RECIPE, ["budget_weights=[1, 2, 3, 4, 5]"]).rollout_config().budget_weights


# ---------------------------------------------------------------------------------------------------- pages


def test_markdown_keeps_text_as_text() -> None:
    assert (
        markdown_line("a | b\n<i> `c` [d](e) \u202eevil")
        == r"a \| b \<i\> \`c\` \[d\]\(e\) " + "\N{REPLACEMENT CHARACTER}evil"
    )
    assert markdown_block("one\n````\ntwo").split("\n") == ["`````text", "one", "````", "two", "`````"]


def test_smoothing_leaves_gaps_out() -> None:
    assert smooth([1.0, math.nan, 3.0, 5.0], 3) == [1.0, 2.0, 4.0, 4.0]
    assert np.isnan(smooth([math.nan], 3)).all()
