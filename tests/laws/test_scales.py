"""Every finite scale gives what the definition gives: zero, negative, tiny and huge ones."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from headwise import reference
from headwise._library import library
from headwise.errors import ArgumentError
from headwise.kernels import (
    AttentionProblem,
    AttentionRule,
    RowRequest,
    attend,
    choose,
    make_rule,
    row_statistics,
)
from strategies import Problem, problems

ORDINARY = [0.0, -0.0, 1e-320, 1e-46, -1e-40, 1e-30, -0.3, 1.0, -8.0]
HUGE = [1e11, -1e12, 1e28, -1e30, 1e37, 1e100, -1e200, 1e300]
# Absolute errors of heads; of log-sum-exps relative ones.
CLOSE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
dtypes = st.sampled_from(list(CLOSE))
NATIVE = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")
NAMES = {"causal": "is_causal", "window": "near"}


def _scaled(problem: Problem, scale: float, dtype: torch.dtype) -> Problem:
    """The problem at that scale, with values that the dtype can represent."""
    q, k, v = (x.to(dtype).double() for x in problem.qkv)
    return Problem(q, k, v, problem.how | {"scale": scale})


def _reference(problem: Problem) -> reference.AttentionOutput:
    qkv = (x.numpy() for x in problem.qkv)
    return reference.attention(*qkv, **problem.numpy(), need_weights=True, need_lse=True)


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
    theirs, close = _reference(scaled), CLOSE[dtype]
    np.testing.assert_allclose(output.heads.detach().double(), theirs.out, rtol=0, atol=close)
    np.testing.assert_allclose(output.weights.detach().double(), theirs.weights, rtol=0, atol=close)
    lse = torch.tensor(theirs.lse).to(wide)
    torch.testing.assert_close(output.lse.detach(), lse, rtol=close, atol=close)
    plain = attend(*(x.detach() for x in inputs), **scaled.how, backend=backend)
    np.testing.assert_allclose(plain.double(), theirs.out, rtol=0, atol=close)
    grads = torch.autograd.grad(output.heads.double().square().sum(), inputs)
    for ours, exact in zip(grads, _gradients(scaled), strict=True):
        most = close * max(1.0, abs(scale)) * 20 if scale in ORDINARY else close * 20
        assert (ours.double() - exact).abs().max() <= most * max(1.0, exact.abs().max().item())


def _gradients(problem: Problem) -> tuple[Tensor, ...]:
    """Gradients of an explicit softmax in float64."""
    q, k, v = (x.clone().requires_grad_() for x in problem.qkv)
    groups, rule = q.shape[1] // k.shape[1], _rule(problem)
    logits = rule.scale * (q @ k.repeat_interleave(groups, 1).mT)
    if rule.softcap:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    T, S = logits.shape[-2:]
    if rule.bias is not None:
        logits = logits + problem.how["bias"]
    if rule.visible is not None:
        logits = logits.masked_fill(~rule.visible.dense(T, S), -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    heads = weights[..., :S] @ v.repeat_interleave(groups, 1)
    return torch.autograd.grad(heads.square().sum(), (q, k, v))


def _rule(problem: Problem) -> AttentionRule:
    options = {NAMES.get(name, name): x for name, x in problem.how.items()}
    return make_rule(head_dim=problem.q.shape[-1], **options)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["auto", "fused", "rows", pytest.param("native", marks=NATIVE)])
@given(problem=problems(), scale=st.sampled_from(ORDINARY), dtype=dtypes)
def test_every_kernel_equals_the_definition_at_every_scale(
    backend: str, problem: Problem, scale: float, dtype: torch.dtype
) -> None:
    _check(problem, scale, backend, dtype)


@pytest.mark.parametrize("backend", ["auto", "rows"])
@given(problem=problems(), scale=st.sampled_from(HUGE), dtype=dtypes)
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
@given(problem=problems(), scale=st.sampled_from(ORDINARY + HUGE), dtype=dtypes)
def test_statistics_equal_those_of_the_weights_at_every_scale(
    backend: str, problem: Problem, scale: float, dtype: torch.dtype
) -> None:
    scaled = _scaled(problem, scale, dtype)
    assume(scale in ORDINARY or _is_decided(scaled))
    rule, request = _rule(scaled), RowRequest(participation=True, argmax=True, heads=True)
    result = row_statistics(*(x.to(dtype) for x in scaled.qkv), rule, request, backend=backend)
    theirs, close = _reference(scaled), CLOSE[torch.promote_types(dtype, torch.float32)]
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
