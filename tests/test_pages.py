"""The pages as people meet them: in a browser, offline, with thousands of episodes, with hostile data, by keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ask_server import Asking, Choosing
from browser import Watched, barriers, chromium, overflow, watched
from conftest import CASES, LONG
from line import Line
from playwright.sync_api import Browser, Page, expect
from report_runs import write_hostile_run, write_run
from test_eval_directory import Answerer, play, samples
from test_serve_security import serving

from paravt.agent import EpisodeConfig
from paravt.ask import LAB_MAX_TOKENS, open_engine
from paravt.lab.demo import question_of_two_scenes
from paravt.lab.world import write_video
from paravt.models import QwenVL
from paravt.report import write_report
from paravt.serve.security import Access, listen
from paravt.serve.videos import Library
from paravt.serve.view import View
from paravt.serve.view import create_app as create_view

EPISODES = 2_000
UNFOLD = "document.querySelectorAll('details').forEach(fold => { fold.open = true })"


@dataclass(frozen=True)
class Made:
    """Everything that is made before the browser starts: its driver keeps an event loop in this thread."""

    large: str
    hostile: str
    seeds: str
    """Two seeds of one recipe, six steps."""
    evaluations: str
    """Of six questions, the first run has all right, the second two, the third none."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("reports")
    write_report([write_run(out / "large")], out / "large.html")
    write_report([write_hostile_run(out / "hostile")], out / "hostile.html")
    seeds = [write_run(out / f"seed{seed}", steps=6, groups=2, size=4, seed=seed) for seed in range(2)]
    write_report(seeds, out / "seeds.html")
    for name, right in (("all", "q"), ("some", "q1 q2"), ("none", "nothing")):
        answerer = Answerer(lambda question, right=right: f"<answer>{'B' if _asks(question, right) else 'A'}</answer>")
        play(out / "evaluations" / name, samples(6), answerer)
    write_report([out / "evaluations" / name for name in ("all", "some", "none")], out / "evaluations.html")
    return Made(*((out / f"{name}.html").as_uri() for name in ("large", "hostile", "seeds", "evaluations")))


def _asks(question: str, right: str) -> bool:
    return any(name in question for name in right.split())


@pytest.fixture(scope="module")
def browser(made: Made) -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def seen(browser: Browser) -> Iterator[Watched]:
    with watched(browser) as page:
        yield page


def episodes(page: Page) -> None:
    page.get_by_role("button", name=re.compile("^Episodes [0-9]")).or_(
        page.get_by_role("tab", name=re.compile("^Episodes"))
    ).or_(page.get_by_role("link", name=re.compile("^Episodes"))).first.click()


def test_a_report_of_thousands_of_episodes(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.large)
    episodes(page)
    expect(page.get_by_text(re.compile(r"^2,000 episodes$"))).to_be_visible()
    rows = page.get_by_role("option").and_(page.locator(".row"))
    assert 5 < rows.count() < 60  # the others are made when they are scrolled to
    first = rows.first.inner_text()
    page.get_by_role("listbox", name="Episodes").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    expect(page.locator(f".row[aria-posinset='{EPISODES}']")).to_be_visible()

    page.get_by_label("Calls").first.select_option("2")
    expect(page.get_by_text(re.compile(r"^[\d,]+ of 2,000 episodes$"))).to_be_visible()
    page.get_by_role("button", name="Clear filters").click()
    expect(page.get_by_text(re.compile(r"^2,000 episodes$"))).to_be_visible()

    # by keyboard alone: into the list, open, and back
    page.get_by_role("listbox", name="Episodes").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Episode", exact=True)).to_be_visible()
    shown = page.locator("img.frame").first
    expect(shown).to_be_visible()
    assert shown.evaluate("image => image.naturalWidth") > 8
    page.keyboard.press("Escape")
    expect(rows.first).to_have_text(re.compile(re.escape(first.split("\n")[0])))
    page.go_back()
    expect(page.get_by_role("region", name="Episode", exact=True)).to_be_visible()
    assert seen.problems == []
    assert seen.asked == [made.large]


