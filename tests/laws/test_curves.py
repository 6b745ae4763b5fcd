"""Curves: what is lost is what `ablate` loses, and a plain case is counted by hand."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

from headwise.curves import Curves
from headwise.gauge import embedding, prune_curves
from headwise.heads import Head
from headwise.models import ablate
from headwise.scores import random_orders, removable
from oracles import padded
from strategies import seeds

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
HEADS = [Head("", layer, head) for layer in range(2) for head in range(zoo.HEADS)]


@pytest.mark.parametrize("mean", [True, False])
def test_a_point_is_what_ablating_those_heads_loses(mean: bool) -> None:
    model = zoo.make("Bert")
    batch, reference = (
        {"input_ids": padded(some, "right")["input_ids"]} for some in (TEXTS, [[7, 8, 2]])
    )
    orders = random_orders(HEADS, 2)
    found = prune_curves(
        model,
        [batch],
        {"random": orders},
        reference=[reference] if mean else None,
        points=[1, 4, 99],
    )
    assert found.removed.tolist() == [0, 1, 4]  # of 8 heads, a layer keeps one
    loss = embedding()
    how = ("mean", [reference]) if mean else ("zero", None)
    with torch.no_grad():
        full = loss.of(model(**batch), batch)
        for order, values in zip(orders, found.per_text["random"], strict=True):
            for number, losses in zip(found.removed, values, strict=True):
                gone = removable(order)[:number]
                with ablate(model, gone, *how):
                    expected = loss.per_text(model(**batch), batch, full).numpy()
                np.testing.assert_allclose(losses, expected, atol=1e-6)


@given(seed=seeds, heads=st.integers(1, 12))
def test_each_layer_keeps_its_last_head(seed: int, heads: int) -> None:
    [order] = random_orders([Head("", head % 3, head) for head in range(heads)], 1, seed)
    going = removable(order)
    assert going == [head for head in order if head in going]
    left = [head for head in order if head not in going]
    assert sorted({head.layer for head in order}) == sorted(head.layer for head in left)
    for one, other in pairwise(order):  # a head that stays comes after all others of its layer
        assert one not in left or one.layer != other.layer


def _curves() -> Curves:
    rising = np.array([[0.0, 0.0], [0.25, 0.75], [1.0, 2.0]])
    return Curves(
        np.array([0, 2, 5]), 10, {"one": rising[None], "random": np.stack([rising, 3 * rising])}
    )


def test_what_is_removable_is_the_last_point_within() -> None:
    made = _curves()
    assert made.removable("one", 0.6) == 2
    assert made.removable("one", 0.5) == 0  # exactly at it is not below
    assert made.removable("one", 9.0) == 5
    assert made.removable("random", 1.6) == 3  # the median of 5 and 2, whole heads
    np.testing.assert_allclose(made.mean("random"), [[0.0, 0.5, 1.5], [0.0, 1.5, 4.5]])


def test_a_curve_that_comes_back_counts_to_where_it_left() -> None:
    values = np.array([[[0.0], [1.0], [0.1]]])
    assert Curves(np.array([0, 1, 2]), 4, {"one": values}).removable("one", 0.5) == 0


def test_the_frame_has_a_row_for_each_point() -> None:
    frame = _curves().frame()
    assert frame["order"].tolist() == ["one"] * 3 + ["random"] * 3
    assert frame["share"].tolist() == [0.0, 0.2, 0.5] * 2
    band = frame[frame["order"] == "random"]
    assert band["low"].tolist() == [0.0, 0.5, 1.5]
    assert band["high"].tolist() == [0.0, 1.5, 4.5]
    one = frame[frame["order"] == "one"]
    assert ((one["low"] <= one["loss"]) & (one["loss"] <= one["high"])).all()
