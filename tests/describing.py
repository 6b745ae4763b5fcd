"""Row statistics of a kernel in float32, compared with plain PyTorch in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from headwise import masks, reference
from headwise.errors import ArgumentError
from headwise.kernels import (
    AttentionProblem,
    KernelChoice,
    RowRequest,
    RowStatistics,
    _attend,
    attend,
    make_rule,
    row_statistics,
)
from strategies import Problem


def choose(problem: AttentionProblem, backend: str = "auto") -> KernelChoice:
    """The choice of `attend`, without a call."""
    kernel, reason = _attend.kernel_for(problem, None, backend)
    return kernel.plan(problem, reason)


def cast(problem: Problem, dtype: torch.dtype, device: str = "cpu") -> Problem:
    """The problem in a dtype and on a device."""

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    return Problem(*map(moved, problem.qkv), {n: moved(x) for n, x in problem.how.items()})


def everything(problem: Problem, seed: int, **more: Any) -> RowRequest:
    """A request for all statistics, with keys and classes drawn from this seed."""
    B, H, T, _ = problem.q.shape
    S, device = problem.k.shape[2], problem.q.device
    rng = torch.Generator().manual_seed(seed)
    classes = torch.rand(B, S, 2, generator=rng)
    return RowRequest(
        distance=True,
        participation=True,
        received=(torch.rand(B, T, generator=rng) < 0.7).to(device),
        keys=torch.randint(-1, S + 1, (B, T, 3), generator=rng).to(device),
        classes=classes.where(classes < 0.6, 0.0).to(device),
        key_norms=torch.rand(B, H, S, generator=rng).to(device),
        heads=True,
        **more,
    )


def described(problem: Problem, request: RowRequest, backend: str) -> RowStatistics:
    """The row statistics of a problem by a kernel."""
    options = problem.how | {"head_dim": problem.q.shape[-1]}
    names = {"causal": "is_causal", "window": "near"}
    rule = make_rule(**{names.get(name, name): x for name, x in options.items()})
    return row_statistics(*problem.qkv, rule, request, backend=backend)


def assert_same(ours: RowStatistics, exact: RowStatistics, close: float) -> None:
    """Check that statistics are equal up to rounding, and integers exactly."""
    for name in (field.name for field in fields(exact) if field.name != "kernel"):
        actual, expected = getattr(ours, name), getattr(exact, name)
        if expected is None or not expected.is_floating_point():
            assert actual is expected or torch.equal(actual.cpu(), expected.cpu()), name
            continue
        actual, expected = actual.double().cpu(), expected.double().cpu()
        torch.testing.assert_close(
            actual, expected, rtol=close, atol=close, equal_nan=True, msg=name
        )


def assert_refused(backend: str, change: dict[str, Any], message: str) -> None:
    """Check that a small call with this change is refused with this message."""
    arguments = {"q": torch.zeros(1, 2, 5, 4)} | change
    q = arguments.pop("q")
    with pytest.raises(ArgumentError, match=f"backend='{backend}' cannot.*{message}"):
        attend(q, q, q, **arguments, backend=backend)


def assert_equals_definition(problem: Problem, backend: str, device: str = "cpu") -> None:
    """Check heads, weights and log-sum-exps, and that heads alone have the same bits."""
    single = cast(problem, torch.float32, device)
    options = {"need_weights": True, "need_lse": True, "need_entropy": True}
    output = attend(*single.qkv, **single.how, backend=backend, **options)
    inputs = cast(problem, torch.float32)
    known = reference.attention(
        *(x.numpy() for x in inputs.qkv), **inputs.numpy(), need_weights=True, need_lse=True
    )
    for actual, expected in zip(output[:3], (known.out, known.weights, known.lse), strict=True):
        np.testing.assert_allclose(actual.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert output.backend == backend
    assert torch.equal(attend(*single.qkv, **single.how, backend=backend), output.heads)


def assert_hidden_keys_change_nothing(
    problem: Problem, data: st.DataObject, backend: str, device: str = "cpu"
) -> None:
    """Check that keys and values behind a mask may be NaN and infinite."""
    problem = cast(problem, torch.float32, device)
    T, S = problem.q.shape[2], problem.k.shape[2]
    hidden = torch.tensor(data.draw(st.lists(st.booleans(), min_size=S, max_size=S)))
    options = problem.how | {"mask": masks.as_mask(~hidden[None].expand(T, S))}
    plain = attend(*problem.qkv, **options, backend=backend, need_lse=True)
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.inf
    wild = attend(problem.q, k, v, **options, backend=backend, need_lse=True)
    assert torch.equal(wild.heads, plain.heads)
    assert torch.equal(wild.lse, plain.lse)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Compute on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