def test_curves_are_smoothed_found_and_read_by_keyboard(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.seeds)
    entropy = page.get_by_role("img", name=re.compile("^entropy over steps"))  # 1 / (step + seed)
    expect(entropy).to_have_accessible_name("entropy over steps: seed0, seed1 from 0.75 to 0.155")
    heading = page.locator("figure", has=entropy).locator("figcaption")
    expect(heading).to_contain_text("entropy, nats")
    entropy.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(heading).to_contain_text("step 5")
    expect(heading).to_contain_text("0.183")  # of 1/5 and 1/6
    page.get_by_label("Smooth").select_option("3")
    expect(entropy).to_have_accessible_name("entropy over steps: seed0, seed1 from 0.583 to 0.169")
    page.get_by_label("Metrics").fill("mismatch")
    expect(page.locator("figure")).to_have_count(1)
    expect(page.locator("figcaption")).to_contain_text("1e-6")
    page.get_by_label("Metrics").fill("no such metric")
    expect(page.get_by_text("No metric has that in its name.")).to_be_visible()
    assert seen.problems == []


def test_tables_of_all_runs_are_one_and_are_sorted(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.evaluations)
    scores = page.get_by_role("region", name="Scores, with 95 % intervals")
    expect(scores).to_have_count(1)
    columns = scores.locator("th").all_inner_texts()
    rows = scores.locator("tbody tr")

    def cells(column: str) -> list[str]:
        return [row.locator("td").nth(columns.index(column)).inner_text() for row in rows.all()]

    assert cells("run") == ["all", "some", "none"]
    by_score = scores.get_by_role("button", name="score, %", exact=True)
    by_score.focus()
    page.keyboard.press("Enter")
    assert [cells("run"), cells("score, %")] == [["none", "some", "all"], ["0", "33.3", "100"]]
    assert cells("from")[0] == "0"  # and not left out
    expect(scores.locator("th[aria-sort=ascending]")).to_have_count(1)
    scores.get_by_role("button", name=re.compile("^score, %")).click()
    assert cells("run") == ["all", "some", "none"]

    page.get_by_role("combobox").select_option("What became of the questions")
    expect(page.locator("table")).to_have_count(1)
    outcomes = page.get_by_role("region", name="What became of the questions")
    outcomes.get_by_role("button", name="rows", exact=True).click()
    some = outcomes.locator("tbody tr", has_text="some").filter(has_text="right")
    some.get_by_role("button").click()
    expect(page.get_by_text("2 of 18 episodes")).to_be_visible()
    assert seen.problems == []


def test_groups_are_sorted_by_what_they_show(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.large)
    episodes(page)
    page.get_by_role("button", name="Groups", exact=True).click()
    page.get_by_title("Sort by calls").click()
    page.get_by_title("Sort by calls").click()
    rows = page.locator(".row")
    expect(page.get_by_title("Sort by calls")).to_contain_text("↓")
    shown = sorted(
        (int(row.get_attribute("aria-posinset") or 0), row.locator(".c-calls").inner_text()) for row in rows.all()
    )
    calls = [float(text.split()[-1]) for _, text in shown]
    assert calls == sorted(calls, reverse=True)
    rows.first.click()
    cards = page.locator(".card")
    expect(cards).to_have_count(8)
    assert all(card.evaluate("card => card.scrollWidth <= card.clientWidth") for card in cards.all())


