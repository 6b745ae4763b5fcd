"""What every kernel keeps: its row statistics are those of plain PyTorch in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from headwise import masks, reference
from headwise.errors import ArgumentError
from headwise.kernels import (
    AttentionProblem,
    AttentionRule,
    KernelChoice,
    RowRequest,
    RowStatistics,
    _attend,
    attend,
    make_rule,
    row_statistics,
)
from headwise.layer import ALiBi
from strategies import Problem

CLOSE = 8e-5


class Shape(NamedTuple):
    """Texts, heads, heads of keys, queries, keys, and the widths of keys and values."""

    B: int
    H: int
    Hkv: int
    T: int
    S: int
    D: int
    Dv: int


def _random_mask(s: Shape, share: float) -> Tensor:
    return torch.rand(s.B, s.H, s.T, s.S) < share


def _lengths(s: Shape) -> list[int]:
    return [max(1, s.S - 6), 0, s.S // 2][: s.B]


def _alibi(s: Shape, more: bool = False) -> dict[str, Any]:
    bias = ALiBi(s.H).bias(torch.float32)
    if more:
        bias = bias + make_rule(head_dim=1, bias=torch.randn(1, s.H, s.T, s.S)).bias
    return {"bias": bias, "causal": not more}


# What may hide keys or change logits, as arguments of `attend`.
RULES: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "full": lambda s: {},
    "causal": lambda s: {"causal": True},
    "window": lambda s: {"window": (max(11, s.S // 4), 5)},
    "lengths": lambda s: {"mask": masks.padding(_lengths(s)), "causal": True},
    "left lengths": lambda s: {"mask": masks.padding([s.S // 2, s.S, 1][: s.B], side="left")},
    "documents": lambda s: {
        "mask": masks.documents((torch.arange(s.B * s.S).view(s.B, s.S) // 23) * 2**40)
    },
    "either": lambda s: {"mask": masks.causal() | masks.padding([s.S // 9, 1, 0][: s.B])},
    "mask": lambda s: {"mask": _random_mask(s, 0.3)},
    "two masks": lambda s: {"mask": masks.as_mask(_random_mask(s, 0.5)) & masks.window(9)},
    "keys of a mask": lambda s: {"mask": torch.rand(1, 1, 1, s.S) < 0.5},
    "blocks of a mask": lambda s: {"mask": torch.ones(1, 1, s.T, s.S, dtype=torch.bool).tril()},
    "bias": lambda s: {"bias": torch.randn(1, s.H, s.T, s.S), "causal": True},
    "alibi": _alibi,
    "alibi and bias": lambda s: _alibi(s, more=True),
    "sinks": lambda s: {"sinks": torch.tensor([0.5, -9.0, 90.0] * s.H)[: s.H], "causal": True},
    "a sink of one head": lambda s: {
        "sinks": torch.tensor([-torch.inf, -9.0] * s.H)[: s.H], "mask": masks.padding(_lengths(s)),
    },
    "softcap": lambda s: {"softcap": 1.5, "causal": True},
    "softcap and scale": lambda s: {"softcap": 1.5, "scale": 0.4},
    "scale": lambda s: {"scale": 0.3},
    "scale 1": lambda s: {"scale": 1.0, "causal": True},
    "negative scale": lambda s: {"scale": -0.25},
}  # fmt: skip
FEW = 8  # queries beside which keys lie as in a cache


def problem_of(shape: Shape, rule: str) -> Problem:
    """Heads next to one another, as a model has them; behind keys and values lies NaN."""
    B, H, Hkv, T, S, D, Dv = shape
    rooms = [torch.full((B, S + 9, Hkv, width), torch.nan) for width in (D, Dv)]
    k, v = (room.transpose(1, 2)[:, :, :S] for room in rooms)
    if T <= FEW:
        k, v = (room.reshape(B, Hkv, S + 9, -1)[:, :, :S] for room in rooms)
    for x in (k, v):
        x.copy_(torch.randn(x.shape))
    return Problem(torch.randn(B, T, H, D).transpose(1, 2), k, v, RULES[rule](shape))


def assert_rule_holds(
    backend: str,
    shape: Shape,
    rule: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    without: tuple[str, ...] = (),
) -> None:
    """Check every statistic of a kernel in a dtype, but those without which it gives the others."""
    problem = problem_of(shape, rule)
    rounded = Problem(*(x.to(dtype) for x in problem.qkv), problem.how)
    rounded = cast(rounded, dtype, device) if device != "cpu" else rounded
    # At a softcap float32 has ties that float64 does not have.
    clear = "softcap" not in problem.how
    request = everything(cast(rounded, dtype, device), 0, top=clear, argmax=clear)
    request = replace(request, **{name: getattr(RowRequest(), name) for name in without})
    ours = described(rounded, request, backend)
    exact = described(cast(rounded, torch.float64, device), request, "rows")
    assert ours.kernel.startswith(backend)
    assert ours.heads.dtype == dtype
    assert_heads_near(ours.heads, exact.heads, 1.0 if shape.T <= FEW else 2.0)
    assert_same(replace(ours, heads=None), replace(exact, heads=None), CLOSE)


def assert_heads_near(ours: Tensor, exact: Tensor, units: float = 2.0) -> None:
    """Equal up to rounding; products of pairs in half precision also round the weights."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours.double(), exact, rtol=CLOSE, atol=CLOSE, equal_nan=True)
        return
    close = units * torch.finfo(ours.dtype).eps
    most = max(1.0, exact.abs().nan_to_num().max().item()) if units > 1 else 1.0
    torch.testing.assert_close(ours.double(), exact, rtol=close, atol=close * most, equal_nan=True)


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
    return row_statistics(*problem.qkv, rule_of(problem), request, backend=backend)


