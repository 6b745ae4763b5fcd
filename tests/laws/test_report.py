"""The page shows the study, runs no foreign script, and stays small."""

import base64
import hashlib
import json
import re
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise._display import counted
from headwise.report import Sample, Study, TopPairs
from headwise.report.page import render
from headwise.report.page._overview import overview
from headwise.report.page._payload import as_json, heads_shown_first, payload
from headwise.report.page._pictures import curve_picture, round_ticks
from headwise.report.page._visible_text import digits, probability, visible, visible_token
from headwise.tables import Curves, Head, HeadTable
from studies import make_effects, make_heads, make_roles, make_sample, make_study, make_totals
from tiers import tiers

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt;",
    '" onmouseover="alert(1)',
    "{{ 7*7 }}",
    "\u202eright to left\u2028",
    "line\nbreak\x00",
    "\ud800",
)
RELATIONS = {f"relation {n}": f"a word → the word number {n}" for n in range(12)}


class Page(HTMLParser):
    """The elements of a page as a browser parses them: attributes and content."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "wbr":  # a place where a title may break: its text goes on
            return
        self._open = tag
        self.inside.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inside[self._open][-1] += data

    def attributes(self, name: str) -> set[str | None]:
        return {attrs[name] for _, attrs in self.elements if name in attrs}


def decode(cells: list[str], packed: tuple[float, str]) -> np.ndarray:
    """Read a map as the page does."""
    peak, data = packed
    numbers = iter(base64.b64decode(data))
    signs = {"+": lambda: next(numbers) / 255 * peak, "1": lambda: 1.0, ".": lambda: 0.0}
    return np.array([[signs[sign]() for sign in row] for row in cells])


def study_of(means: list[float], texts: int = 40, noise: float = 0.02, even: float = 0.1) -> Study:
    """A study of heads in one layer with these shares on the previous token."""
    table = HeadTable(
        make_heads(1, len(means)),
        np.arange(len(means)),
        {"previous": make_totals(np.array(means), even, texts, noise)},
    )
    return Study("planted", {}, {}, table, {}, (), None)


def test_the_page_makes_no_requests() -> None:
    html = render(make_study(relations=RELATIONS))
    page = Page(html)
    assert page.attributes("src") == set()
    assert {link for link in page.attributes("href") if not (link or "").startswith("#")} == set()
    assert not {"link", "iframe", "img", "object", "embed", "base"} & page.inside.keys()
    html = html.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing fetches
    requests = re.findall(r"https?:|url\(|@import|import\(|fetch\(|XMLHttp|WebSocket|Beacon", html)
    assert requests == []


def test_the_policy_allows_exactly_the_style_and_script_of_the_page() -> None:
    page = Page(render(make_study()))
    (policy,) = page.attributes("content") - {"width=device-width, initial-scale=1", "light dark"}
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    for text in (page.inside["style"][0], page.inside["script"][1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


@pytest.fixture(scope="module")
def calm() -> Page:
    """A page of a study whose names are words."""
    study = make_study(relations={"name": "says"})
    return Page(render(study.with_roles(make_roles(study))))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_from_models_and_corpora_is_never_markup(hostile: str, calm: Page) -> None:
    plain = make_study(relations={"name": "says"})
    study = replace(
        plain,
        title=hostile,
        model={hostile: hostile},
        text={hostile: hostile},
        training={hostile: hostile},
        meanings={"name": hostile},
        samples=(make_sample([hostile, "b", "c"], plain.table.heads, np.zeros(8, int)),),
    )
    whole = hostile.encode("utf-8", "replace").decode()  # a frame holds no half of a pair
    study = study.with_roles(make_roles(plain, text=whole))
    html = render(study)
    page = Page(html)
    assert page.inside.keys() == calm.inside.keys()
    assert len(page.inside["script"]) == 2
    assert page.inside["h1"] == [visible(hostile)]
    assert json.loads(page.inside["script"][0]) == payload(study)
    html.encode("utf-8")


def test_data_cannot_end_its_element() -> None:
    text = as_json({"tokens": list(HOSTILE)})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"tokens": list(HOSTILE)}


@given(st.text(st.characters()))
def test_every_control_character_is_made_visible(text: str) -> None:
    shown = visible(text)
    assert not {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} & set(map(unicodedata.category, shown))
    assert visible(shown) == shown
    assert visible_token(text).strip(" ") == visible_token(text) != ""


@pytest.mark.parametrize(
    ("token", "shown"),
    [("", "∅"), ("  ", "␣␣"), (" the", "␣the"), ("a b", "a b"), ("\n", "↵"), ("\u200f", "‹200F›")],
)
def test_tokens_show_their_spaces_and_breaks(token: str, shown: str) -> None:
    assert visible_token(token) == shown


@given(st.integers(2, 11), st.booleans(), st.integers(0, 5))
def test_maps_decode_to_half_a_step(size: int, causal: bool, style: int) -> None:
    heads = make_heads(2, 3)
    sample = make_sample(["w"] * size, heads, np.full(len(heads), style), causal)
    data = payload(replace(make_study(2, 3), samples=(sample,)))["samples"][0]
    for index, head in enumerate(heads):
        read = decode(data["views"][0]["cells"], data["maps"][str(index)])
        step = data["maps"][str(index)][0] / 255
        np.testing.assert_allclose(read, sample.weights[head], atol=step / 2 + 1e-6, rtol=0)


def test_cells_say_which_rows_have_a_choice() -> None:
    heads = make_heads(1, 2)
    diagonal = np.eye(3, dtype=np.float32)
    causal = np.tril(np.ones((3, 3), np.float32)) / np.arange(1, 4)[:, None].astype(np.float32)
    sample = Sample(("a", "b", "c"), {heads[0]: diagonal, heads[1]: causal})
    data = payload(replace(study_of([0.5, 0.5]), samples=(sample,)))["samples"][0]
    assert [view["cells"] for view in data["views"]] == [["1..", "++.", "+++"]]


@pytest.mark.parametrize("role", ["prefix matching", "previous token", "next subject"])
def test_a_head_is_shown_where_its_role_is_plainest(role: str) -> None:
    study = make_study(1, 2)
    head, other = study.table.heads
    texts = [("a", "b", "c", "d"), ("x", "a", "b", "c", "a", "b")]
    maps = [np.full((len(text), len(text)), 0.02, dtype=np.float32) for text in texts]
    maps[0][2, 1] = maps[1][1, 0] = maps[1][2, 1] = 0.9  # the previous token
    maps[1][4, 2] = maps[1][5, 3] = 0.7  # what followed the earlier copy
    samples = tuple(
        Sample(text, {head: weights, other: weights})
        for text, weights in zip(texts, maps, strict=True)
    )
    data = payload(replace(study, samples=samples, roles=make_roles(study, text=role)))
    expected = {"prefix matching": {0: (1, 4)}, "previous token": {0: (0, 2)}}
    assert data["places"] == expected.get(role, {})  # whose pairs need an annotation


def test_a_head_without_a_map_or_with_a_broken_one_has_none() -> None:
    heads = make_heads(1, 2)
    broken = np.full((2, 2), np.nan, np.float32)
    sample = Sample(("a", "b"), {heads[0]: broken, Head("other", 0, 0): np.eye(2, dtype="f4")})
    data = payload(replace(study_of([0.5, 0.5]), samples=(sample,)))["samples"][0]
    assert (data["maps"], data["pairs"]) == ({}, {})


def test_numbers_of_the_page_are_those_of_the_table() -> None:
    study = make_study(3, 5, relations=RELATIONS)
    data = payload(study)
    assert data["heads"] == [str(head) for head in study.table.heads]
    names = [name for name in study.table.statistics if name != "next"]  # no head has it
    for statistic, name in zip(data["statistics"], names, strict=True):
        for part, column in {
            "mean": study.table.mean(name),
            "error": study.table.standard_error(name),
            "count": study.table.count(name),
            "maximum": study.table.maximum(name),
            "even": study.table.uniform(name),
        }.items():
            # None means that a statistic does not apply; one number stands for all heads.
            values = statistic[part] if isinstance(statistic[part], list) else [statistic[part]]
            read = np.array([np.nan if x is None else x for x in values])
            assert len(read) in (1, len(column))
            np.testing.assert_allclose(
                *np.broadcast_arrays(read, column), rtol=0.006 if part == "error" else 1e-3
            )
        assert statistic["requested"] == (name in RELATIONS)


def test_roles_stand_with_their_evidence() -> None:
    study = make_study(2, 3)
    study = study.with_roles(make_roles(study, with_role=(0, 4)))
    page = Page(render(study))
    cells = [text.strip() for text in page.inside["td"]]
    for content in ("0.875 [0.812, 0.938]", "0.83", "0.00025", "1,234 in 56 texts"):
        assert content in cells
    assert "0.250 of previous token" in page.inside["bdi"]
    assert "previous token +0.500 [+0.375, +0.625]" in page.inside["bdi"]  # without the head
    assert "–" in cells  # the other head was not ablated
    assert any("back each other up" in line for line in page.inside["p"])
    data = payload(study)["roles"]
    assert [len(role["rows"]) for role in data] == [1, 0, 0, 0, 1, 0]
    assert [bool(role["groups"]) for role in data] == [True, False, False, False, False, True]
    assert [len(role["effects"]) for role in data] == [1, 0, 0, 0, 0, 0]
    assert data[0]["effects"][0]["values"] == [0.5, 0.375, 0.625]
    assert "What became of each role" in page.inside["summary"]
    assert "found (2 heads)" in page.inside["bdi"]
    assert "0.500" in cells  # the smallest effect that these texts could have shown


def test_a_study_that_found_no_role_says_so() -> None:
    study = make_study(2, 3)
    page = Page(render(study.with_roles(make_roles(study, with_role=()))))
    assert "No role found." in page.inside["p"]
    assert "not found" in page.inside["bdi"]
    assert "Roles and their evidence" in page.inside["h2"]


def test_heads_that_were_not_tested_are_not_reported_without_a_role() -> None:
    study = make_study(2, 3)
    roles = make_roles(study, with_role=())
    untested = replace(roles, rows=roles.rows.assign(p_adj=np.nan, texts=1.0))
    html = render(study.with_roles(untested))
    said = "Not tested: 1 held-out text, 30 needed."
    assert said in Page(html).inside["p"]
    assert {role["none"] for role in payload(study.with_roles(untested))["roles"]} == {said}
    assert "No role found" not in html


def test_pieces_of_one_text_give_no_finding() -> None:
    cut = replace(study_of([0.9, 0.1]), text={"texts": 1})
    (line,) = cut.findings()
    assert line.startswith("Shares of attention not tested: 1 text, 5 needed")
    assert payload(cut)["findings"] == []
    assert study_of([0.9, 0.1]).findings()[0].startswith("L0.H0 puts")


def test_sinks_stand_apart_from_roles() -> None:
    study = make_study(2, 2)
    roles = make_roles(study, with_role=(1,))
    sinks = make_roles(study, with_role=(0, 2), text="first token")
    rows = pd.concat([roles.rows, sinks.rows], ignore_index=True)
    meanings = {**roles.meanings, **sinks.meanings}
    both = study.with_roles(replace(roles, rows=rows, meanings=meanings))
    page = render(both)
    said = "Apart from roles: 2 heads are sinks, 0 of them empty by value."
    assert said in page
    data = payload(both)["roles"]
    assert [len(head["rows"]) for head in data] == [0, 1, 0, 0]
    assert data[0]["shape"].startswith("Sink: 0.88 [0.81, 0.94] of its attention on the first")
    assert "Apart from roles" not in render(study.with_roles(roles))


def test_a_study_without_roles_does_not_mention_them() -> None:
    study = make_study(2, 3)
    assert payload(study)["roles"] is None
    assert "Roles and their evidence" not in Page(render(study)).inside["h2"]


def test_drawing_twice_gives_the_same_page() -> None:
    assert render(make_study()) == render(make_study())


def test_report_writes_the_page(tmp_path: Path) -> None:
    study = make_study()
    path = study.report(str(tmp_path / "report.HTML"))
    assert path.read_text(encoding="utf-8") == render(study)
    assert list(tmp_path.iterdir()) == [path]


def test_a_planted_head_is_found() -> None:
    (line,) = study_of([0.1, 0.12, 0.9, 0.08]).findings()
    assert re.fullmatch(
        r"L0\.H2 puts 0\.9\d? ± 0\.0\d of its attention on the previous token; "
        r"uniform attention would put 0\.10 there\.",
        line,
    )


@given(st.lists(st.floats(0.0, 0.3), min_size=1, max_size=7))
def test_a_page_without_findings_says_so(means: list[float]) -> None:
    (line,) = study_of(means).findings()
    assert line.startswith("No head stands out: on 40 texts, ")
    assert f"{counted(len(means), 'head')} × 1 share of attention (previous)" in line


@pytest.mark.parametrize("texts", [1, 2, 4])
def test_few_texts_give_no_finding(texts: int) -> None:
    (line,) = study_of([0.9, 0.1], texts, noise=0.0).findings()
    plural = "" if texts == 1 else "s"
    assert line.startswith(f"Shares of attention not tested: {texts} text{plural}, 5 needed")


def test_a_large_share_with_a_wide_interval_is_no_finding() -> None:
    (line,) = study_of([0.9, 0.1], texts=6, noise=0.9).findings()
    assert line.startswith("No head stands out")


def test_attention_on_the_only_visible_keys_has_no_lift() -> None:
    (line,) = study_of([1.0, 1.0], noise=0.0, even=1.0).findings()
    assert line.startswith("No head stands out")


def test_a_table_without_shares_says_so() -> None:
    table = HeadTable(make_heads(1, 1), np.array([0]), {"entropy": make_totals(np.ones(1), np.nan)})
    (line,) = Study("", {}, {}, table, {}, (), None).findings()
    assert "no share of attention" in line


def test_of_two_equal_heads_the_first_is_reported() -> None:
    (line,) = study_of([0.1, 0.8, 0.8], noise=0.0).findings()
    assert line.startswith("L0.H1 puts 0.80 ± 0.01 ")


def test_a_head_and_a_statistic_are_reported_once() -> None:
    high, low = np.array([0.9, 0.7, 0.1, 0.1, 0.1]), np.full(5, 0.1)
    columns = {
        "previous": high,
        "copy": high,
        "first": low,
        "self": low + 0.5 * (np.arange(5) == 2),
    }
    totals = {name: make_totals(column, 0.1) for name, column in columns.items()}
    table = HeadTable(make_heads(1, 5), np.arange(5), totals)
    lines = Study("", {}, {}, table, {"copy": "of before"}, (), None).findings()
    assert [line.split()[0] for line in lines] == ["L0.H0", "L0.H2"]


def test_at_most_three_findings_the_largest_lift_first() -> None:
    names = ["first", "self", "previous", "next"]
    columns = 0.1 + np.diag([0.5, 0.8, 0.6, 0.7])
    totals = {name: make_totals(c, 0.1) for name, c in zip(names, columns, strict=True)}
    table = HeadTable(make_heads(1, 4), np.arange(4), totals)
    lines = Study("", {}, {}, table, {}, (), None).findings()
    assert [line.split()[0] for line in lines] == ["L0.H1", "L0.H3", "L0.H2"]


def test_a_relation_is_reported_with_its_description() -> None:
    study = study_of([0.1, 0.9])
    totals = {"subject": study.table.totals["previous"]}
    with_finding = replace(
        study, table=replace(study.table, totals=totals), meanings={"subject": "a verb → its own"}
    )
    assert "on “subject” (a verb → its own); uniform attention" in with_finding.findings()[0]


def test_the_ticks_of_curves_are_round() -> None:
    losses = {"half-gate": np.array([[[-1.69e-8, 0.1, 0.38]] * 3])}
    curves = Curves(np.array([0, 31, 62]), 72, losses, "embedding")
    picture = curve_picture(curves)
    assert [text for _, text in picture["x_ticks"]] == ["0", "20", "40", "60"]
    assert [text for _, text in picture["y_ticks"]] == ["0", "0.1", "0.2", "0.3", "0.4"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_round_ticks_enclose_their_range(low: float, size: float) -> None:
    ticks = round_ticks(low, low + size)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] <= low + size / 1000
    assert ticks[-1] >= low + size - size / 1000


LIMIT = 5_000_000


@pytest.mark.parametrize(
    ("layers", "heads", "causal"),
    tiers([(24, 16, True)], [(32, 32, True), (32, 32, False), (48, 64, True)]),
)
def test_page_of_a_large_model_stays_below_its_limit(layers: int, heads: int, causal: bool) -> None:
    words = " ".join(["word"] * 24)
    study = make_study(layers, heads, relations=RELATIONS, sentences=[words] * 7, causal=causal)
    html = render(study.with_roles(make_roles(study, with_role=range(layers * heads))))
    assert len(html.encode()) < LIMIT
    data = json.loads(Page(html).inside["script"][0])
    assert len(data["samples"]) + data["left_out"] == 7
    assert len(data["samples"]) >= 1
    for sample in data["samples"]:  # what is missing is counted, and strong heads are kept
        assert len(sample["maps"]) + sample["missing"] == layers * heads
        assert sample["maps"]


def long_sample(study: Study, tokens: int, with_pairs: int, keys: int = 4) -> Sample:
    """A long text with the strongest pairs of the first heads, and sums per layer."""
    rng = np.random.default_rng(0)
    queries = np.arange(tokens)[:, None]
    pairs = {
        head: TopPairs(
            np.minimum(rng.integers(0, tokens, (tokens, keys)), queries).astype(np.int32),
            np.sort(rng.random((tokens, keys)) / keys, axis=1)[:, ::-1].astype(np.float32),
        )
        for head in study.table.heads[:with_pairs]
    }
    places = {(head.stack, head.layer) for head in study.table.heads}
    received = {place: np.full(tokens, 1 / tokens, np.float32) for place in places}
    return Sample(tuple(f" w{n}" for n in range(tokens)), {}, (), pairs, received)


@pytest.mark.parametrize(("layers", "heads", "tokens"), tiers([(24, 16, 4096)], [(48, 64, 8000)]))
def test_long_texts_keep_the_page_below_its_limit(layers: int, heads: int, tokens: int) -> None:
    study = make_study(layers, heads, sentences=())
    study = replace(study, samples=(long_sample(study, tokens, 64),) * 2)
    html = render(study)
    assert len(html.encode()) < LIMIT
    data = json.loads(Page(html).inside["script"][0])
    assert data["left_out"] == 0
    shown = [str(study.table.heads.index(head)) for head in heads_shown_first(study)]
    for sample in data["samples"]:
        assert 1 <= len(sample["pairs"]) == layers * heads - sample["missing"]
        assert len(sample["received"]) == layers
        kept = [place for place in shown if place in sample["pairs"]]
        assert kept[0] == next(place for place in shown if int(place) < 64)
    whole = json.loads(Page(render(study, full=True)).inside["script"][0])
    assert [len(sample["pairs"]) for sample in whole["samples"]] == [64, 64]


def test_the_page_opens_on_the_head_of_the_first_finding() -> None:
    study = make_study(2, 8)
    head = study.findings()[0].split()[0]
    others = [row for row, name in enumerate(study.table.heads) if str(name) != head]
    study = study.with_roles(make_roles(study, with_role=others))
    assert str(heads_shown_first(study)[0]) == head
    assert payload(study)["start"] == study.table.row(head)


@given(st.integers(65, 90), st.integers(1, 4))
def test_pairs_decode_to_half_a_step(tokens: int, keys: int) -> None:
    study = make_study(1, 2, sentences=())
    sample = long_sample(study, tokens, 1, keys)
    (data,) = payload(replace(study, samples=(sample,)))["samples"]
    peak, text = data["pairs"]["0"]
    raw = base64.b64decode(text)
    read = np.frombuffer(raw[: 2 * tokens * keys], "<u2").reshape(tokens, keys)
    weights = np.frombuffer(raw[2 * tokens * keys :], np.uint8).reshape(tokens, keys)
    pairs = sample.pairs[study.table.heads[0]]
    np.testing.assert_array_equal(read, pairs.keys)
    np.testing.assert_allclose(weights / 255 * peak, pairs.weights, atol=peak / 510 + 1e-6)
    assert (data["missing"], data["maps"]) == (1, {})


def test_many_texts_to_show_share_the_page() -> None:
    words = " ".join(["word"] * 60)
    study = make_study(6, 12, sentences=[words] * 36)
    html = render(study)
    assert len(html.encode()) < LIMIT
    data = json.loads(Page(html).inside["script"][0])
    assert len(data["samples"]) == 36
    assert min(len(sample["maps"]) for sample in data["samples"]) >= 12


def test_a_token_of_10_000_characters_is_shortened() -> None:
    study = make_study(1, 1)
    sample = make_sample(["a" * 10_000, "b"], study.table.heads, np.zeros(1, int))
    (data,) = payload(replace(study, samples=(sample,)))["samples"]
    assert len(data["tokens"][0]) == 61


def test_the_sentence_counts_each_head_once_or_names_why() -> None:
    study = make_study(2, 3)
    text = " ".join(render(study.with_roles(make_roles(study, with_role=(0, 4)))).split())
    assert '<a class="count" href="#evidence-1">2</a> look at the previous token;' in text
    assert '<a class="count" href="#evidence-2">4</a> show nothing detectable' in text
    assert "<details" in text
    assert "0.875 [0.812, 0.938]" in text


def test_a_head_is_placed_by_what_most_of_its_attention_does() -> None:
    """Every null is beaten by an attention of 0.03, too; 0.88 of it is on a sink, or elsewhere."""
    study = make_study(2, 3)
    strong = make_roles(study, with_role=(1,))
    weak = make_roles(study, with_role=(0, 1, 2), text="self")
    weak.rows.loc[weak.rows["found"], "effect"] = 0.03
    sinks = make_roles(study, with_role=(0, 3), text="first token")
    rows = pd.concat([strong.rows, weak.rows, sinks.rows], ignore_index=True)
    meanings = {**strong.meanings, **weak.meanings, **sinks.meanings}
    study = study.with_roles(replace(strong, rows=rows, meanings=meanings))
    shown = overview(study)
    assert shown is not None
    clauses = [(clause.count, clause.after) for clause in shown["clauses"] if clause.of_heads]
    assert clauses == [
        (1, "looks at the previous token"),
        (1, "attends to a relation more than chance"),
        (
            2,
            "are sinks, of which 0 take almost no information from the token they attend to "
            "(1 also has a weak role)",
        ),
        (2, "show nothing detectable in these texts"),
    ]
    assert sum(count for count, _ in clauses) == len(study.table.heads)
    (picture,) = shown["maps"]
    squares = picture["squares"]
    assert [bool(x["color"]) for x in squares] == [False, True, True, False, False, False]
    assert [x["letter"] for x in squares if x["letter"]] == ["○A", "B", "A", "○"]
    assert "self more than chance" in squares[0]["text"]


def test_the_sentence_counts_roles_that_were_not_tested() -> None:
    study = make_study(2, 3)
    roles = make_roles(study)
    rows = roles.frame()
    few = {"role": "subject", "outcome": "not tested: 6 held-out texts, 30 needed", "found": False}
    untested = rows.assign(**few, label="", p_adj=np.nan)
    for parts, expected in (((rows, untested), True), ((rows,), False), ((untested,), False)):
        meanings = roles.meanings | {"subject": "a verb → its subject"}
        whole = replace(roles, rows=pd.concat(parts, ignore_index=True), meanings=meanings)
        text = " ".join(render(study.with_roles(whole)).split())
        assert ("</a> of 2 roles could not be tested on these texts" in text) is expected
        assert ('<th scope="row">subject</th>' in text) is expected


@pytest.mark.parametrize(
    ("p", "text"), [(1.1e-13, "1·10⁻¹³"), (0.00042, "0.00042"), (0.0251, "0.025"), (1.0, "1")]
)
def test_small_probabilities_are_powers_of_ten(p: float, text: str) -> None:
    assert probability(p) == text


def test_the_static_page_has_the_tables_and_the_map() -> None:
    study = make_study(2, 3)
    html = render(study.with_roles(make_roles(study, with_role=(0,))))
    assert html.count("data-head=") == 6
    page = Page(html)
    for head in study.table.heads:
        assert str(head) in page.inside["th"]
    assert f"{study.table.mean('entropy')[3]:.3f}" in page.inside["td"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0.000"), (0.0004, "0.0004"), (2e-8, "2·10⁻⁸"), (0.002, "0.002"), (np.nan, "–")],
)
def test_numbers_keep_a_significant_digit(number: float, text: str) -> None:
    assert digits(number) == text


@pytest.mark.parametrize("found", [True, False, None])
@pytest.mark.parametrize("total", [True, False])
def test_writers_and_cancellers_have_a_table_and_a_plot(found: bool | None, total: bool) -> None:
    study = make_study(2, 4)
    effects = make_effects(study, "<note>")
    rows = effects.frame()
    if not found:
        rows["kind"] = "not tested" if found is None else "none"
    if found is None:
        rows["p_adj"] = np.nan
    if not total:
        rows[["total", "repair"]] = np.nan
    page = render(study.with_effects(replace(effects, rows=rows)))
    section = page.partition('<section id="effects"')[2].partition("</section>")[0]
    held = "examples" if found is None else "held-out examples"
    assert f"Logit difference +2.50 over 20 {held}" in section
    assert "&lt;note&gt;" in section
    assert re.findall('data-show="(.*?)"', section) == (["L0.H0", "L1.H3"] if found else [])
    assert ("No head is a writer or a canceller." in section) == (found is False)
    assert ("No head was tested." in section) == (found is None)
    assert ("[0.875, 1.125]" in section) == (found is True)
    of_heads = re.findall('<circle class="dot (.*?)" cx="(.*?)" cy="(.*?)" r="4"><title', section)
    assert len(of_heads) == (8 if total else 0)
    if total and found:  # in the order of drawing: a writer above and right of a canceller
        (writer, *above), (canceller, *below) = sorted(of_heads)[-2:]
        assert (writer, canceller) == ("hue-0", "hue-1")
        assert float(above[0]) > float(below[0])
        assert float(above[1]) < float(below[1])


@pytest.mark.parametrize(("order", "losses"), [("random", [1.0, 2.0]), ("half-gate", [0.0, 0.5])])
def test_curves_that_allow_no_share_have_a_picture_alone(order: str, losses: list[float]) -> None:
    curves = Curves(
        np.array([0, 2]), 8, {order: np.array([[[loss, loss] for loss in losses]])}, "lm"
    )
    page = render(make_study().with_pruning(curves=curves))
    assert "could be removed together" not in page
    assert 'class="curves"' in page