def test_which_tokens_got_credit(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.large)
    episodes(page)
    page.locator(".row").first.click()
    turns = page.get_by_role("region", name="Turns")
    expect(turns).to_be_visible()
    assert page.locator(".token").count() == 0
    page.get_by_role("button", name="advantage", exact=True).click()
    tokens = turns.locator(".token")
    assert tokens.count() > 3
    titles = [tokens.nth(index).get_attribute("title") or "" for index in range(tokens.count())]
    paid = [
        float(found[1].replace("\u2212", "-")) for title in titles if (found := re.search(r"advantage (\S+)$", title))
    ]
    assert len(paid) == len(titles)
    assert len(set(paid)) > 1  # the marks of structure are on some tokens, and not on the others
    strongest = max(range(len(paid)), key=lambda index: abs(paid[index]))
    weakest = min(range(len(paid)), key=lambda index: abs(paid[index]))
    colours = [
        tokens.nth(index).evaluate("token => getComputedStyle(token).backgroundColor") for index in (strongest, weakest)
    ]
    assert colours[0] != colours[1]
    page.get_by_role("button", name="logprob", exact=True).click()
    expect(turns.locator(".token.low").first).to_be_visible()
    page.get_by_role("button", name="off", exact=True).click()
    assert page.locator(".token").count() == 0
    assert seen.problems == []


def test_the_windows_of_an_episode(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.large)
    episodes(page)
    page.get_by_label("Calls").first.select_option("2")
    page.locator(".row").first.click()
    lanes = page.get_by_role("button", name=re.compile(r"^Call 1\.\d, "))
    expect(lanes).to_have_count(2)
    lanes.first.click()
    crop = page.get_by_role("region", name="Call 1.1")
    expect(crop).to_be_visible()
    assert crop.locator("img.frame").first.evaluate("image => image.naturalWidth") > 8
    boxes = [lanes.nth(index).locator(".bar").bounding_box() for index in range(2)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] != boxes[1]["y"]  # each call has its own lane
    page.keyboard.press("Escape")
    expect(crop).to_have_count(0)


def test_hostile_data_stay_text(made: Made, seen: Watched) -> None:
    page = seen.page
    page.goto(made.hostile)
    page.wait_for_selector("#app :first-child")
    scripts = page.locator("script").count()
    for tab in page.locator("header nav a, header nav button").all():
        tab.click()
        page.evaluate(UNFOLD)
    episodes(page)
    for index in range(page.locator(".row").count()):
        page.locator(".row").nth(index).click()
        page.wait_for_selector(".episode")
        page.evaluate(UNFOLD)
        for lane in range(page.locator(".lane").count()):
            page.locator(".lane").nth(lane).click()
            page.evaluate(UNFOLD)
        page.get_by_role("button", name="← Back").click()
    assert page.locator("body").get_attribute("data-hacked") is None
    assert page.locator("script").count() == scripts
    assert page.locator("iframe, object, embed, svg script, [onerror], [onload], [onclick]").count() == 0
    assert seen.problems == []
    assert seen.asked == [made.hostile]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_nobody_is_kept_out(made: Made, browser: Browser, width: int, dark: bool) -> None:
    with watched(browser, width=width, dark=dark) as seen:
        page = seen.page
        page.goto(made.large)
        page.wait_for_selector("canvas")
        assert (barriers(page), overflow(page)) == ([], 0)
        episodes(page)
        page.wait_for_selector(".row")
        assert (barriers(page), overflow(page)) == ([], 0)
        page.locator(".row").first.click()
        page.get_by_role("button", name="advantage", exact=True).click()
        assert (barriers(page), overflow(page)) == ([], 0)


def test_a_question_to_the_shipped_checkpoint(browser: Browser, tmp_path: Path) -> None:
    video = tmp_path / "videos" / "cli-1.mp4"
    video.parent.mkdir()
    write_video("cli-1", video)
    asked = question_of_two_scenes("cli-1", str(video)).sample
    library = Library([video.parent], tmp_path)
    with (
        Asking(open_engine(), library, EpisodeConfig(max_tokens=LAB_MAX_TOKENS)) as asking,
        watched(browser) as seen,
    ):
        page = seen.page
        page.goto(asking.url)
        page.locator("textarea[name=question]").fill(asked.question)
        page.locator("input[name=frame_budget]").fill("64")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".verdict .answer b")).to_have_text(asked.answer or "")
        expect(page.get_by_role("button", name=re.compile(r"^Call 1\.\d, "))).to_have_count(3)
        page.get_by_role("button", name=re.compile(r"^Call 1\.1, ")).click()
        assert page.get_by_role("region", name="Call 1.1").locator("img.frame").count() > 3
        expect(page.get_by_role("region", name="Reports").get_by_role("listitem")).to_have_count(3)
        assert barriers(page) == []
        assert seen.problems == []
        assert all(address.startswith(asking.url) for address in seen.asked)


