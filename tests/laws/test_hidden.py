"""Hidden keys change nothing, whatever they hold: on every kernel, in every precision."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from describing import choose, gradients_by_definition, rule_of
from headwise import masks
from headwise._native_library import library
from headwise.errors import ArgumentError
from headwise.kernels import AttentionProblem, RowRequest, attend, make_rule, row_statistics
from headwise.layer import ALiBi, MultiHeadAttention
from strategies import Problem, problems
from tiers import diagonal, tiers

WILD = [torch.nan, torch.inf, -torch.inf]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize(
    ("backend", "dtype"),
    tiers(
        [("fused", torch.float32), ("rows", torch.float32), ("rows", torch.bfloat16)],
        product(("fused", "rows"), DTYPES),
    ),
)
@settings(max_examples=12)
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


# Whole, in blocks of rows, in cells.
WHERE = ((24, "fused"), (300, "fused"), (24, "rows"))


@pytest.mark.parametrize(
    ("where", "form", "dtype"),
    tiers(
        [*product(WHERE, FORMS, [torch.float32]), *diagonal(WHERE, FORMS, DTYPES)],
        product(WHERE, FORMS, DTYPES),
    ),
)
def test_huge_hidden_numbers_change_nothing(
    where: tuple[int, str], form: str, dtype: torch.dtype
) -> None:
    T, backend = where
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


# Every finite scale gives what the definition gives: zero, negative, tiny and huge ones.


ORDINARY = [0.0, -0.0, 1e-320, 1e-46, -1e-40, 1e-30, -0.3, 1.0, -8.0]
HUGE = [1e11, -1e12, 1e28, -1e30, 1e37, 1e100, -1e200, 1e300]
# Absolute errors of heads; of log-sum-exps relative ones.
CLOSE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
scaled_dtypes = st.sampled_from(list(CLOSE))
NATIVE = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")


def _scaled(problem: Problem, scale: float, dtype: torch.dtype) -> Problem:
    """The problem at that scale, with values that the dtype can represent."""
    q, k, v = (x.to(dtype).double() for x in problem.qkv)
    return Problem(q, k, v, problem.how | {"scale": scale})


def _products(problem: Problem) -> Tensor:
    groups = problem.q.shape[1] // problem.k.shape[1]
    return problem.q @ problem.k.repeat_interleave(groups, 1).mT


def _is_decided(problem: Problem) -> bool:
    """Whether no two products are so close that rounding decides which is larger."""
    products = _products(problem)
    near = (products[..., :, None] - products[..., None, :]).abs()
    near = near.masked_fill(torch.eye(near.shape[-1], dtype=torch.bool), 1.0)
    return bool((near > 1e-5).all() and (products.abs() > 1e-5).all())


def _can(problem: Problem, backend: str, dtype: torch.dtype) -> bool:
    """Whether a kernel supports all of this; refusals are tested elsewhere."""
    if backend == "fused":
        return not problem.how.keys() & {"softcap", "sinks"}
    return backend != "native" or dtype != torch.float64


def _check(problem: Problem, scale: float, backend: str, dtype: torch.dtype) -> None:
    assume(_can(problem, backend, dtype))
    scaled = _scaled(problem, scale, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [x.to(dtype).detach().clone().requires_grad_() for x in scaled.qkv]
    output = attend(*inputs, **scaled.how, need_lse=True, need_weights=True, backend=backend)
    theirs, close = scaled.by_definition(), CLOSE[dtype]
    np.testing.assert_allclose(output.heads.detach().double(), theirs.out, rtol=0, atol=close)
    np.testing.assert_allclose(output.weights.detach().double(), theirs.weights, rtol=0, atol=close)
    lse = torch.tensor(theirs.lse).to(wide)
    torch.testing.assert_close(output.lse.detach(), lse, rtol=close, atol=close)
    plain = attend(*(x.detach() for x in inputs), **scaled.how, backend=backend)
    np.testing.assert_allclose(plain.double(), theirs.out, rtol=0, atol=close)
    grads = torch.autograd.grad(output.heads.double().square().sum(), inputs)
    for ours, exact in zip(grads, gradients_by_definition(scaled), strict=True):
        most = close * max(1.0, abs(scale)) * 20 if scale in ORDINARY else close * 20
        assert (ours.double() - exact).abs().max() <= most * max(1.0, exact.abs().max().item())


@pytest.mark.full
@pytest.mark.parametrize("backend", ["auto", "fused", "rows", pytest.param("native", marks=NATIVE)])
@given(problem=problems(), scale=st.sampled_from(ORDINARY), dtype=scaled_dtypes)
def test_every_kernel_equals_the_definition_at_every_scale(
    backend: str, problem: Problem, scale: float, dtype: torch.dtype
) -> None:
    _check(problem, scale, backend, dtype)


@pytest.mark.parametrize("backend", ["auto", "rows"])
@given(problem=problems(), scale=st.sampled_from(HUGE), dtype=scaled_dtypes)
def test_huge_scales_are_computed_if_their_logits_fit(
    backend: str, problem: Problem, scale: float, dtype: torch.dtype
) -> None:
    assume(_is_decided(_scaled(problem, scale, dtype)))
    _check(problem, scale, backend, dtype)


@pytest.mark.parametrize("backend", ["fused", pytest.param("native", marks=NATIVE)])
@pytest.mark.parametrize("scale", HUGE)
def test_kernels_without_float64_logits_refuse_huge_scales(backend: str, scale: float) -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(
        ArgumentError, match=f"{backend!r} cannot.*scale={scale:g}".replace("+", r"\+")
    ):
        attend(q, q, q, scale=scale, backend=backend)


@pytest.mark.parametrize("T", [1, 2, 100, 300, 700])
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-46, -1e-320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_causal_mask_hides_the_future_at_every_scale_and_length(
    T: int, scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, T, 4).to(dtype) for _ in range(3)]
    exact = attend(*(x.double() for x in qkv), causal=True, scale=scale, backend="rows")
    for backend in ("auto", "fused"):
        heads = attend(*qkv, causal=True, scale=scale, backend=backend)
        torch.testing.assert_close(heads.double(), exact, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("backend", ["auto", "rows"])
@given(problem=problems(), scale=st.sampled_from(ORDINARY + HUGE), dtype=scaled_dtypes)
def test_statistics_equal_those_of_the_weights_at_every_scale(
    backend: str, problem: Problem, scale: float, dtype: torch.dtype
) -> None:
    scaled = _scaled(problem, scale, dtype)
    assume(scale in ORDINARY or _is_decided(scaled))
    rule, request = rule_of(scaled), RowRequest(participation=True, argmax=True, heads=True)
    result = row_statistics(*(x.to(dtype) for x in scaled.qkv), rule, request, backend=backend)
    theirs, close = scaled.by_definition(), CLOSE[torch.promote_types(dtype, torch.float32)]
    p = torch.tensor(theirs.weights)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(result.entropy.double(), entropy, rtol=0, atol=close)
    torch.testing.assert_close(result.max_weight.double(), p.amax(-1), rtol=0, atol=close)
    torch.testing.assert_close(
        result.lse, torch.tensor(theirs.lse).to(result.lse.dtype), rtol=close, atol=close
    )
    np.testing.assert_allclose(result.heads.double(), theirs.out, rtol=0, atol=CLOSE[dtype])
    assert result.lse.dtype == torch.promote_types(dtype, torch.float32)


def test_a_huge_scale_gives_the_reason_for_its_kernel() -> None:
    q = torch.randn(1, 2, 5, 4)
    choice = choose(AttentionProblem(q, q, q, make_rule(head_dim=4, scale=1e30)))
    assert (choice.backend, "scale=1e+30" in choice.reason) == ("rows", True)
    choice = choose(AttentionProblem(q, q, q, make_rule(head_dim=4, scale=-1.0, is_causal=True)))
    assert choice.form != "causal"
