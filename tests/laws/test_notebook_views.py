"""What notebooks show: small, well-formed, without a script, whatever the names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import masks
from headwise.report import Study, compare_tables
from headwise.tables import Curves
from studies import make_heads, make_roles, make_study
from tables_of_texts import make_table

HOSTILE = "</p><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m"
HEADS = make_heads(48, 64)


def _scores() -> hw.Scores:
    values = np.random.default_rng(0).random((2, len(HEADS)))
    return hw.Scores(HEADS, np.arange(len(HEADS)), values, method=HOSTILE, loss=HOSTILE)


def _study() -> Study:
    study = make_study(24, 16, title=HOSTILE, relations={HOSTILE: HOSTILE})
    return study.with_roles(make_roles(study, range(100), HOSTILE))


def _comparison() -> Any:
    table = make_table(texts=31, layers=24, heads=16)
    comparison = compare_tables(table, table, draws=1)
    return replace(comparison, titles=(HOSTILE, HOSTILE))


VIEWS: dict[str, Callable[[], Any]] = {
    "study": _study,
    "table": lambda: replace(make_table(layers=24, heads=16), model=HOSTILE),
    "roles": lambda: make_roles(make_study(24, 16), range(300), HOSTILE),
    "scores": _scores,
    "plan": lambda: replace(hw.plan(_scores(), remove=0.3), why=HOSTILE),
    "curves": lambda: Curves(
        np.arange(100), 384, {HOSTILE: np.ones((1, 100, 2)), "b": np.ones((2, 100, 2))}, HOSTILE
    ),
    "cache plan": lambda: replace(
        hw.CachePlan.of({0: [1]}, n_layers=48, n_kv_heads=8), why=HOSTILE
    ),
    "comparison": _comparison,
    "mask": lambda: masks.causal() & masks.documents(torch.zeros(3, 5000, dtype=torch.long)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_small_and_harmless(view: str) -> None:
    html = VIEWS[view]()._repr_html_()
    assert len(html.encode()) < 1_000_000
    root = ElementTree.fromstring(html.replace("&nbsp;", " "))
    tags = {element.tag for element in root.iter()}
    assert not {"script", "style", "img", "link", "iframe"} & tags
    assert not [name for x in root.iter() for name in x.attrib if name.startswith("on")]
    assert "\x1b" not in html
    assert "svg" in tags


def test_roles_are_a_map_with_letters_and_a_legend() -> None:
    study = make_study(2, 4)
    root = ElementTree.fromstring(make_roles(study, [1, 6])._repr_html_())
    assert [text.text for text in root.iter("text")] == ["A", "A"]
    titles = [title.text for title in root.iter("title")]
    marked = [title for title in titles if title and "none" not in title]
    assert (len(titles), marked) == (8, ["L0.H1: previous token", "L1.H2: previous token"])
    assert ["".join(row.itertext()) for row in root.iter("li")] == ["A previous token, 2"]


def _squares(mask: masks.Mask) -> list[list[bool]]:
    root = ElementTree.fromstring(mask._repr_html_())
    filled: dict[int, list[bool]] = {}
    for square in root.iter("rect"):
        filled.setdefault(int(square.attrib["y"]), []).append(square.attrib["fill"] == "#2c728e")
    return [filled[row] for row in sorted(filled)]


def test_a_mask_is_drawn_as_it_is() -> None:
    assert _squares(masks.causal()) == torch.ones(12, 12).tril().bool().tolist()
    visible = torch.rand(5, 7) > 0.5
    assert _squares(masks.as_mask(visible)) == visible.tolist()
    ids = torch.tensor([[0, 0, 1, 1, 1]])
    packed = ids[0][:, None] == ids[0]
    assert _squares(masks.documents(ids)) == packed.tolist()
    either = ~packed | torch.ones(5, 5).tril().bool()
    assert _squares(~masks.documents(ids) | masks.causal()) == either.tolist()
    long = masks.documents(torch.zeros(2, 4000, dtype=torch.long))
    assert "4000 keys, the last 32 and 32 shown; the first of 2 texts" in long._repr_html_()


def test_the_curves_of_a_notebook_end_where_they_end() -> None:
    values = np.linspace(0, 2, 5)[None, :, None].repeat(3, 2)
    root = ElementTree.fromstring(Curves(np.arange(5), 8, {"a": values})._repr_html_())
    [line] = root.iter("polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 5