def test_evidence_seeks_the_player(browser: Browser, tiny: QwenVL, tmp_path: Path) -> None:
    with (
        Asking(Choosing(tiny), Library([CASES / "video"], tmp_path)) as asking,
        watched(browser, width=400, height=700) as seen,
    ):
        page = seen.page
        page.goto(asking.url)
        page.locator("form select").first.select_option(label="longgop.mp4 (2:00)")
        page.locator("textarea[name=question]").fill("What <img src=x onerror=alert(1)> happens?")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.get_by_role("status")).to_be_in_viewport()  # it is below the form
        page.get_by_role("button", name="15 seconds").first.click()
        page.wait_for_function("document.querySelector('video').currentTime === 15")
        page.get_by_role("button", name=re.compile(r"^Call 1\.2, ")).click()
        page.wait_for_function("document.querySelector('video').currentTime === 30")
        assert overflow(page) == 0
        assert seen.problems == []


def test_a_question_that_hangs_can_be_cancelled(browser: Browser, tiny: QwenVL, tmp_path: Path) -> None:
    with Asking(Choosing(tiny), Library([CASES / "video"], tmp_path)) as asking, watched(browser) as seen:
        page = seen.page
        page.goto(asking.url)
        page.locator("form select").first.select_option(label="longgop.mp4 (2:00)")
        page.locator("textarea[name=question]").fill("hang on")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.get_by_role("button", name=re.compile(r"^Call 1\.1, "))).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("status")).to_contain_text(re.compile("cancelled", re.IGNORECASE))
        assert seen.problems == []


# ---------------------------------------------------------------------------------------------------- uploads, access


def ask(page: Page, question: str) -> None:
    page.locator("textarea[name=question]").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()


def test_an_upload_through_the_page(browser: Browser, tiny: QwenVL, tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    large, fake = tmp_path / "large.mp4", tmp_path / "no <b>video.mp4"
    large.write_bytes(b"\0" * (24 << 20))
    fake.write_text("no video")
    library = Library([], tmp_path / "uploads")
    with Asking(Choosing(tiny), library, max_upload_bytes=1 << 20) as asking, watched(browser) as seen:
        page = seen.page
        page.goto(asking.url)
        expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
        chosen = page.get_by_label("or upload one")
        chosen.set_input_files(fake)
        expect(page.get_by_role("alert")).to_contain_text("no _b_video.mp4: not a readable video")
        chosen.set_input_files(large)
        expect(page.get_by_role("alert")).to_have_text("the file is too large; at most 1 MB are taken")
        assert [text for text in seen.problems if "422" not in text and "413" not in text] == []
        seen.problems.clear()

        chosen.set_input_files(LONG)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("form select").first).to_contain_text("longgop.mp4 (2:00)")
        ask(page, "What happens?")
        expect(page.locator(".verdict .answer b")).to_have_text("a cat at 15 seconds")
        page.wait_for_function("document.querySelector('video').readyState > 0")  # it plays
        assert seen.problems == []
        assert len(list((tmp_path / "uploads").iterdir())) == 1


def test_an_upload_that_is_stopped(browser: Browser, tiny: QwenVL, tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    large = tmp_path / "large.mp4"
    large.write_bytes(b"\0" * (8 << 20))
    with Asking(Choosing(tiny), Library([], tmp_path / "uploads")) as asking, watched(browser) as seen:
        page = seen.page
        page.goto(asking.url)
        page.context.new_cdp_session(page).send(
            "Network.emulateNetworkConditions",
            {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 100_000},
        )
        page.get_by_label("or upload one").set_input_files(large)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("alert")).to_have_text("The upload was stopped.")
        expect(page.get_by_label("or upload one")).to_be_enabled()


