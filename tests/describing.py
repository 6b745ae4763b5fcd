"""What a kernel says about rows in float32, beside what plain PyTorch says in float64."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import RowRequest, RowStatistics, make_rule, row_statistics
from strategies import Problem


def cast(problem: Problem, dtype: torch.dtype, device: str) -> Problem:
    """The problem in a dtype and on a device."""

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    return Problem(*map(moved, problem.qkv), {n: moved(x) for n, x in problem.how.items()})


def described(problem: Problem, request: RowRequest, backend: str) -> RowStatistics:
    """What a kernel says about a problem."""
    how = problem.how | {"head_dim": problem.q.shape[-1]}
    names = {"causal": "is_causal", "window": "near"}
    rule = make_rule(**{names.get(name, name): x for name, x in how.items()})
    return row_statistics(*problem.qkv, rule, request, backend=backend)


def assert_same(ours: RowStatistics, exact: RowStatistics, close: float) -> None:
    """Equal to rounding; whole numbers exactly."""
    for name in (one.name for one in fields(exact)):
        mine, theirs = getattr(ours, name), getattr(exact, name)
        if theirs is None or not theirs.is_floating_point():
            assert mine is theirs or torch.equal(mine.cpu(), theirs.cpu()), name
            continue
        mine, theirs = mine.double().cpu(), theirs.double().cpu()
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close, equal_nan=True, msg=name)
