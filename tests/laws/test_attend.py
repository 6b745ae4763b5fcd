"""What holds for every kernel: both equal the definition, and extras change nothing."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from describing import choose, gradients_by_definition
from headwise import masks
from headwise.kernels import (
    AttendOutput,
    AttentionProblem,
    KernelChoice,
    _attend,
    _fused,
    attend,
    cpu,
    make_rule,
)
from headwise.kernels.rows import _cells
from strategies import Problem, problems


@pytest.fixture(params=[1 << 19, 24], ids=["one-cell", "many-cells"])
def cell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cells and blocks so small that every axis is cut, and such that hold everything."""
    monkeypatch.setattr(_cells, "CELL", request.param)
    monkeypatch.setattr(_fused, "BLOCK", min(request.param // 12, 1 << 10))
    monkeypatch.setattr(_attend, "_PREPARED", {})  # what was chosen rests on these sizes
    return request.param


def _all(problem: Problem, backend: str) -> AttendOutput:
    return attend(*problem.qkv, **problem.how, backend=backend, need_weights=True, need_lse=True)


@pytest.mark.usefixtures("cell")
@given(problem=problems())
def test_the_row_kernel_equals_the_definition(problem: Problem) -> None:
    ours, theirs = _all(problem, "rows"), problem.by_definition()
    np.testing.assert_allclose(ours.heads.numpy(), theirs.out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.weights.numpy(), theirs.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.lse.numpy(), theirs.lse, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("cell")
@given(problem=problems(extras=False))
def test_the_fused_kernel_equals_the_definition(problem: Problem) -> None:
    ours, theirs = _all(problem, "fused"), problem.by_definition()
    assert ours.backend == "fused"
    np.testing.assert_allclose(ours.heads.numpy(), theirs.out, rtol=1e-9, atol=1e-12)


@given(problem=problems())
def test_extras_do_not_change_the_heads(problem: Problem) -> None:
    plain = attend(*problem.qkv, **problem.how)
    assert torch.equal(plain, _all(problem, "auto").heads)


@pytest.mark.usefixtures("cell")
@pytest.mark.parametrize("backend", ["fused", "rows"])
@given(problem=problems(extras=False))
def test_gradients_are_those_of_the_written_out_softmax(backend: str, problem: Problem) -> None:
    inputs = [x.clone().requires_grad_() for x in problem.qkv]
    heads = attend(*inputs, **problem.how, backend=backend)
    found = torch.autograd.grad(heads.square().sum(), inputs)
    for ours, theirs in zip(found, gradients_by_definition(problem), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("cell")
@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_a_query_without_keys_gives_zeros_and_finite_gradients(backend: str) -> None:
    q, k, v = (torch.randn(2, 3, 5, 7) for _ in range(3))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    for x in (q, k, v):
        x[1] = torch.nan  # a text of padding alone may hold anything
        x.requires_grad_()
    output = attend(q, k, v, mask=mask, backend=backend, need_weights=True, need_lse=True)
    output.heads.sum().backward()
    assert not output.heads[0, :, 2].any()
    assert not output.heads[1].any()
    assert not output.weights[1].any()
    assert (output.lse[1] == -torch.inf).all()
    assert output.lse[0].isfinite().all(0).tolist() == [True, True, False, True, True]
    assert output.heads[0, :, 1].all()
    for x in (q, k, v):
        assert x.grad[0].isfinite().all()
        assert not x.grad[1].any()
    assert not q.grad[0, :, 2].any()


def test_sinks_and_biases_learn_through_the_row_kernel() -> None:
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def heads(sinks: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, sinks=sinks, bias=bias, causal=True)

    assert torch.autograd.gradcheck(heads, (sinks, bias))


@pytest.mark.usefixtures("cell")
@given(problem=problems(extras=False))
def test_sinks_of_queries_are_those_of_heads_query_by_query(problem: Problem) -> None:
    q, k, v = problem.qkv
    sinks = torch.randn(q.shape[:3], dtype=torch.float64, requires_grad=True)
    ours = attend(q, k, v, sinks=sinks, need_weights=True, need_lse=True)
    for b, t in itertools.product(range(q.shape[0]), range(q.shape[2])):
        one = q[b, None, :, t, None], k[b, None], v[b, None]
        alone = attend(*one, sinks=sinks[b, :, t], need_weights=True, need_lse=True)
        row = slice(b, b + 1), slice(None), slice(t, t + 1)
        torch.testing.assert_close(ours.heads[row], alone.heads)
        torch.testing.assert_close(ours.weights[row], alone.weights)
        torch.testing.assert_close(ours.lse[row], alone.lse)
    if ours.heads.numel():
        ours.heads.square().sum().backward()
        assert sinks.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_a_bias_learns_from_nothing(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 3) for _ in range(3))
    bias = torch.zeros(1, 2, 5, 5, requires_grad=True)
    attend(q, k, v, bias=bias, causal=True, backend=backend).square().sum().backward()
    assert bias.grad.tril().any()
    assert not bias.grad.triu(1).any()


@pytest.mark.parametrize("backend", ["fused", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_a_plain_implementation(
    backend: str, dtype: torch.dtype
) -> None:
    q, k, v = (torch.randn(2, 3, 29, 17, dtype=torch.float64).to(dtype) for _ in range(3))
    exact = attend(q.double(), k.double(), v.double(), causal=True)
    logits = (q @ k.transpose(-1, -2)) / 17**0.5
    hidden = torch.ones(29, 29, dtype=torch.bool).triu(1)
    plain = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    error = (attend(q, k, v, causal=True, backend=backend).double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("bias", [-1e9, 1e9, -65_505.0, 7e4, -1e20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_bias_too_large_for_half_precision_is_the_same_on_every_kernel(
    dtype: torch.dtype, bias: float, train: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4).to(dtype).requires_grad_(train) for _ in range(3))
    mask = torch.full((5, 5), bias)
    mask[1, 2], mask[3] = 0.0, -torch.inf
    fused, rows = (
        attend(q, k, v, mask=mask, need_weights=True, need_lse=True, backend=backend)
        for backend in ("fused", "rows")
    )
    torch.testing.assert_close(fused.heads, rows.heads, rtol=0.02, atol=0.02)
    torch.testing.assert_close(fused.weights, rows.weights, rtol=0.02, atol=0.02)
    # bfloat16 has such numbers, but not many of them.
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(fused.lse, rows.lse, rtol=rtol, atol=0.02)
    assert (fused.lse[:, :, 3] == -torch.inf).all()
    if train:
        for one in fused, rows:
            grads = torch.autograd.grad(one.heads.float().square().sum(), (q, k, v))
            assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_inputs_are_not_written_to(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 3) for _ in range(3))
    mask = torch.randn(5, 5)
    kept = [x.clone() for x in (q, k, v, mask)]
    attend(q, k, v, mask=mask, causal=True, backend=backend)
    for now, before in zip((q, k, v, mask), kept, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("T", [255, 300, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whatever_is_chosen_for_long_texts_equals_the_definition(
    T: int, dtype: torch.dtype, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "HAS_AMX", has_amx)
    q, k, v = (torch.randn(1, H, T, 8, dtype=torch.float64).to(dtype) for H in (4, 2, 2))
    exact = attend(q.double(), k.double(), v.double(), causal=True, need_weights=True)
    with torch.no_grad():
        found = attend(q, k, v, causal=True, need_weights=True)
    logits = (q @ k.repeat_interleave(2, 1).mT) / 8**0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    plain = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    heads = plain @ v.repeat_interleave(2, 1)
    for ours, theirs, truth in (
        (found.heads, heads, exact.heads),
        (found.weights.to(dtype), plain, exact.weights),
    ):
        assert (ours.double() - truth).abs().max() <= 2 * (theirs.double() - truth).abs().max()


def test_dropout_scales_what_it_keeps() -> None:
    q, k = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 400, 2)
    found = attend(q, k, torch.ones(1, 1, 400, 1), dropout_p=0.25, need_weights=True)
    kept = found.heads.squeeze() * 400 * 0.75  # how many of 400 even weights were kept
    assert torch.all((kept > 250) & (kept < 350))
    torch.testing.assert_close(kept, kept.round())
    torch.testing.assert_close(found.weights, torch.full((1, 1, 3, 400), 1 / 400))


def _choice(T: int, S: int, backend: str = "auto", **how: Any) -> KernelChoice:
    q, k = torch.zeros(1, 4, T, 8, device="meta"), torch.zeros(1, 2, S, 8, device="meta")
    rule = make_rule(head_dim=8, **how).simplify(T, S)
    return choose(AttentionProblem(q, k, k, rule), backend)


def test_the_chosen_kernel_is_reported_with_a_reason() -> None:
    assert _choice(5, 5).backend == "fused"
    capped = _choice(5, 5, softcap=2.0)
    assert capped.backend == "rows"
    assert "softcap" in capped.reason


@pytest.mark.parametrize(
    ("sizes", "how", "form", "reason"),
    [
        ((7, 9), {}, "none", "nothing is hidden"),
        ((7, 7), {"is_causal": True}, "causal", "own causal flag"),
        ((1, 900), {"is_causal": True}, "none", "nothing is hidden"),
        ((7, 7), {"near": (7, 0)}, "causal", "own causal flag"),
        ((7, 9), {"is_causal": True}, "dense", "100%"),
        ((900, 1300), {"is_causal": True}, "blocks", "7[0-9]%"),
        ((900, 900), {"is_causal": True}, "causal", "own causal flag"),
        ((900, 900), {"is_causal": True, "near": (99, 99)}, "blocks", "2[0-9]%"),
        ((1, 900), {"is_causal": True, "near": (99, 0)}, "blocks", "11%"),
        ((900, 900), {"mask": masks.padding([3])}, "dense", "100%"),
    ],
)
def test_a_mask_takes_its_cheapest_form(
    sizes: tuple[int, int], how: dict[str, Any], form: str, reason: str
) -> None:
    choice = _choice(*sizes, **how)
    assert choice.form == form
    assert re.search(reason, choice.reason)


def test_short_groups_are_packed() -> None:
    assert _choice(1, 900).packed
    assert "packed" in _choice(1, 900).reason
    assert not _choice(100, 900).packed


@pytest.mark.parametrize("backend", ["fused", "rows"])
@pytest.mark.parametrize(("T", "S"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys_are_a_text_like_any_other(backend: str, T: int, S: int) -> None:
    q, k, v = torch.randn(2, 6, T, 3), torch.randn(2, 3, S, 3), torch.randn(2, 3, S, 4)
    for how in ({}, {"causal": True}, {"mask": torch.ones(T, S, dtype=torch.bool)}):
        heads = attend(q, k, v, **how, backend=backend)
        assert heads.shape == (2, 6, T, 4)
        assert not heads.any()