def test_the_token_in_the_address_is_enough_for_all_of_the_page(browser: Browser, tiny: QwenVL, tmp_path: Path) -> None:
    access = Access(frozenset({"127.0.0.1"}), "a-secret_token", cookie="paravt-test")
    with (
        Asking(Choosing(tiny), Library([CASES / "video"], tmp_path), access=access) as asking,
        watched(browser) as refused,
        watched(browser) as seen,
    ):
        for address in (asking.url, f"{asking.url}/?token=wrong"):
            answer = refused.page.goto(address)
            assert answer is not None
            assert answer.status == 401
            text = "a token is needed; use the address that the server printed"
            expect(refused.page.locator("body")).to_contain_text(text)
        page = seen.page
        page.goto(f"{asking.url}/?token=a-secret_token")
        assert page.url == f"{asking.url}/"  # it is not left where others see it
        page.locator("form select").first.select_option(label="longgop.mp4 (2:00)")
        ask(page, "What happens?")
        expect(page.locator(".verdict .answer b")).to_have_text("a cat at 15 seconds")  # by events
        page.wait_for_function("document.querySelector('video').readyState > 0")
        page.reload()
        expect(page.locator(".verdict .answer b")).to_have_text("a cat at 15 seconds")
        assert page.evaluate("document.cookie") == ""  # no script reads it
        assert seen.problems == []


# ---------------------------------------------------------------------------------------------------- servers that go


def test_a_question_is_followed_again_when_the_server_can_be_reached_again(
    browser: Browser, tiny: QwenVL, tmp_path: Path
) -> None:
    with (
        Asking(Choosing(tiny), Library([CASES / "video"], tmp_path)) as asking,
        Line(int(asking.url.rpartition(":")[2])) as line,
        watched(browser) as seen,
    ):
        page, said = seen.page, seen.page.get_by_role("status")
        page.goto(line.url)
        page.locator("form select").first.select_option(label="longgop.mp4 (2:00)")
        ask(page, "hang on")
        expect(said).to_have_text("Watching: 0 of 2 windows have reported.")
        line.cut()
        expect(said).to_have_text("The server cannot be reached.")
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        page.wait_for_timeout(5_000)  # it tries more than once
        line.mend()
        expect(said).to_have_text("Watching: 0 of 2 windows have reported.")
        expect(page.get_by_role("button", name=re.compile(r"^Call 1\.\d, "))).to_have_count(2)
        page.get_by_role("button", name="Cancel").click()
        expect(said).to_have_text("Cancelled.")


def test_a_server_that_comes_back_without_its_questions(browser: Browser, tiny: QwenVL, tmp_path: Path) -> None:
    library = Library([CASES / "video"], tmp_path)
    with Asking(Choosing(tiny), library) as first:
        port = int(first.url.rpartition(":")[2])
        with Line(port) as line, watched(browser) as seen:
            page, said = seen.page, seen.page.get_by_role("status")
            page.goto(line.url)
            page.locator("form select").first.select_option(label="longgop.mp4 (2:00)")
            ask(page, "hang on")
            expect(said).to_have_text("Watching: 0 of 2 windows have reported.")
            line.cut()  # as by kill -9: it says no farewell
            expect(said).to_have_text("The server cannot be reached.")
            with Asking(Choosing(tiny), library) as second:
                line.to = int(second.url.rpartition(":")[2])
                line.mend()
                expect(said).to_have_text("there is no such question (any more)")
                ask(page, "What happens?")
                expect(page.locator(".verdict .answer b")).to_have_text("a cat at 15 seconds")


def test_a_view_goes_on_when_its_server_is_there_again(browser: Browser, tmp_path: Path) -> None:
    view = View([write_run(tmp_path / "run", steps=1, groups=1, size=2)], [])
    with serving(listen(), create_view(view)) as port, Line(port) as line, watched(browser) as seen:
        page = seen.page
        page.goto(line.url)
        expect(page.locator("header .chip")).to_have_text("live")
        line.cut()
        expect(page.locator("header .chip")).to_have_text("The server cannot be reached.")
        line.mend()
        expect(page.locator("header .chip")).to_have_text("live")
    view.close()
