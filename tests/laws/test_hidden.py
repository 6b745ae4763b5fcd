"""Hidden keys change nothing, whatever they hold: on every kernel, in every precision."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwise import masks
from headwise.kernels import attend
from headwise.layer import ALiBi, MultiHeadAttention
from strategies import Problem, problems

WILD = [torch.nan, torch.inf, -torch.inf]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


@st.composite
def spoilt(draw: st.DrawFn, *, extras: bool) -> tuple[Problem, Problem, torch.Tensor]:
    """A masked problem, a copy with a few nonfinite values, and the rows that see them."""
    problem = draw(problems(extras=extras))
    options = {"causal": True} | problem.how
    wild = [x.clone() for x in problem.qkv]
    for x in wild:
        for _ in range(draw(st.integers(0, 2))):
            index = tuple(draw(st.integers(0, size - 1)) for size in x.shape)
            x[index] = draw(st.sampled_from(WILD))
    q_bad, k_bad, v_bad = (~x.isfinite().all(-1) for x in wild)
    groups = wild[0].shape[1] // wild[1].shape[1]
    visible = attend(*problem.qkv, **options, need_weights=True).weights > 0
    bad = (k_bad | v_bad).repeat_interleave(groups, 1)[:, :, None] | q_bad[..., None]
    calm = Problem(*(torch.where(x.isfinite(), x, 0.0) for x in wild), options)
    assume(not visible.all())
    return calm, Problem(*wild, options), (visible & bad).any(-1)


def _in(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments with floats in another dtype."""
    return {n: options[n].to(dtype) if n in ("bias", "sinks") else options[n] for n in options}


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
def test_hidden_keys_change_nothing_whatever_they_hold(
    backend: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    calm, wild, reached = data.draw(spoilt(extras=backend == "rows"))
    expected, expected_grads = _with_gradients(calm, backend, dtype, ~reached)
    heads, grads = _with_gradients(wild, backend, dtype, ~reached)
    assert torch.equal(heads[~reached], expected[~reached])
    assert not heads[reached].isfinite().any()
    for ours, theirs, x in zip(grads, expected_grads, wild.qkv, strict=True):
        assert torch.equal(ours, torch.where(x.isfinite(), theirs, 0.0))
    with torch.no_grad():  # where the heads are checked, not the inputs
        heads, expected = (
            attend(*(x.to(dtype) for x in problem.qkv), **_in(dtype, problem.how), backend=backend)
            for problem in (wild, calm)
        )
    assert torch.equal(heads[~reached], expected[~reached])


def _forms(T: int) -> dict[str, dict[str, Any]]:
    """A mask in each form that torch's kernel takes, with and without a bias."""
    rng = torch.Generator().manual_seed(T)
    lower = torch.ones(T, T).tril().bool()
    return {
        "causal": {"causal": True},
        "bias": {"causal": True, "bias": torch.randn(T, T, generator=rng)},
        "window": {"window": (None, 3)},
        "near": {"window": (7, 2)},
        "boolean": {"mask": lower},
        "additive": {"mask": torch.zeros(T, T).masked_fill(~lower, -torch.inf)},
        "padding": {"mask": masks.padding([T - 5])},
        "documents": {"mask": masks.documents((torch.arange(T) >= T - 5)[None].long())},
    }


FORMS = [*_forms(8)]


@dtypes
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("T", "backend"), [(24, "fused"), (300, "fused"), (24, "rows")]
)  # whole, in blocks of rows, in cells
def test_huge_hidden_numbers_change_nothing(
    T: int, backend: str, form: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    options, position = _in(dtype, _forms(T)[form]), T - 5
    calm = [torch.randn(1, 2, T, 8) for _ in range(3)]
    calm[0][:, :, :-1].abs_()  # so that not only the last row sees the largest logit
    calm[0][:, :, -1].abs_().neg_()
    visible = attend(*calm, **_in(torch.float32, options), need_weights=True).weights[0] > 0
    rows = ~visible[:, :, position].any(0)
    assert rows.any()
    rows[position] = False
    for x in calm:
        x[:, :, position, 0] = 0.0
    expected = _found(calm, options, dtype, rows, backend)
    for part, number in [(1, torch.inf), (1, 3e38), (1, -3e38), (2, 3e38), (0, -3e38)]:
        far = [x.clone() for x in calm]
        far[part][0, 0, position, 0] = number
        for ours, theirs in zip(_found(far, options, dtype, rows, backend), expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.isfinite().all()


def _found(
    qkv: list[torch.Tensor],
    options: dict[str, Any],
    dtype: torch.dtype,
    rows: torch.Tensor,
    by: str,
) -> list[torch.Tensor]:
    """Heads of some rows, and their gradients."""
    most = torch.finfo(dtype).max
    q, k, v = (torch.where(x.abs() == 3e38, most * x.sign(), x.double()).to(dtype) for x in qkv)
    with torch.no_grad():
        heads = attend(q, k, v, **options, backend=by)[:, :, rows]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    learned = attend(*inputs, **options, backend=by)[:, :, rows]
    return [heads, learned.detach(), *torch.autograd.grad(learned.square().sum(), inputs)]


@pytest.mark.parametrize("number", [3e38, -3e38])
@pytest.mark.parametrize(("T", "alibi"), [(30, True), (300, False)])
def test_a_later_token_whose_logits_overflow_changes_nothing(
    T: int, alibi: bool, number: float
) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, position_bias=ALiBi(4) if alibi else None)
    x = torch.randn(1, T, 16)
    far = x.clone()
    far[0, T - 5] = number
    with torch.no_grad():
        assert torch.equal(layer(far, causal=True)[:, : T - 5], layer(x, causal=True)[:, : T - 5])
    layer(far, causal=True)[:, : T - 5].square().sum().backward()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        assert projection.weight.grad.isfinite().all()


def test_a_learned_bias_gets_no_gradient_from_hidden_pairs() -> None:
    q, k, v = (torch.randn(1, 2, 9, 3) for _ in range(3))
    v[:, :, -1] = torch.finfo(torch.float32).max
    bias = torch.zeros(9, 9, requires_grad=True)
    attend(q, k, v, causal=True, bias=bias)[:, :, :-1].mul(3.0).square().sum().backward()
    assert bias.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_a_text_of_padding_alone_may_hold_anything(backend: str) -> None:
    q, k, v = (torch.randn(2, 2, 5, 3) for _ in range(3))
    for x in (q, k, v):
        x[1] = torch.nan
        x.requires_grad_()
    output = attend(
        q, k, v, mask=masks.padding([5, 0]) & masks.causal(), backend=backend,
        need_weights=True, need_lse=True,
    )  # fmt: skip
    assert not output.heads[1].any()
    assert not output.weights[1].any()
    assert (output.lse[1] == -torch.inf).all()
    assert output.lse[0].isfinite().all()
    output.heads.sum().backward()
    for x in (q, k, v):
        assert x.grad[0].isfinite().all()
        assert not x.grad[1].any()
