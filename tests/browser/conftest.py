"""A real browser, and pages in it that must raise no error and fetch nothing."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from headwise.report import Look, Study

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        reason = f"no Chromium on the PATH (looked for {', '.join(NAMES)})"
        # In continuous integration a skip would go unnoticed.
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open a page; at the end, check that it raised no error and fetched nothing."""
    wrong: list[str] = []
    requested: list[str] = []
    contexts = []
    path = tmp_path / "report.html"

    def open_it(shown: Study | Look, **settings: object) -> Page:
        context = browser.new_context(**settings)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        is_study = isinstance(shown, Study)
        page.goto((shown.report(path) if is_study else shown.save(path)).as_uri())
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []
    # A picture that is saved is an object of the page itself, and no request leaves it.
    assert {url for url in requested if not url.startswith("blob:")} == {path.as_uri()}
