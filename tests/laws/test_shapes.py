"""Sinks and diffuse heads, planted with known attention, values and dependence on length."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from headwise.layer import MultiHeadAttention
from headwise.roles import Evidence, Roles, find_roles
from headwise.roles._rows import length_measures
from headwise.roles.evidence import Hypotheses
from headwise.roles.relations import Role
from planted import CONTEXT, TOKENIZER, lines

TEXTS = lines(90)
EMPTY, BROADCASTS, EVEN, ALMOST, SHARP = range(5)


class Sinking(torch.nn.Module):
    """Five heads: an empty sink, one that broadcasts, an even head, an uneven one, a sharp one.

    The stream holds a constant, whether a token is the first, and its position.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 2 + CONTEXT
        self.config = SimpleNamespace(context=CONTEXT)
        self.layer = MultiHeadAttention(width, 5, head_dim=width)
        q, k, v = torch.zeros(3, 5, width, width)
        root = width**0.5  # the layer divides by it
        for head in (EMPTY, BROADCASTS):
            q[head, 0, 0], k[head, 0, 1] = 3.5 * root, 1.0
        rng = torch.Generator().manual_seed(0)
        for head, size in ((ALMOST, 0.8), (SHARP, 3.0)):
            q[head, 0, 0] = size * root  # a logit of its own for each position
            k[head, 0, 2:] = torch.randn(CONTEXT, generator=rng)
        v[:, 0, 0] = 1.0  # all tokens alike
        v[EMPTY, 0, 1] = -1.0  # but nothing at the first
        v[BROADCASTS, 0] = 0.0
        v[BROADCASTS, 0, 1] = 1.0  # the first alone
        with torch.no_grad():
            for projection, weight in (("q", q), ("k", k), ("v", v)):
                getattr(self.layer, f"{projection}_proj").weight.copy_(weight.flatten(0, 1))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        B, T = input_ids.shape
        x = torch.zeros(B, T, 2 + CONTEXT)
        x[..., 0], x[:, 0, 1] = 1.0, 1.0
        x[..., 2:] = torch.eye(CONTEXT)[:T]
        return self.layer(x, mask=attention_mask.bool()[:, None, None])


@pytest.fixture(scope="module")
def roles() -> Roles:
    return find_roles(Sinking(), TEXTS, tokenizer=TOKENIZER, evidence=Evidence(("permuted",)))


@pytest.fixture(scope="module")
def shapes(roles: Roles) -> pd.DataFrame:
    return roles.shapes().set_index("head")


def test_a_figure_marks_sinks_and_diffuse_heads(roles: Roles) -> None:
    ax = roles.plot()
    entries = [text.get_text() for text in ax.get_legend().get_texts()]
    signs = [text.get_text() for text in ax.texts]
    n_sinks = roles.shapes()["shape"].str.contains("sink").sum()
    assert n_sinks
    assert f"○  sink, {n_sinks}" in entries
    counts = Counter(sign[:1] for sign in signs)  # a letter follows where the head has a role
    assert (counts["○"], counts["≈"]) == (n_sinks, len(roles.shapes()) - n_sinks)


def test_a_sink_is_empty_or_broadcasts_by_the_values_that_are_read(shapes: pd.DataFrame) -> None:
    assert shapes.loc[[EMPTY, BROADCASTS], "token"].tolist() == ["first token"] * 2
    assert shapes.loc[EMPTY, "attention"] == pytest.approx(shapes.loc[BROADCASTS, "attention"])
    assert shapes.loc[EMPTY, ["value", "carries"]].tolist() == [0.0, "empty"]
    assert shapes.loc[BROADCASTS, ["value", "carries"]].tolist() == [1.0, "broadcasting"]


def test_a_sink_that_spreads_the_rest_evenly_is_diffuse_too(roles: Roles, shapes) -> None:
    assert roles.shape((0, EMPTY)) == "sink + diffuse"
    assert shapes.loc[EMPTY, "evenness"] < 0.85  # the sink itself is not even
    assert shapes.loc[EMPTY, "evenness_beside_sinks"] == pytest.approx(1.0, abs=1e-3)


def test_a_head_is_diffuse_from_the_limit_on(roles: Roles, shapes: pd.DataFrame) -> None:
    rows = roles.frame().set_index(["role", "head"])
    evenness = {head: rows.loc[("diffuse", head), "effect"] for head in (EVEN, ALMOST, SHARP)}
    assert evenness[EVEN] == pytest.approx(1.0, abs=1e-4)
    assert 0.86 < evenness[ALMOST] < 0.99
    assert evenness[SHARP] < 0.8
    assert [roles.shape((0, head)) for head in (EVEN, ALMOST, SHARP)] == ["diffuse", "diffuse", ""]
    assert SHARP not in shapes.index


def test_a_sink_of_constant_logit_takes_less_of_longer_texts(shapes: pd.DataFrame) -> None:
    row = shapes.loc[EMPTY]
    assert row["short"] > row["attention"] > row["long"]
    assert shapes["short"].drop([EMPTY, BROADCASTS]).isna().all()


def test_shapes_are_no_roles_and_survive_a_file(roles: Roles, tmp_path) -> None:
    assert not set(roles.found()["role"]) & {"first token", "separator", "diffuse"}
    assert "2 heads are sinks, 1 of them empty by value" in str(roles)
    loaded = Roles.load(roles.save(tmp_path / "roles.json"))
    pd.testing.assert_frame_equal(loaded.shapes(), roles.shapes())
    assert "sink + diffuse: " in loaded.why((0, EMPTY))


def test_short_and_long_are_the_rates_of_the_thirds_of_the_texts() -> None:
    rng = np.random.default_rng(0)
    value, count = rng.random((61, 2, 3)), rng.integers(1, 30, (61, 2, 3)).astype(np.float64)
    roles = [Role("", "", lambda text: (), score="mass", kind=k) for k in ("sink", "class")]
    family = Hypotheses(value * count, count, {}, roles=(*roles,))
    lengths = rng.permutation(61).astype(float)
    found = length_measures(family, lengths)
    for name, texts in (("short", lengths < 20), ("long", lengths >= 41)):
        expected = (value * count)[texts, 0].sum(0) / count[texts, 0].sum(0)
        np.testing.assert_allclose(found[name][0], expected)
        assert np.isnan(found[name][1]).all()