def rule_of(problem: Problem) -> AttentionRule:
    """The rule of a problem's arguments."""
    names = {"causal": "is_causal", "window": "near"}
    options = {names.get(name, name): x for name, x in problem.how.items()}
    return make_rule(head_dim=problem.q.shape[-1], **options)


def gradients_by_definition(problem: Problem) -> tuple[Tensor, ...]:
    """Gradients of an explicit softmax in float64."""
    q, k, v = (x.clone().requires_grad_() for x in problem.qkv)
    groups, rule = q.shape[1] // k.shape[1], rule_of(problem)
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


def errors_of(
    backend: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False
) -> dict[str, tuple[float, float]]:
    """Root mean squared errors by output: of a kernel, and of torch's kernel or of the rows.

    The latter are at least what rounding a result to float32 may be off by: of few large results,
    torch's may be nearer by chance.
    """
    rule, request = make_rule(head_dim=q.shape[-1], is_causal=is_causal), RowRequest(heads=True)
    wide = (x.double() for x in (q, k, v))
    exact = row_statistics(*wide, rule, request, backend="rows")
    ours, plain = (
        row_statistics(q, k, v, rule, request, backend=name) for name in (backend, "rows")
    )
    grouped = q.shape[1] != k.shape[1]
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)

    def error(x: Tensor, name: str) -> float:
        return (x.double() - getattr(exact, name)).square().mean().sqrt().item()

    baselines = {"heads": heads, "lse": plain.lse, "entropy": plain.entropy}
    errors = {}
    for name, x in baselines.items():
        rounding = torch.finfo(torch.float32).eps / 2 * getattr(exact, name).square().mean().sqrt()
        errors[name] = error(getattr(ours, name), name), max(error(x, name), rounding.item())
    return errors


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


def assert_nan_stays_in_its_row(backend: str, device: str = "cpu") -> None:
    """Check that a row of NaN and an infinite value spoil the rows that see them alone."""
    q, k, v = torch.randn(3, 1, 2, 70, 24).to(device)
    problem, request = Problem(q, k, v, {"causal": True}), RowRequest(heads=True)
    calm = described(problem, request, backend)
    q[0, 1, 33], v[0, 0, 60, 7] = torch.nan, torch.inf
    wild = described(problem, request, backend)
    for name in ("lse", "entropy", "max_logit", "max_weight", "heads"):
        actual, expected = getattr(wild, name), getattr(calm, name)
        assert actual[0, 1, 33].isnan().all(), name
        actual[0, 1, 33] = expected[0, 1, 33]
        if name == "heads":
            assert not actual[0, 0, 60:].isfinite().all(-1).any()
            actual[0, 0, 60:] = expected[0, 0, 60:]
        assert torch.equal(actual, expected), name


def assert_strides_are_read(backend: str, device: str = "cpu", close: float = 0) -> None:
    """Check that queries, keys, values and masks may lie in memory in any way."""
    wide = torch.randn(2, 40, 3, 4, 50).to(device)
    q, k, v = (wide[:, :, i].transpose(1, 2)[..., ::2] for i in range(3))
    mask = (torch.rand(40, 2, 40) < 0.7).to(device).transpose(0, 1)[:, None].transpose(2, 3)
    dense = (x.contiguous() for x in (q, k, v))
    plain = attend(*dense, mask=mask.contiguous(), backend=backend)
    strided = attend(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(strided, plain, rtol=close, atol=close)
    repeated = (x[:, :, :, :1].expand(-1, -1, -1, 8) for x in (q, k, v))
    assert attend(*repeated, backend=backend).isfinite().all()


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Compute on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
