"""Reports in one file: what is in it, what is left out and said, and that nothing in it is ever markup.

Locked here: a file holds whole groups of the first, the last and evenly spaced steps, as many as its size allows, and
the list has all episodes; pictures that episodes share are there once; damaged files cost what they held, and a note;
videos outside of the allowed directories are not opened; every text of a hostile run arrives as it was, as data.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, HOSTILE_NAME, episode, write_hostile_run, write_run
from rows import write_video

from paravt.agent import EpisodeConfig, run_episode
from paravt.cli import main
from paravt.engines.scripted import ScriptedEngine
from paravt.episodes import save_episode, save_episodes
from paravt.errors import DataError
from paravt.lab.questions import question
from paravt.models import QwenVL
from paravt.report import write_report
from paravt.report.library import spread
from paravt.report.page import asset, policy
from paravt.turns import render_call
from paravt.types import Sample
from paravt.video import FrameReader


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the data in them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.data: dict[str, Any] = {}
        self.head: dict[str, str] = {}
        self._id: str | None = None
        self.feed(self.text)
        self.report = self.data["report"]
        self.chunks = {name: value for name, value in self.data.items() if name.startswith("chunk-")}
        self.pictures = {name: value for name, value in self.data.items() if name.startswith("pictures-")}

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "meta" and "http-equiv" in values:
            self.head[str(values["http-equiv"])] = str(values["content"])
        self._id = str(values["id"]) if values.get("type") == "application/json+deflate" else None

    def handle_data(self, data: str) -> None:
        if self._id is not None:
            assert re.fullmatch(r"[A-Za-z0-9+/=]+", data)
            self.data[self._id] = json.loads(zlib.decompress(base64.b64decode(data)))
            self._id = None

    @property
    def episodes(self) -> dict[str, Any]:
        return {id: view for chunk in self.chunks.values() for id, view in chunk.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=6, groups=3, size=4)


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("page") / "report.html"
    assert write_report([run], out) == []
    return Page(out)


def test_a_run_is_all_in_one_file(page: Page) -> None:
    (shown,) = page.report["runs"]
    assert (shown["kind"], shown["name"], shown["seed"], page.report["live"]) == ("rl", "run", 0, False)
    assert shown["metrics"]["step"] == [1, 2, 3, 4, 5, 6]
    assert shown["metrics"]["values"]["tokens_per_second"][5] == 906
    assert None not in shown["metrics"]["values"]["kappa"]
    assert shown["warnings"] == ["step 3: kappa 0.1 is below 0.5"]
    assert json.loads(shown["recipe"])["model"]["path"] == "start"
    assert shown["made"]["paravt"] == "0.1.0"
    rows = shown["episodes"]
    assert len(rows) == len({row["id"] for row in rows}) == 72
    assert {row["step"] for row in rows} == set(range(1, 7))
    for row in rows:
        view = page.chunks[f"chunk-{row['chunk']}"][row["id"]]
        assert (view["question"], view["answer"]) == (row["question"], row["answer"])
        assert len([crop for crop in view["crops"] if crop["status"] == "ran"]) == row["calls"]
    group = [row for row in rows if row["group"] == rows[0]["group"]]
    assert len(group) == 4
    assert len({row["chunk"] for row in group}) == 1
    assert abs(sum(row["advantage"] for row in group)) < 1e-6
    assert (group[0]["rewards"]["total"] > group[1]["rewards"]["total"]) == (
        group[0]["advantage"] > group[1]["advantage"]
    )
    assert {kind for row in rows for kind in row["failures"]} == {"junk_after"}
    piece = page.episodes[rows[0]["id"]]["turns"][0]["pieces"][-1]
    assert len(piece["spelled"]) == len(piece["advantages"]) == len(piece["logprobs"]) == piece["tokens"]


def test_pictures_are_there_once_and_every_frame_has_one(page: Page) -> None:
    shown = [
        frame
        for view in page.episodes.values()
        for frame in [*view["overview"], *(frame for crop in view["crops"] for frame in crop["frames"])]
    ]
    kept = {reference for frame in shown if (reference := frame["picture"])}
    assert set(page.pictures) == {"pictures-lab"}
    assert kept == {f"#lab/{key}" for key in page.pictures["pictures-lab"]}
    assert all(uri.startswith("data:image/webp;base64,") for uri in page.pictures["pictures-lab"].values())
    assert len(kept) < len(shown) / 10
    missing = [frame for frame in shown if frame["picture"] is None]
    assert {frame["why"] for frame in missing} == {"no request was made with this frame"}  # of crops that failed


def test_the_policy_allows_the_pages_own_script_and_nothing_else(page: Page) -> None:
    allowed = page.head["Content-Security-Policy"]
    assert allowed == policy(asset("report.js"), asset("report.css"))
    assert allowed.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in allowed
    assert page.text.count(f"<script>{asset('report.js')}</script>") == 1
    assert [tag for tag in page.tags if tag not in ("script", "meta")] == [
        "html", "head", "link", "title", "style", "body", "div", "noscript",
    ]  # fmt: skip


def test_a_small_file_has_whole_groups_of_spread_steps_and_says_so(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.html"
    size = len(asset("report.js")) + len(asset("report.css")) + 30_000
    notes = write_report([run], out, max_mb=size / 2**20)
    assert out.stat().st_size <= size
    small = Page(out)
    assert small.report["notes"] == notes
    assert any("of 72 episodes in full" in note for note in notes)
    rows = small.report["runs"][0]["episodes"]
    assert len(rows) == 72
    held = [row for row in rows if row["chunk"]]
    assert 0 < len(held) < 72
    assert set(small.episodes) == {row["id"] for row in held}
    for row in held:
        assert sum(other["group"] == row["group"] for other in held) == 4
    steps = {row["step"] for row in held}
    assert {1, 6} <= steps
    with pytest.raises(DataError, match=r"the list of episodes alone needs 0\.\d MB"):
        write_report([run], tmp_path / "none.html", max_mb=0.1)
    assert not (tmp_path / "none.html").exists()


def test_steps_are_spread() -> None:
    assert spread(9) == [0, 8, 4, 2, 6, 1, 3, 5, 7]
    for count in range(40):
        assert sorted(spread(count)) == list(range(count))
    assert spread(100)[:2] == [0, 99]


def test_runs_that_differ_in_the_seed_are_one_group(run: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"full-seed{seed}", steps=2, groups=1, size=2, seed=seed)
    other = write_run(tmp_path / "other", steps=1, groups=1, size=2)
    recipe = json.loads((other / "recipe.json").read_text())
    (other / "recipe.json").write_text(json.dumps({**recipe, "steps": 7}))
    out = tmp_path / "report.html"
    write_report([tmp_path], out)
    runs = Page(out).report["runs"]
    assert [(one["name"], one["group"], one["seed"]) for one in runs] == [
        ("full-seed1", "full", 1), ("full-seed2", "full", 2), ("other", "other", 0),
    ]  # fmt: skip
    assert len({one["id"] for one in runs}) == 3


# ---------------------------------------------------------------------------------------------------- damage


def test_damaged_files_cost_what_they_held_and_a_note(run: Path, tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(run, hurt)
    with (hurt / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "kap')  # killed in the middle of a line
    (hurt / "recipe.json").write_text("{")
    (hurt / "versions.json").write_bytes(b"\xff\xfe")
    lines = (hurt / "episodes" / "step-000002.jsonl").read_text().splitlines()
    lines[0], lines[5], lines[6] = "not JSON", '{"format": 9}', lines[6][:-20]
    (hurt / "episodes" / "step-000002.jsonl").write_text("\n".join(lines) + "\n")
    (hurt / "episodes" / "step-000003.jsonl").write_bytes(b"")
    out = tmp_path / "report.html"
    notes = write_report([hurt], out)
    assert len(notes) == 4
    assert any("step-000002.jsonl: 2 lines could not be read" in note for note in notes)
    assert any(
        "step-000002.jsonl: 1 line is no episode; the first: ValueError: format 9, expected 1" in note for note in notes
    )
    shown = Page(out).report["runs"][0]
    assert len(shown["episodes"]) == 72 - 3 - 12
    assert (shown["recipe"], shown["kind"], shown["metrics"]["step"][-1]) == (None, "rl", 6)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("x\n")])
def test_what_holds_no_run_is_one_clear_line(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "there"
    make(path)
    with pytest.raises(DataError, match=r"there: (there is no such|holds no run)"):
        write_report([path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


# ---------------------------------------------------------------------------------------------------- hostile


def test_a_hostile_run_arrives_as_data_alone(tmp_path: Path) -> None:
    hostile = write_hostile_run(tmp_path)
    out = tmp_path / "report.html"
    notes = write_report([hostile], out)
    page = Page(out)
    assert page.tags.count("script") == len(page.data) + 1
    assert set(page.tags) == {
        "html",
        "head",
        "meta",
        "link",
        "title",
        "style",
        "body",
        "div",
        "noscript",
        "script",
    }
    head = page.text.partition("<style>")[0]
    assert "<title>a&quot;b&#x27;&lt;img" in head
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page.text, flags=re.DOTALL)
    assert "onerror" not in markup.replace("onerror=alert(1)&gt;", "")

    (shown,) = page.report["runs"]
    assert shown["name"] == HOSTILE_NAME
    assert (shown["seed"], len(shown["episodes"])) == (None, 8)
    readable = HOSTILE.replace("\ud800", "\N{REPLACEMENT CHARACTER}")
    assert shown["metrics"]["values"][readable] == [1, None]
    for row in shown["episodes"]:
        view = page.episodes[row["id"]]
        assert row["question"].startswith(readable)
        assert readable in row["group"]
        assert row["rewards"] == {"total": None, "accuracy": None, readable + row["question"][-2:]: 0.5}
        for text in (view["question"], view["answer"], view["turns"][0]["text"], view["crops"][0]["report"],
                     view["crops"][-1]["call"], view["errors"][0]["message"], view["options"][0]):  # fmt: skip
            assert readable in text
        assert view["video"] == "passwd"
        assert [frame["picture"] for frame in view["overview"]] == [None] * 3
        assert view["turns"][0]["pieces"][-1]["advantages"] is None
    everything = json.dumps(page.data)
    assert "root:" not in everything
    assert any("step-000003.jsonl: not a file of" in note for note in notes)
    assert any("timings.jsonl: not a file of" in note for note in notes)
    assert all("\n" not in note for note in notes)


# ---------------------------------------------------------------------------------------------------- videos


async def played(tiny: QwenVL, video: Path) -> Any:
    call = render_call("crop_video", {"start_time": 1, "end_time": 3})
    engine = ScriptedEngine(
        tiny.chat, {"main": [f"<think>\n</think>\n{call}", "<answer>A</answer>"], "crop/0/0": ["grey"]}
    )
    config = EpisodeConfig(frame_budget=4, force_answer=False)
    return await run_episode(Sample("s", str(video), "Which?"), engine, config, reader=FrameReader())


def pictures_of(path: Path, tmp_path: Path, *videos: Path) -> tuple[list[Any], list[Any]]:
    out = tmp_path / "pictures.html"
    write_report([path], out, videos=videos)
    page = Page(out)
    (view,) = page.episodes.values()
    frames = [*view["overview"], *view["crops"][0]["frames"]]
    uris = []
    for frame in frames:
        shard, _, key = str(frame["picture"]).lstrip("#").partition("/")
        uris.append(page.data[f"pictures-{shard}"][key] if frame["picture"] else None)
    return uris, [frame.get("why") for frame in frames]


async def test_pictures_of_a_saved_episode_come_from_its_video(tiny: QwenVL, tmp_path: Path) -> None:
    video = write_video(tmp_path / "videos" / "v.mp4")
    saved = tmp_path / "videos" / "episode.json"
    made = await played(tiny, video)
    save_episode(made, saved)
    uris, whys = pictures_of(saved, tmp_path)  # the directory of the file is allowed
    assert whys == [None] * len(uris)
    assert len(set(uris[:4])) == 4  # each second has a grey of its own
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = elsewhere / "episode.json"
    shutil.copy(saved, moved)
    uris, whys = pictures_of(moved, tmp_path)
    assert set(uris) == {None}
    assert set(whys) == {"its video is in none of the allowed directories: give its directory with --videos"}
    assert pictures_of(moved, tmp_path, video.parent)[1] == [None] * len(uris)
    assert pictures_of(moved, tmp_path, tmp_path)[1] == [None] * len(uris)

    shutil.move(video, elsewhere / "v.mp4")  # found again by its name below the allowed directory
    assert pictures_of(moved, tmp_path)[1] == [None] * len(uris)
    write_video(video, seconds=5)
    assert set(pictures_of(saved, tmp_path)[1]) == {"the video has changed since"}


async def test_a_video_that_leads_out_of_the_allowed_directory_is_not_opened(tiny: QwenVL, tmp_path: Path) -> None:
    secret = write_video(tmp_path / "secret" / "v.mp4")
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link.mp4").symlink_to(secret)
    made = await played(tiny, secret)
    for name in ("link.mp4", "../secret/v.mp4", f"{allowed}/../secret/v.mp4", str(secret), "", "a\0b", "/", ".."):
        path = allowed / "episode.json"
        save_episode(replace(made, sample=replace(made.sample, video=name)), path)
        uris, whys = pictures_of(path, tmp_path)
        assert set(uris) == {None}, name
        assert all("allowed" in str(why) or "no video" in str(why) for why in whys), name


# ---------------------------------------------------------------------------------------------------- other kinds


def test_a_file_of_episodes_by_itself(tmp_path: Path) -> None:
    sample = question("rl-1", 0).sample
    path = tmp_path / "some.jsonl"
    save_episodes([("", episode(sample, n)) for n in range(5)], path)
    out = tmp_path / "report.html"
    assert write_report([path, path], out) == []
    runs = Page(out).report["runs"]
    assert [(one["kind"], one["name"], len(one["episodes"])) for one in runs] == [
        ("episodes", f"some ({tmp_path.name}) (1)", 5), ("episodes", f"some ({tmp_path.name}) (2)", 5),
    ]  # fmt: skip
    assert all(row["advantage"] is None for row in runs[0]["episodes"])


def test_from_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "-o", str(out)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert Page(out).report["title"] == "run"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nothing")])
    assert ended.value.code == 6
    assert capsys.readouterr().err == f"paravt: {tmp_path / 'nothing'}: there is no such file or directory\n"


def test_curves_for_papers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = write_run(tmp_path / "second", steps=4, groups=1, size=2, seed=1)
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(run), str(second), "-o", str(tmp_path / "plots")])
    assert ended.value.code == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {file.name for file in files} == {"reward.png", "format.png", "calls.png", "accuracy.png", "learning.png",
                                             "speed.png", "budgets.png"}  # fmt: skip
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(run), str(second), "-o", str(tmp_path / "ranges"), "--band", "range"])
    assert ended.value.code == 0
    assert (tmp_path / "ranges" / "reward.png").read_bytes() != (tmp_path / "plots" / "reward.png").read_bytes()
    path = tmp_path / "some.jsonl"
    save_episodes([("", episode(question("rl-1", 0).sample, 0))], path)
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(path)])
    assert ended.value.code == 6
