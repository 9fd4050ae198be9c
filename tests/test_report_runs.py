"""Reports of runs as they are really written: reinforcement learning, evaluations, suites, supervised training.

Locked here: what a run saves as credit is what its learner learned from; the rows of an evaluation are those that
count, with the credit of its tables; tables link to the very episodes that they count; flipped rows come first into a
file.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from report_runs import write_run
from test_eval_directory import Answerer, play, samples
from test_rl import QUIET, recipe
from test_suite import SUITE
from test_suite_damage import finished

from paravt.algo import CreditConfig, batch_marks_mean, rows_from_group
from paravt.ask import shipped_model
from paravt.bench.results import read_run
from paravt.bench.summary import verdicts
from paravt.config import SFTRecipe, load_recipe
from paravt.episodes import load_episodes
from paravt.errors import DataError, EngineError
from paravt.lab.factory import train_rl
from paravt.lab.results import write_report as write_suite_report
from paravt.metrics import MetricsFile
from paravt.models import load_model
from paravt.report.episode_files import EpisodeFile, plain_line
from paravt.report.library import Library, linked
from paravt.report.reading import Notes
from paravt.report.schema import Report, Run
from paravt.report.videos import PictureBook, VideoFinder
from paravt.report.write import _in_order
from paravt.spans import byte_reader

ROOT = Path(__file__).parents[1]


def read(*paths: Path) -> tuple[Library, Report, list[str]]:
    library, notes = Library(paths), Notes()
    return library, library.report(notes), notes.lines


# ---------------------------------------------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "rl"
    train_rl(recipe("full", "steps=1"), out, QUIET)
    return out


def test_what_is_saved_as_credit_is_what_was_learned_from(trained: Path) -> None:
    path = trained / "episodes" / "step-000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    episodes = load_episodes(path)
    made = recipe("full", "steps=1")
    config = CreditConfig(made.anchor, std=made.std, subagents=made.subagents)
    tokenizer = load_model(shipped_model()).chat.tokenizer
    groups: dict[str, list[int]] = {}
    for n, line in enumerate(lines):
        groups.setdefault(line["group"], []).append(n)
    batch = [
        ([episodes[n] for n in group], [episodes[n].rewards["total"].value for n in group]) for group in groups.values()
    ]
    make = partial(rows_from_group, config=config, token_bytes=byte_reader(tokenizer),
                   center=batch_marks_mean(batch, config.anchor, byte_reader(tokenizer)))  # fmt: skip
    compared = 0
    for (name, members), (played, rewards) in zip(groups.items(), batch, strict=True):
        rows = make(played, rewards, group_id=name)
        assert rows
        for number, member in enumerate(members):
            credit = lines[member]["credit"]
            traces = {trace.name: trace for trace in played[number].traces}
            assert set(credit) == set(traces)
            mine = [row for row in rows if row.episode_id == f"{name}/{number}"]
            assert sum(paid["advantages"] is not None for paid in credit.values()) == len(mine)
            for row in mine:
                paid = [
                    credit[t.name] for t in traces.values() if t.ids == tuple(row.ids.tolist()) and t.role == row.role
                ]
                assert paid
                for one in paid:
                    assert np.array_equal(np.array(one["advantages"], np.float32), row.advantages[row.mask])
                    ids = row.ids[row.mask].tolist()
                    assert one["spelled"] == [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
                    compared += 1
    assert compared >= 4


def test_a_run_of_learning_shows_its_credit_and_its_frames(trained: Path) -> None:
    library, report, notes = read(trained)
    (run,) = report["runs"]
    assert (run["kind"], notes, len(run["episodes"])) == ("rl", [], 4)
    assert run["metrics"] is not None
    assert "token/mismatch" in run["metrics"]["values"]
    assert "tokens_per_second" in run["metrics"]["values"]
    book = PictureBook(VideoFinder([]))
    views = [view for _, place in library.places() for view in library.chunk(place, book)[0].values()]
    assert len(views) == 4
    for view in views:
        assert all(str(frame["picture"]).startswith("data:image/webp") for frame in view["overview"])
        pieces = [piece for turn in view["turns"] for piece in turn["pieces"] if piece["kind"] == "sampled"]
        assert pieces
        assert all(len(piece["spelled"] or ()) == piece["tokens"] for piece in pieces)
    assert any(
        value for view in views for turn in view["turns"] for p in turn["pieces"] for value in p["advantages"] or ()
    )


def test_supervised_stages_are_runs_of_their_own(tmp_path: Path) -> None:
    made = load_recipe(SFTRecipe, ROOT / "recipes" / "lab" / "trunk.yaml")
    out = tmp_path / "trunk"
    out.mkdir()
    (out / "recipe.json").write_text(made.model_dump_json(indent=1) + "\n")
    for stage in made.stages[:2]:
        metrics, timings = MetricsFile(out / f"{stage.name}.jsonl"), MetricsFile(out / f"{stage.name}.timings.jsonl")
        for step in (1, 2):
            metrics.add(step, {"loss": 2.0 / step})
            timings.add(step, {"seconds": 0.5})
    _, report, notes = read(out)
    assert notes == []
    runs = report["runs"]
    assert [run["name"] for run in runs] == [f"trunk, {stage.name}" for stage in made.stages]
    assert len({run["group"] for run in runs}) == len(runs)
    assert runs[0]["metrics"] == {"step": [1, 2], "values": {"loss": [2.0, 1.0], "seconds": [0.5, 0.5]}}


def test_an_index_reads_on_where_it_ended(tmp_path: Path) -> None:
    out = write_run(tmp_path / "run", steps=1, groups=2, size=4)
    (path,) = (out / "episodes").iterdir()
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:5]) + text[5][:40])
    library = Library([out])
    first = library.report(Notes())["runs"][0]["episodes"]
    assert len(first) == 5
    with path.open("a") as file:
        file.write(text[5][40:] + "".join(text[6:]))
    again = library.report(Notes())["runs"][0]["episodes"]
    assert len(again) == 8
    assert [row["id"] for row in again[:5]] == [row["id"] for row in first]
    spec = library.places().__next__()[1].file.spec
    index = EpisodeFile(spec, "x")
    assert index.refresh(Notes(), 3)  # whole groups, and there is more
    assert len(index.entries) == 4
    assert plain_line(json.loads(text[0])).credit["main"].advantages is not None


# ---------------------------------------------------------------------------------------------------- evaluations


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs on the same questions: the second one gains a question, loses one, and fails on one."""
    directory = tmp_path_factory.mktemp("evaluated")
    rows = samples(6)
    wrong = {"one": ("q1",), "two": ("q2",)}

    def answerer(name: str) -> Answerer:
        def answer(question: str) -> str | EngineError:
            if name == "two" and "q5" in question:
                return EngineError("the server is down")
            return f"<answer>{'A' if any(q in question for q in wrong[name]) else 'B'}</answer>"

        return Answerer(answer)

    for name in wrong:
        play(directory / name, rows, answerer(name))
    return directory / "one", directory / "two"


