"""bfloat16 of whole AMX tiles (heads of a multiple of 32 numbers) equals the definition.

The laws hold for every build of the native kernel; on a processor with AMX its own is among them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from describing import assert_same, everything, threads
from headwise import masks
from headwise._native_library import library
from headwise.kernels import attend, make_rule, row_statistics
from headwise.layer import ALiBi
from headwise.layer._biases import PositionedBias
from strategies import Problem

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")
CLOSE = 8e-5
S = 300  # two whole blocks of keys and a part of a third
UNIT = torch.finfo(torch.bfloat16).eps

Rule = Callable[[int, torch.dtype], dict[str, Any]]


def _distance_bias(T: int, dtype: torch.dtype) -> dict[str, Any]:
    positions = torch.arange(S - T, S)[None], torch.arange(S)[None]
    return {"bias": PositionedBias(ALiBi(4), *positions, dtype, in_steps=True)}


def _given_bias(T: int, dtype: torch.dtype) -> dict[str, Any]:
    values = torch.randn(1, 4, T, S, generator=torch.Generator().manual_seed(1))
    return {"bias": values.to(dtype), "is_causal": True}


RULES: dict[str, Rule] = {
    "full": lambda T, dtype: {},
    "causal": lambda T, dtype: {"is_causal": True},
    "window": lambda T, dtype: {"near": (70, 3)},
    "padded right": lambda T, dtype: {"mask": masks.padding([161, 0]), "is_causal": True},
    "padded left": lambda T, dtype: {"mask": masks.padding([50, S - 37], side="left")},
    "documents": lambda T, dtype: {
        "mask": masks.documents((torch.arange(2 * S).view(2, S) // 77) * 2**40)
    },
    "mask": lambda T, dtype: {
        "mask": torch.rand(2, 4, T, S, generator=torch.Generator().manual_seed(1)) < 0.3
    },
    "distance bias": _distance_bias,
    "given bias": _given_bias,
    "sinks": lambda T, dtype: {"sinks": torch.tensor([0.5, -9.0, 90.0, 0.0]).to(dtype)},
    "softcap": lambda T, dtype: {"softcap": 1.5, "is_causal": True},
    "scale": lambda T, dtype: {"scale": 0.3},
    "scale 1": lambda T, dtype: {"scale": 1.0, "is_causal": True},
    "negative scale": lambda T, dtype: {"scale": -0.25},
}


def _inputs(T: int, D: int, Dv: int, n_kv_heads: int = 2) -> list[Tensor]:
    """Queries, keys and values of two texts, heads next to one another, as models have them."""
    torch.manual_seed(T + D)
    sizes = ((T, 4, D), (S, n_kv_heads, D), (S, n_kv_heads, Dv))
    return [torch.randn(2, n, H, width).to(torch.bfloat16).transpose(1, 2) for n, H, width in sizes]


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize(("T", "D", "Dv"), [
    (299, 64, 32),
    (17, 32, 64),
    pytest.param(S, 32, 64, marks=pytest.mark.full),
    pytest.param(49, 96, 96, marks=pytest.mark.full),
])  # fmt: skip
@pytest.mark.parametrize("rule_name", RULES, ids=list(RULES))
def test_every_rule_and_statistic_holds_across_blocks(
    rule_name: str, T: int, D: int, Dv: int
) -> None:
    q, k, v = _inputs(T, D, Dv)
    clear = rule_name != "softcap"  # at a softcap float32 has ties that float64 does not have
    request = everything(Problem(q.float(), k.float(), v.float(), {}), 0, top=clear, argmax=clear)
    rule = RULES[rule_name]
    ours = row_statistics(
        q, k, v, make_rule(head_dim=D, **rule(T, torch.float32)), request, backend="native"
    )
    exact = row_statistics(
        q.double(), k.double(), v.double(), make_rule(head_dim=D, **rule(T, torch.float64)),
        request, backend="rows",
    )  # fmt: skip
    _check_heads(ours.heads, exact.heads)
    assert_same(replace(ours, heads=None), replace(exact, heads=None), CLOSE)


def _check_heads(ours: Tensor, exact: Tensor) -> None:
    assert ours.dtype == torch.bfloat16
    size = max(1.0, exact.abs().max().item())
    torch.testing.assert_close(ours.double(), exact.double(), rtol=2 * UNIT, atol=2 * UNIT * size)


@pytest.mark.usefixtures("built_for_halves")
def test_any_number_of_threads_and_a_part_of_the_queries_give_the_same_bits() -> None:
    """One thread copies keys and values; of many, and for few queries, each packs its own."""
    q, k, v = _inputs(S, 64, 64)
    options: dict[str, Any] = {"backend": "native", "need_lse": True}
    with threads(1):
        known = attend(q, k, v, **options)
        part = attend(q[:, :, 48:96], k, v, **options)
    with threads(7):
        many = attend(q, k, v, **options)
    for name in ("heads", "lse"):
        assert torch.equal(getattr(many, name), getattr(known, name))
        assert torch.equal(getattr(part, name), getattr(known, name)[:, :, 48:96])


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("wild", [torch.nan, torch.inf])
def test_hidden_numbers_change_nothing(wild: float) -> None:
    q, k, v = _inputs(S, 64, 32)
    options: dict[str, Any] = {
        "mask": masks.padding([200, 33]), "backend": "native", "need_lse": True
    }  # fmt: skip
    known = attend(q, k, v, **options)
    k[0, :, 200:], v[1, :, 33:] = wild, wild
    found = attend(q, k, v, **options)
    assert torch.equal(found.heads, known.heads)
    assert torch.equal(found.lse, known.lse)


@pytest.mark.usefixtures("built_for_halves")
def test_nothing_is_read_beyond_the_last_key() -> None:
    """The numbers behind a view of keys and values are not part of them."""
    q, k, v = _inputs(40, 32, 32)
    known = attend(q, k, v, causal=True, backend="native")
    behind = [torch.full((2, 2, S + 64, 32), torch.nan, dtype=x.dtype) for x in (k, v)]
    for whole, x in zip(behind, (k, v), strict=True):
        whole[:, :, :S] = x
    views = [whole[:, :, :S] for whole in behind]
    assert torch.equal(attend(q, *views, causal=True, backend="native"), known)


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("how", ["full", "causal", "window", "scale", "softcap"])
def test_gradients_equal_those_of_the_definition(how: str) -> None:
    inputs = [x.detach().requires_grad_() for x in _inputs(S, 64, 32)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    options = RULES[how](S, torch.float32)
    options["causal"] = options.pop("is_causal", False)
    options["window"] = options.pop("near", None)
    grad = torch.randn(2, 4, S, 32).to(torch.bfloat16)
    ours = attend(*inputs, **options, backend="native")
    exact = attend(*wide, **options, backend="rows")
    ours.backward(grad)
    exact.backward(grad.double())
    for x, y in zip(inputs, wide, strict=True):
        error = (x.grad.double() - y.grad).norm() / y.grad.norm()  # type: ignore[union-attr]
        assert error < 2 * UNIT


@pytest.mark.usefixtures("built_for_halves")
def test_a_query_that_sees_one_key_has_no_gradient() -> None:
    """Weights are recomputed from the same logits to the last bit, however large these are."""
    q, k, v = (x.detach() for x in _inputs(S, 64, 64, n_kv_heads=4))
    q = (100 * q).requires_grad_()
    attend(q, k, v, window=(0, 0), backend="native").float().sum().backward()
    assert q.grad is not None
    assert not q.grad.any()
