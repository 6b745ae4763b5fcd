"""Every architecture: outputs unchanged, statistics equal to those of its eager weights."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import nn
from torch.overrides import TorchFunctionMode

from headwise.watch import Request, observe
from oracles import eager_maps, means, modules_of, padded

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
OF_WEIGHTS = ("entropy", "max_weight", "first", "self", "previous", "next", "distance")


class InFloat64(TorchFunctionMode):
    """Make models that cast parts to float32 compute in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float and args[0].is_floating_point():
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextmanager
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


PRECISIONS = {
    "float32": (torch.float32, nullcontext, 1e-4),
    "float64": (torch.float64, _float64, 1e-9),
}


def _eager(model: nn.Module) -> None:
    model.set_attn_implementation("eager")
    # Falcon chooses its kernel by the configuration alone.
    model.config._attn_implementation = "eager"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", zoo.each(()))
def test_every_architecture_is_watched_exactly(name: str, side: str, precision: str) -> None:
    dtype, computing, tolerance = PRECISIONS[precision]
    model = zoo.make(name, dtype)
    batch = padded(TEXTS, side)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if name in zoo.COUNT_THEMSELVES or not takes_positions:
        batch.pop("position_ids", None)
    before = modules_of(model)
    with torch.no_grad(), computing():
        plain = model(**batch)[0]
        with observe(model, Request()) as watch:
            watched = model(**batch)[0]
    assert torch.equal(plain, watched)
    assert modules_of(model) == before
    table = watch.table()
    assert len(table.heads) == 2 * zoo.HEADS
    _eager(model)
    with computing():
        maps_of_layers = eager_maps(model, TEXTS)
    for layer, maps in enumerate(maps_of_layers):
        expected = means(maps)
        rows = slice(zoo.HEADS * layer, zoo.HEADS * (layer + 1))
        for statistic in OF_WEIGHTS:
            theirs = expected.get(statistic, np.full(zoo.HEADS, np.nan))
            ours = table.mean(statistic)[rows]
            np.testing.assert_allclose(
                ours, theirs, rtol=0, atol=tolerance, err_msg=f"{statistic} L{layer}"
            )


def test_there_are_enough_architectures() -> None:
    assert len(zoo.TEXT) >= 59