def shown(report: Report, name: str) -> Run:
    return next(run for run in report["runs"] if run["name"] == name)


def test_evaluations_have_tables_rows_and_what_flipped(evaluated: tuple[Path, Path]) -> None:
    _, report, notes = read(evaluated[0].parent)
    assert notes == []
    one, two = shown(report, "one"), shown(report, "two")
    found = verdicts(read_run(evaluated[1]))
    values = {row["id"]: row["rewards"]["accuracy"] for row in two["episodes"]}
    assert values == {f"{bench}/{id}": row.value for (bench, id), row in found.items()}
    assert sorted(row["rewards"]["accuracy"] or 0 for row in one["episodes"]) == [0, 1, 1, 1, 1, 1]
    titles = [table["title"] for table in two["tables"]]
    assert titles[0] == "Scores, with 95 % intervals"
    assert "Gained against one" in titles
    assert "Lost against one" in titles
    assert any("by kind" in title for title in titles)
    for table in two["tables"]:
        assert all(len(row["cells"]) == len(table["columns"]) for row in table["rows"])
        for row in table["rows"]:
            assert set(row.get("link", ())) <= set(values)
    gained = next(table for table in two["tables"] if table["title"] == "Gained against one")
    assert [row["link"] for row in gained["rows"]] == [["mine/s1"]]
    outcomes = next(table for table in two["tables"] if table["title"] == "What became of the questions")
    assert {row["cells"][1]: row["cells"][2] for row in outcomes["rows"]} == {"right": 4, "wrong": 1, "failed": 1}
    assert all(len(row["link"]) == row["cells"][2] for row in outcomes["rows"])
    assert two["made"]["mode"] == "direct"


def test_flipped_rows_come_first_into_a_file(evaluated: tuple[Path, Path]) -> None:
    library, report, _ = read(*evaluated)
    flipped = linked(report["runs"])
    assert len(flipped) == 2
    order = [{row.row["id"] for row in place.entries} for _, place in _in_order(library, report)]
    ids = {id for _, id in flipped}
    first = next(n for n, chunk in enumerate(order) if not chunk & ids)
    assert all(chunk & ids for chunk in order[:first])
    assert set().union(*order[:first]) >= ids


