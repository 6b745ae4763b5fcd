"""What a mask hides reaches nothing, whatever it holds: on every kernel, in every precision."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwise import masks
from headwise.kernels import attend
from strategies import Problem, problems

WILD = [torch.nan, torch.inf, -torch.inf]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


@st.composite
def spoilt(draw: st.DrawFn, *, extras: bool) -> tuple[Problem, Problem, torch.Tensor]:
    """A masked problem, the same with a few wild numbers in it, and the rows that these reach."""
    problem = draw(problems(extras=extras))
    how = {"causal": True} | problem.how
    wild = [x.clone() for x in problem.qkv]
    for x in wild:
        for _ in range(draw(st.integers(0, 2))):
            at = tuple(draw(st.integers(0, size - 1)) for size in x.shape)
            x[at] = draw(st.sampled_from(WILD))
    q_bad, k_bad, v_bad = (~x.isfinite().all(-1) for x in wild)
    groups = wild[0].shape[1] // wild[1].shape[1]
    seen = attend(*problem.qkv, **how, need_weights=True).weights > 0
    bad = (k_bad | v_bad).repeat_interleave(groups, 1)[:, :, None] | q_bad[..., None]
    calm = Problem(*(torch.where(x.isfinite(), x, 0.0) for x in wild), how)
    assume(not seen.all())
    return calm, Problem(*wild, how), (seen & bad).any(-1)


def _in(dtype: torch.dtype, how: dict[str, Any]) -> dict[str, Any]:
    """Arguments with their floats in another type."""
    return {n: how[n].to(dtype) if n in ("bias", "sinks") else how[n] for n in how}


def _with_gradients(
    problem: Problem, backend: str, dtype: torch.dtype, rows: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Heads, and the gradients of a sum over some rows."""
    inputs = [x.to(dtype).requires_grad_() for x in problem.qkv]
    heads = attend(*inputs, **_in(dtype, problem.how), backend=backend)
    loss = heads[rows].square().sum() if rows.any() else (0 * heads[~rows]).nansum()
    return heads.detach(), torch.autograd.grad(loss, inputs)


@dtypes
@pytest.mark.parametrize("backend", ["fused", "rows"])
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_hidden_reaches_nothing_whatever_it_holds(
    backend: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    calm, wild, reached = data.draw(spoilt(extras=backend == "rows"))
    expected, expected_grads = _with_gradients(calm, backend, dtype, ~reached)
    heads, grads = _with_gradients(wild, backend, dtype, ~reached)
    assert torch.equal(heads[~reached], expected[~reached])
    assert not heads[reached].isfinite().any()
    for ours, theirs, x in zip(grads, expected_grads, wild.qkv, strict=True):
        assert torch.equal(ours, torch.where(x.isfinite(), theirs, 0.0))
    with torch.no_grad():  # where heads are looked at, not inputs
        heads, expected = (
            attend(*(x.to(dtype) for x in one.qkv), **_in(dtype, one.how), backend=backend)
            for one in (wild, calm)
        )
    assert torch.equal(heads[~reached], expected[~reached])


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_a_text_of_nothing_but_padding_may_hold_anything(backend: str) -> None:
    q, k, v = (torch.randn(2, 2, 5, 3) for _ in range(3))
    for x in (q, k, v):
        x[1] = torch.nan
        x.requires_grad_()
    found = attend(
        q, k, v, mask=masks.padding([5, 0]) & masks.causal(), backend=backend,
        need_weights=True, need_lse=True,
    )  # fmt: skip
    assert not found.heads[1].any()
    assert not found.weights[1].any()
    assert (found.lse[1] == -torch.inf).all()
    assert found.lse[0].isfinite().all()
    found.heads.sum().backward()
    for x in (q, k, v):
        assert x.grad[0].isfinite().all()
        assert not x.grad[1].any()
