"""Every architecture: the answer untouched, the numbers those of its own eager weights."""

import inspect

import numpy as np
import pytest
import torch
import zoo

from headwise.watch import Request, observe
from oracles import eager_maps, means, modules_of, padded

pytestmark = pytest.mark.full

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
OF_WEIGHTS = ("entropy", "max_weight", "first", "self", "previous", "next", "distance")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", sorted(zoo.TEXT))
def test_it_is_watched_exactly(name: str, side: str) -> None:
    model = zoo.make(name)
    batch = padded(TEXTS, side)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if name in zoo.COUNT_THEMSELVES or not takes_positions:
        batch.pop("position_ids", None)
    before = modules_of(model)
    with torch.no_grad():
        plain = model(**batch)[0]
        with observe(model, Request()) as watch:
            watched = model(**batch)[0]
    assert torch.equal(plain, watched)
    assert modules_of(model) == before
    table = watch.table()
    assert len(table.heads) == 2 * zoo.HEADS
    model.set_attn_implementation("eager")
    for layer, maps in enumerate(eager_maps(model, TEXTS)):
        expected = means(maps)
        rows = slice(zoo.HEADS * layer, zoo.HEADS * (layer + 1))
        for statistic in OF_WEIGHTS:
            theirs = expected.get(statistic, np.full(zoo.HEADS, np.nan))
            ours = table.mean(statistic)[rows]
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=f"{statistic} L{layer}")


def test_there_are_enough_of_them() -> None:
    assert len(zoo.TEXT) >= 36
