"""Write the pictures of the pages: `python docs/make_screenshots.py RUN`, RUN a directory of `paravt rl` or `lab run`.

Needs the extras `serve` and `dev`, and Chromium. The ask page is that of the shipped checkpoint.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from paravt.agent import EpisodeConfig
from paravt.ask import LAB_MAX_TOKENS, open_engine
from paravt.lab.demo import question_of_two_scenes
from paravt.lab.world import write_video
from paravt.report import write_report
from paravt.serve.api import create_app
from paravt.serve.security import listen
from paravt.serve.server import AskServer
from paravt.serve.videos import Library

DOCS = Path(__file__).parent
SIZE = {"width": 1280, "height": 900}


def shoot_report(browser: Browser, report: Path) -> None:
    page = browser.new_page(viewport=SIZE)
    page.goto(report.as_uri())
    page.wait_for_selector("canvas")
    page.screenshot(path=DOCS / "viewer-curves.png")
    page.locator("header nav").get_by_text("Episodes").click()
    page.get_by_label("Calls").first.select_option("3")
    page.locator(".row").first.click()
    page.get_by_role("button", name="advantage", exact=True).click()
    page.locator(".lane").nth(1).click()
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / "viewer-episode.png", full_page=True)


def shoot_ask(browser: Browser, videos: Path) -> None:
    write_video("cli-1", videos / "cli-1.mp4")
    asked = question_of_two_scenes("cli-1", "cli-1.mp4").sample
    listening = listen()
    app = create_app(
        open_engine(), Library([videos], videos), listening.access, config=EpisodeConfig(max_tokens=LAB_MAX_TOKENS)
    )
    server = AskServer(app)
    thread = threading.Thread(target=server.run, args=([listening.socket],), daemon=True)
    thread.start()
    page = browser.new_page(viewport=SIZE)
    page.goto(listening.url)
    page.locator("textarea[name=question]").fill(asked.question)
    page.locator("input[name=frame_budget]").fill("64")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_selector(".verdict .answer", timeout=300_000)
    page.locator(".lane").first.click()
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / "ask.png", full_page=True)
    server.should_exit = True
    thread.join()


def main(run: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.html"
        write_report([run], report)
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            shoot_report(browser, report)
            shoot_ask(browser, Path(directory))
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
