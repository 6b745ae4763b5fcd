"""The page of a comparison in a real browser: it fits every width and makes no requests."""

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from headwise.report import compare_tables
from headwise.tables import Head
from studies import make_roles, make_study
from tables_of_texts import make_table, with_heads

pytestmark = pytest.mark.browser

HOSTILE = '</style><img src=x onerror="window.ran = true"><script>window.ran = true</script>' * 9


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = make_study(12, 12)
    before, after = make_roles(study, [3, 20]), make_roles(study, [20, 30])
    table = make_table(layers=12, heads=12)
    moved = make_table(layers=12, heads=12, shifts={"first": {Head("", 5, 5): 0.2}})
    small = with_heads(moved, moved.heads[:70] + moved.heads[73:])
    sides = replace(table, model=before.model), replace(small, model=after.model)
    comparison = compare_tables(*sides, (before, after), titles=(HOSTILE, "after"), draws=600)
    return comparison.report(tmp_path_factory.mktemp("page") / "compare.html")


@pytest.mark.parametrize("width", [360, 820, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_is_silent(
    browser: Browser, page_file: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,  # type: ignore[arg-type]
        java_script_enabled=True,
    )
    page = context.new_page()
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.ran") is None
    assert page.locator(".overview rect").count() == 144
    assert page.locator(".overview rect.absent").count() == 3
    strongest = page.locator(".overview rect.s8")
    assert strongest.count() == 1
    assert strongest.locator("title").text_content().startswith("L5.H5")
    colours = {
        page.locator(f".overview rect.{style}").first.evaluate("x => getComputedStyle(x).fill")
        for style in ("s0", "s8", "absent")
    }
    assert len(colours) == 3
    assert messages == []
    assert requests == [page_file.as_uri()]
    context.close()


def test_the_page_prints(browser: Browser, page_file: Path) -> None:
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.emulate_media(media="print")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