def test_a_damaged_evaluation_keeps_its_readable_rows(evaluated: tuple[Path, Path], tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    hurt.mkdir()
    for file in evaluated[0].iterdir():
        if file.is_file():
            (hurt / file.name).write_bytes(file.read_bytes())
    lines = (hurt / "rows.jsonl").read_text().splitlines()
    (hurt / "rows.jsonl").write_text("\n".join([lines[0], "{", *lines[2:5], '{"bench": 1}']) + "\n" + lines[5][:100])
    _, report, notes = read(hurt)
    (run,) = report["runs"]
    assert len(run["episodes"]) == 4
    assert run["tables"] == []
    assert any("rows.jsonl:2: not JSON" in note for note in notes)
    assert any("1 line could not be read" in note for note in notes)
    (hurt / "samples.jsonl").write_text("x\n")
    _, report, notes = read(hurt)
    assert report["runs"][0]["episodes"] == []
    assert any("episodes cannot be shown" in note for note in notes)


def test_the_last_row_that_did_not_fail_counts(tmp_path: Path) -> None:
    broken = Answerer(lambda question: EngineError("down") if "q0" in question else "<answer>A</answer>")
    rows = samples(2)
    play(tmp_path / "run", rows, broken)
    play(tmp_path / "run", rows, Answerer())
    _, report, _ = read(tmp_path / "run")
    assert {row["sample"]: row["rewards"]["accuracy"] for row in report["runs"][0]["episodes"]} == {
        "s0": 1.0,
        "s1": 0.0,
    }


# ---------------------------------------------------------------------------------------------------- suites


def test_every_stage_of_a_suite_is_a_run(tmp_path: Path) -> None:
    out = tmp_path / "suite"
    out.mkdir()
    plan = finished(out, SUITE)
    for stage in plan.stages.values():  # as training writes it
        (out / "stages" / stage.name / "recipe.json").write_text(stage.recipe.model_dump_json(indent=1) + "\n")
    _, report, notes = read(out)
    assert any("no summary.json yet" in note for note in notes)
    write_suite_report(out)
    _, report, notes = read(out)
    assert notes == []
    suite, *runs = report["runs"]
    assert suite["name"] == "suite"
    assert any(table["title"].endswith(": evaluated") for table in suite["tables"])
    table = next(table for table in suite["tables"] if table["title"].endswith(": evaluated"))
    assert "kappa" in table["columns"]
    assert {run["kind"] for run in runs} == {"rl", "sft", "evaluation"}
    evaluated = [run for run in runs if run["kind"] == "evaluation"]
    assert all(run["name"].endswith("evaluated") for run in evaluated)
    assert {row["frame_budget"] for run in evaluated for row in run["episodes"]} == {4, 8}
    assert all(run["metrics"] for run in runs if run["kind"] == "rl")
    (out / "stages" / plan.runs[0].evaluation / "recipe.json").unlink()
    assert len(read(out)[1]["runs"]) == len(report["runs"]) - 1
    (out / "plan.json").write_text("{}")
    assert len(read(out)[1]["runs"]) == 1
    with pytest.raises(DataError, match="no such file"):
        Library([out / "nothing"])


def test_a_suite_whose_summary_is_damaged_keeps_its_other_tables(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    labels = {"x" * 5000: "full, seed 0", "a\0b": "sft", "..": "up", "none": 3}
    (tmp_path / "plan.json").write_text(json.dumps({"labels": labels}))
    means = {"kappa": {"mean": 1.5}, "kappa/K²": {"mean": 1}, "kappa/K4": {"mean": 2}}
    rows = {"a": 5, "b": {"section": "x", "means": means}, "c": {"section": 7, "means": []}}
    (tmp_path / "summary.json").write_text(json.dumps({"rows": rows, "claims": [1], "targets": "none"}))
    _, report, notes = read(tmp_path)
    (run,) = report["runs"]
    assert notes == []
    assert [table["title"] for table in run["tables"]] == ["x: evaluated", "x: by K"]
    assert run["tables"][1]["columns"][-1] == "kappa, K = 4"


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "", 7, "/"])
def test_a_recipe_with_a_path_that_none_can_be(tmp_path: Path, path: object) -> None:
    run = write_run(tmp_path / "run", steps=1, groups=1, size=1)
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "data": {"kind": "jsonl", "path": path}}))
    library, report, _ = read(run)
    assert len(report["runs"][0]["episodes"]) == 1
    assert all(place.source.roots == () for _, place in library.places())


def test_a_question_of_an_evaluation_is_found_under_its_name(evaluated: tuple[Path, Path]) -> None:
    _, report, _ = read(*evaluated)
    one, two = report["runs"]
    assert {row["sample"] for row in one["episodes"]} == {row["sample"] for row in two["episodes"]}
