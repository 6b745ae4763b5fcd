"""The page in a real browser: it works by pointer and by keyboard, and makes no requests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from headwise.report import Sample, Study
from pages import scrolled_to
from studies import make_roles, make_sample, make_study
from tiers import tiers

pytestmark = pytest.mark.browser

RELATIONS = {
    "subject": "a verb → its subject",
    "earlier copy": "a word of a repeated sequence → the same word earlier",
}
HOSTILE = '</script><img src=x onerror="window.ran = true"><script>window.ran = true</script>'

Open = Callable[..., Page]


def column(page: Page, title: str) -> list[str]:
    """The cells of a column of the table of heads."""
    titles = page.locator("#table thead tr:last-child th").all_inner_texts()
    index = next(i for i, text in enumerate(titles) if text.rstrip(" ↑↓") == title)
    return page.locator(f"#table tbody tr > :nth-child({index + 1})").all_inner_texts()


def test_page_opens_with_the_first_finding(open_page: Open) -> None:
    study = make_study(relations=RELATIONS)
    page = open_page(study)
    findings = page.locator("#findings li")
    assert [text.removesuffix(" show") for text in findings.all_inner_texts()] == study.findings()
    head = study.findings()[0].split()[0]
    expect(page.locator("#head-title")).to_have_text(head)
    lists = page.locator("select[data-choose='head']")  # also those far from the view
    names = lists.evaluate_all("(all) => all.map((list) => list.selectedOptions[0].text)")
    assert set(names) == {head}
    expect(page.locator("#heatmap [aria-selected=true]")).to_have_attribute(
        "aria-label", page.locator("#heatmap-readout").inner_text()
    )
    findings.nth(1).get_by_role("button").click()
    expect(page.locator("#head-title")).to_have_text(study.findings()[1].split()[0])


def test_a_head_is_selected_by_pointer(open_page: Open) -> None:
    study = make_study(3, 4, relations=RELATIONS)
    page = open_page(study)
    page.locator("#heatmap tbody tr").nth(1).locator("td").nth(3).click()
    expect(page.locator("#head-title")).to_have_text("L1.H3")
    expect(page.locator("#table tr.chosen button")).to_have_text("L1.H3")
    numbers = page.locator("#numbers tr", has=page.get_by_text("On the previous token", exact=True))
    row = study.table.row("L1.H3")
    expect(numbers).to_contain_text(f"{study.table.mean('previous')[row]:.3f} ± ")
    expect(numbers).to_contain_text(f"{study.table.count('previous')[row]:,.0f}")


def test_a_head_is_selected_by_keyboard(open_page: Open) -> None:
    page = open_page(make_study(3, 4))
    first = page.locator("#heatmap td[tabindex='0']")
    first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    expect(page.locator("#head-title")).to_have_text("L2.H1")
    assert page.locator("#heatmap td[tabindex='0']").count() == 1


def test_the_statistic_can_be_switched(open_page: Open) -> None:
    study = make_study(2, 3, relations=RELATIONS)
    page = open_page(study)
    page.select_option("#statistic", label="subject")
    expect(page.locator("#meaning")).to_contain_text("A verb → its subject")
    cells = page.locator("#heatmap td.cell").all_inner_texts()
    brief = [f"{x:.2f}".replace("0.", ".", 1) for x in study.table.mean("subject")]
    assert [cell.replace("−", "-") for cell in cells] == brief
    expect(page.locator("#legend")).to_contain_text("uniform attention: 0.090")


def _lacking(study: Study, statistic: str, heads: int) -> Study:
    """The study with a statistic that does not apply to the first heads."""
    totals = study.table.totals[statistic]
    places = np.arange(len(study.table.heads))
    lacking = totals.select(lambda column: np.where(places < heads, 0.0, column))
    table = replace(study.table, totals={**study.table.totals, statistic: lacking})
    return replace(study, table=table)


def test_cells_that_do_not_apply_are_hatched_and_never_zero(open_page: Open) -> None:
    page = open_page(_lacking(make_study(2, 3), "previous", 2))
    page.select_option("#statistic", label="On the previous token")
    assert page.locator("#heatmap td.hatched").all_inner_texts() == ["", ""]
    expect(page.locator("#legend")).to_contain_text("does not apply")
    assert column(page, "On the previous token")[:2] == ["–", "–"]


def test_statistics_that_apply_to_no_head_are_omitted_with_a_note(open_page: Open) -> None:
    page = open_page(make_study(2, 3))  # causal: no query sees the next token
    assert "On the next token" not in page.locator("#statistic option").all_inner_texts()
    expect(page.locator("#unknown")).to_contain_text("apply to no head of this model: On the next")


def test_the_table_sorts_down_and_up_by_numbers(open_page: Open) -> None:
    study = make_study(4, 5, relations=RELATIONS)
    page = open_page(study)
    title = page.locator("#table th[scope=col]", has_text="Largest logit")
    values = np.sort(study.table.mean("max_logit"))
    assert (values < 0).any()
    assert (values >= 10).any()  # so that sorting as text would show

    def numbers() -> list[float]:
        return [float(text.replace("−", "-")) for text in column(page, "Largest logit")]

    title.get_by_role("button").click()
    expect(title).to_have_attribute("aria-sort", "descending")
    np.testing.assert_allclose(numbers(), values[::-1], atol=0.006)
    title.get_by_role("button").press("Enter")
    expect(title).to_have_attribute("aria-sort", "ascending")
    np.testing.assert_allclose(numbers(), values, atol=0.006)
    assert page.locator("#table [aria-sort]:not([aria-sort=none])").count() == 1


def test_heads_sort_in_model_order(open_page: Open) -> None:
    study = make_study(2, 12)
    page = open_page(study)
    names = [str(head) for head in study.table.heads]
    assert column(page, "Head") == names
    page.get_by_role("button", name="Head", exact=True).click()
    assert column(page, "Head") == names[::-1]


def test_cells_that_do_not_apply_sort_last_both_ways(open_page: Open) -> None:
    page = open_page(_lacking(make_study(1, 3), "entropy", 1))
    for _ in range(2):
        page.get_by_role("button", name="Entropy").click()
        assert column(page, "Entropy")[-1] == "–"


def test_a_head_shows_its_roles_or_that_it_has_none(open_page: Open) -> None:
    study = make_study(2, 3)
    page = open_page(study.with_roles(make_roles(study, with_role=(0, 4))))
    scrolled_to(page, "#head").select_option(label="L1.H1")
    card = page.locator("#head-roles .role-card")
    expect(card).to_contain_text("a token → the token before it")
    for text in ("0.875 [0.812, 0.938]", "0.250 of previous token", "0.875 on the other half"):
        expect(card).to_contain_text(text)
    scrolled_to(page, "#head").select_option(label="L0.H1")
    expect(page.locator("#head-roles .none")).to_have_text("No role found.")
    expect(page.locator("#head-roles")).to_contain_text("Tested; nearest was previous token: 0.125")
    page.locator("#roles").get_by_role("button", name="L0.H0", exact=True).click()
    expect(page.locator("#head-title")).to_have_text("L0.H0")
    expect(page.locator("#head-roles .effect-line")).to_contain_text("+0.500 [+0.375, +0.625]")
    expect(page.locator("#head-roles")).to_contain_text("back each other up")
    page.get_by_text("The whole evidence").click()
    expect(page.locator("#head-roles pre")).to_contain_text("nulls: ")


def test_a_head_that_was_not_tested_shows_what_is_missing(open_page: Open) -> None:
    study = make_study(2, 3)
    roles = make_roles(study, with_role=())
    page = open_page(
        study.with_roles(replace(roles, rows=roles.rows.assign(p_adj=np.nan, texts=1.0)))
    )
    said = "Not tested: 1 held-out text, 30 needed."
    expect(page.locator("#head-roles > p").first).to_have_text(said)
    expect(page.locator(".roles p.none").first).to_have_text(said)
    expect(page.get_by_text("No role found")).to_have_count(0)


def test_maps_of_two_texts_have_the_tokens_of_both(open_page: Open) -> None:
    study = make_study(1, 2, stacks=("encoder", "decoder", "decoder.cross"), sentences=())
    source, target = ("un", "deux", "trois"), ("one", "two")
    sizes = {"source": len(source), "target": len(target)}
    sample = Sample(source, {}, target)
    weights = {}
    for head in study.table.heads:
        rows, columns = (sizes[side] for side in sample.sides(head))
        weights[head] = np.full((rows, columns), 1 / columns, np.float32)
    page = open_page(replace(study, samples=(replace(sample, weights=weights),)))
    for head, queries, keys in (
        ("encoder.L0.H1", source, source),
        ("decoder.L0.H0", target, target),
        ("decoder.cross.L0.H1", target, source),
    ):
        scrolled_to(page, "#head").select_option(label=head)
        assert page.locator("#map thead th").all_inner_texts() == list(keys)
        assert page.locator("#map tbody th").all_inner_texts() == list(queries)
        sides = {source: "source", target: "target"}
        expect(page.locator("#map-readout")).to_contain_text(
            f"Rows: {sides[queries]}; columns: {sides[keys]}."
        )
    expect(page.locator("#links-from")).to_have_text("one")
    expect(page.locator("#target option:checked")).to_have_text("un")


def test_another_sample_has_its_own_map(open_page: Open) -> None:
    study = make_study(2, 3)
    page = open_page(study)
    scrolled_to(page, "#head").select_option(label="L0.H1")
    page.select_option("#sample", index=1)
    sample = study.samples[1]
    weights = sample.weights[study.table.heads[1]].astype(float)
    size = len(sample.tokens)
    assert page.locator("#map td.cell").count() == size * (size + 1) // 2
    assert page.locator("#map td.hatched").count() == 1
    page.locator("#map tbody tr").nth(3).locator("td").nth(1).hover()
    expect(page.locator("#map-readout")).to_contain_text(
        f"{sample.tokens[3]} → {sample.tokens[1]}: {weights[3, 1]:.2f}"
    )


@pytest.mark.parametrize("heads", tiers([32], [4, 12]))
def test_nothing_overflows_on_a_phone(open_page: Open, heads: int) -> None:
    words = " ".join(["incomprehensibilities"] * 24)
    study = make_study(3, heads, title="a" * 200, relations=RELATIONS, sentences=[words])
    study = study.with_roles(make_roles(study, text="incomprehensibilities" * 9))
    page = open_page(study, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_page_follows_the_color_scheme(open_page: Open) -> None:
    study = make_study()
    script = """() => {
      const canvas = document.createElement("canvas").getContext("2d");
      canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
      canvas.fillRect(0, 0, 1, 1);
      return Math.max(...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3));
    }"""
    assert open_page(study, color_scheme="dark").evaluate(script) < 60
    assert open_page(study, color_scheme="light").evaluate(script) > 240


def test_hostile_text_is_shown_and_runs_nothing(open_page: Open) -> None:
    plain = make_study(1, 2, relations=RELATIONS)
    study = replace(
        plain,
        title=HOSTILE,
        model={HOSTILE: HOSTILE},
        meanings={"subject": HOSTILE, "earlier copy": HOSTILE},
        samples=(make_sample([HOSTILE, "\u202eb", "\n"], plain.table.heads, np.zeros(2, int)),),
    ).with_roles(make_roles(plain, text=HOSTILE))
    page = open_page(study)
    assert page.title() == f"{HOSTILE} · headwise"
    expect(page.locator("h1")).to_have_text(HOSTILE)
    labels = page.locator("#map tbody th").all_text_contents()
    assert labels == [
        '</script><img src=x onerror="w…ipt>window.ran = true</script>',
        "‹202E›b",
        "↵",
    ]
    assert page.evaluate("window.ran") is None
    assert page.locator("img").count() == 0


def test_the_policy_blocks_inline_scripts(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(make_study().report(tmp_path / "page.html").as_uri())
    ran = page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.ran = true";
      document.body.append(script);
      return window.ran ?? false;
    }""")
    page.close()
    assert ran is False


def test_a_study_without_samples_still_has_its_page(open_page: Open) -> None:
    page = open_page(replace(make_study(), samples=()))
    expect(page.locator("#sample-section")).to_contain_text("no text with maps")
    scrolled_to(page, "#head").select_option(index=2)
    expect(page.locator("#head-title")).to_have_text("L0.H2")
