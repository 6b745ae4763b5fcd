"""The page of images in a browser: words and regions by pointer and keyboard, heads, sinks."""

from collections.abc import Callable
from pathlib import Path

import axe_core_python
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from headwise.regions import ImageRegions
from headwise.report import ImageLook, Sample
from headwise.tables import Head
from tiers import tiers

pytestmark = pytest.mark.browser

AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
Open = Callable[..., Page]
WIDTH, HEIGHT, SIDE = 300, 200, 100


def make_look(*, encoder: bool = False) -> ImageLook:
    """Six regions in two rows of three, after a sink; head h of layer 1 looks at region h."""
    n_words = 0 if encoder else 2
    tokens = ("<s>", *(f"patch {n}" for n in range(6)), *("what", "is")[:n_words], *["."] * 8)
    queries = [0, *range(7, 7 + n_words)] if not encoder else [*range(7)]
    rng = np.random.default_rng(0)
    weights = {}
    for layer in range(2):
        for head in range(3):
            rows = rng.uniform(0, 0.1, (len(queries), len(tokens)))
            rows[:, 0], rows[:, 7 + n_words :] = 0.4, 0
            if layer:
                rows[-1, 1 + head] = 0.5
            weights[Head("language", layer, head)] = rows.astype(np.float32)
    left, top = np.tile([0, 100, 200], 2), np.repeat([0, 100], 3)
    rows = pd.DataFrame(
        {
            "text": 0, "position": np.arange(1, 7), "image": 0, "left": left, "top": top,
            "right": left + SIDE, "bottom": top + SIDE, "frame": 0,
        }
    )  # fmt: skip
    return ImageLook(
        title="A <model>", model="Model", sample=Sample(tokens, weights),
        versions={"headwise": "1"}, queries=queries,
        regions=ImageRegions(rows, ((WIDTH, HEIGHT),), 1, "language"),
        images=[Image.new("RGB", (WIDTH, HEIGHT), "white")],
    )  # fmt: skip


def darkest(page: Page) -> int:
    """The region with the deepest color on the picture, by its pixels."""
    place: int = page.evaluate(
        """() => {
          const canvas = document.querySelector("#pictures canvas");
          const copy = new OffscreenCanvas(canvas.width, canvas.height)
            .getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, 0, 0);
          const blue = [0, 1, 2, 3, 4, 5].map((n) => copy.getImageData(
            50 + 100 * (n % 3), n < 3 ? 50 : 150, 1, 1).data[2]);
          return blue.indexOf(Math.min(...blue));
        }"""
    )
    return place


def test_a_head_and_a_word_light_regions_and_a_region_lights_words(open_page: Open) -> None:
    page = open_page(make_look())
    readout = page.locator("#look-readout")
    expect(readout).to_contain_text("“is” gives")
    for head in range(3):
        page.select_option("#text-head", label=f"language.L1.H{head}")
        assert darkest(page) == head
        expect(page.locator("#scale")).to_contain_text("0.5")
    expect(readout).to_contain_text("most to 200–300 × 0–100 0.50")
    canvas = page.locator("#pictures canvas")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] * 5 / 6, "y": box["height"] / 4})
    expect(readout).to_contain_text("the region 200–300 × 0–100 gets most from “is” 0.50")
    expect(page.locator("#queries [aria-pressed=true]")).to_have_count(0)
    page.get_by_role("button", name="what").click()
    expect(page.locator("#queries [aria-pressed=true]")).to_have_text("what")
    page.select_option("#view", "layer")
    expect(readout).to_contain_text("The mean of layer 1")


def test_regions_and_heads_are_reached_by_keyboard(open_page: Open) -> None:
    page = open_page(make_look())
    page.locator("#pictures canvas").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    expect(page.locator("#look-readout")).to_contain_text("the region 100–200 × 100–200 gets")
    page.locator("#glance td[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#text-head option:checked")).to_have_text("language.L1.H0")


def test_an_encoders_region_is_a_query(open_page: Open) -> None:
    page = open_page(make_look(encoder=True))
    canvas = page.locator("#pictures canvas")
    canvas.click(position={"x": 10, "y": 10})
    expect(page.locator("#look-readout")).to_contain_text("the region 0–100 × 0–100 gives")
    expect(page.locator("#queries button")).to_have_text(["<s>"])


def test_a_sink_is_named_and_left_out(open_page: Open) -> None:
    look = make_look()
    for rows in look.sample.weights.values():
        rows[:, 1:] /= 20
        rows[:, 4] = 0.9  # a patch that gets ten times its share
        rows[:, 0] = 0.01
    page = open_page(look)
    expect(page.locator("#sinks")).to_contain_text("the region 0–100 × 100–200 (0.90 of all")
    assert darkest(page) == 3
    page.get_by_label("without the sinks").check()
    assert darkest(page) != 3


@pytest.mark.parametrize("scheme", tiers(["dark"], ["light"]))
def test_the_page_is_readable_on_a_phone_and_for_a_screen_reader(
    open_page: Open, scheme: str
) -> None:
    page = open_page(make_look(), viewport={"width": 390, "height": 800}, color_scheme=scheme)
    expect(page.locator("#look-readout")).not_to_be_empty()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa']})")
    assert [x["id"] for x in found["violations"]] == []
