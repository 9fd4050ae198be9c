"""A real browser: the system's Chromium, headless, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 60_000
"""Milliseconds until something is not there: the machine may be doing something else."""
_QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
          "--disable-quic", "--disable-gpu", "--no-sandbox")  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test, and says so, where there is no Chromium."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")
    expect.set_options(timeout=_PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_QUIET), timeout=120_000)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what it did that a page of ours does not do."""

    page: Page
    asked: list[str] = field(default_factory=list)
    """Addresses that it fetched, its own included, data: left out."""
    problems: list[str] = field(default_factory=list)
    """Errors, what its policy refused, and dialogs."""


@contextmanager
def watched(browser: Browser, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    context.set_default_timeout(_PATIENCE)
    page = context.new_page()
    seen = Watched(page)

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            seen.problems.append(message.text)

    def dialog(box: Any) -> None:
        seen.problems.append(f"dialog: {box.message}")
        box.dismiss()

    page.on("console", said)
    page.on("pageerror", lambda error: seen.problems.append(str(error)))
    page.on("dialog", dialog)
    page.on("request", lambda request: None if request.url.startswith("data:") else seen.asked.append(request.url))
    yield seen
    context.close()


def barriers(page: Page) -> list[str]:
    """What axe finds that keeps people out, a line each."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return width
