"""What the native kernel refuses, with the values, before any pointer leaves Python."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from describing import assert_refused
from headwise import masks
from headwise._native_library import SWITCH, library
from headwise.errors import ArgumentError, HeadwiseError, ShapeError, UnsupportedError
from headwise.kernels import RowRequest, attend, make_rule, row_statistics
from headwise.kernels._rule import Lowered
from headwise.kernels.native._autograd import attention
from headwise.kernels.native._problem import check_tensor, compute_heads

Q = torch.zeros(1, 2, 5, 4)

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")


@pytest.mark.parametrize(("change", "message"), [
    ({"q": Q.double()}, "does not compute in torch.float64"),
    ({"bias": torch.zeros(5, 5, requires_grad=True)}, "it has no gradients of a bias"),
    ({"dropout_p": 0.5}, "dropout_p=0.5"),
    ({"q": Q.to("meta")}, "not plain tensors on a CPU"),
    ({"q": torch.zeros(1, 2, 4096, 4), "mask": ~masks.causal()},
     "a mask of 1 x 1 x 4096 x 4096 entries"),
])  # fmt: skip
def test_attend_refuses_by_name(change: dict[str, Any], message: str) -> None:
    assert_refused("native", change, message)


@pytest.mark.parametrize("backend", ["native", "rows"])
@pytest.mark.parametrize(
    ("name", "x", "fitting"),
    [
        ("received", torch.ones(1, 4).bool(), r"\(1, 5\)"),
        ("keys", torch.zeros(1, 4, 3).long(), r"\(1, 5, 3\)"),
        ("classes", torch.zeros(2, 5, 3), r"\(1, 5, 3\)"),
        ("classes", torch.zeros(1, 5), r"\(1, 5, 5\)"),
        ("key_norms", torch.zeros(1, 3, 5), r"\(1, 2, 5\)"),
        ("query_at", torch.zeros(5).long(), r"\(1, 5\)"),
        ("key_at", torch.zeros(1, 6).long(), r"\(1, 5\)"),
    ],
)
def test_a_request_of_another_size(name: str, x: Any, fitting: str, backend: str) -> None:
    message = re.escape(f"{name} of shape {tuple(x.shape)} for 1 texts, 2 heads, 5 queries")
    with pytest.raises(ShapeError, match=f"{message}.*Give {fitting}"):
        row_statistics(Q, Q, Q, make_rule(head_dim=4), RowRequest(**{name: x}), backend=backend)


ARRAYS: list[tuple[torch.Tensor, int, type[HeadwiseError], str]] = [
    (torch.zeros(2, 5).double(), 0, ArgumentError, "x is torch.float64 on cpu"),
    (torch.zeros(2, 5, device="meta"), 0, ArgumentError, "float32 on meta"),
    (torch.zeros(2, 6), 0, ShapeError, r"\(2, 6\) instead of \(2, 5\)"),
    (torch.zeros(5, 2).T, 1, ArgumentError, r"strides of \(1, 2\), but its last axis is"),
    (torch.zeros(2, 6)[:, :5], 0, ArgumentError, r"strides of \(6, 1\), but its axes are"),
    (torch._neg_view(torch.zeros(2, 5)), 0, ArgumentError, "may not be in memory"),
]
LOWERED: list[tuple[dict[str, Any], type[HeadwiseError], str]] = [
    ({"left": -1}, ArgumentError, "left=-1"),
    ({"mask": torch.zeros(1, 1, 5, 5)}, ArgumentError, r"a mask of torch\.float32"),
    ({"mask": torch.ones(1, 3, 5, 5).bool()}, ShapeError, r"mask has shape \(1, 3, 5, 5\)"),
    ({"bias": torch.zeros(5, 5)}, ShapeError, r"bias has shape \(5, 5\)"),
    ({"by_distance": torch.zeros(1, 2, 8)}, ShapeError, r"\(1, 2, 8\) instead of \(1, 2, 9\)"),
    ({"key_range": torch.zeros(3, 2).long()}, ShapeError, "key_range has shape"),
    ({"documents": torch.zeros(1, 4).long()}, ShapeError, "documents has shape"),
    ({"sinks": torch.zeros(3)}, ShapeError, r"sinks has shape \(3,\) instead of \(2,\)"),
]
OF_FOUR = Lowered(documents=torch.zeros(1, 4).long())
LEARNED = Lowered(bias=torch.zeros(1, 1, 5, 5, requires_grad=True))


@pytest.mark.parametrize(("call", "error", "message"), [
    *((partial(check_tensor, "x", x, (2, 5), torch.float32, steps), *said)
      for x, steps, *said in ARRAYS),
    *((partial(compute_heads, Q, Q, Q, Lowered(**words)), *said) for words, *said in LOWERED),
    (lambda: attend(Q, Q, Q, sinks=torch.zeros(2, device="meta"), backend="native"), ArgumentError,
     "sinks on meta, queries on cpu"),
    (lambda: attention(*[Q.double()] * 3, False, *Lowered()), ArgumentError,
     r"q is torch\.float64\. The kernel takes torch\.float32"),
    (lambda: attention(*[Q[0]] * 3, False, *Lowered()), ShapeError,
     r"q \(2, 5, 4\), .*Give four axes"),
    (lambda: attention(Q.clone().requires_grad_(), Q, Q, False, *LEARNED), ArgumentError,
     "bias requires gradients, which this kernel"),
    (lambda: compute_heads(torch.zeros(1, 3, 5, 4), Q, Q, Lowered()), ShapeError,
     "3 query heads cannot share 2 key/value heads"),
    (lambda: compute_heads(Q, torch.zeros(1, 2, 5, 6), Q, Lowered()), ShapeError,
     r"do not fit .*k \(1, 2, 5, 6\), v \(1, 2, 5, 4\)"),
    (lambda: compute_heads(Q, Q, torch.zeros(3, 2, 5, 4), Lowered()), ShapeError,
     r"do not fit .*v \(3, 2, 5, 4\)"),
    (lambda: compute_heads(Q, Q[:, :, :4], Q[:, :, :4], OF_FOUR), ShapeError,
     "documents of 4 keys for 5 queries"),
])  # fmt: skip
def test_what_does_not_fit_is_named(
    call: Callable[[], object], error: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_an_array_that_is_not_aligned() -> None:
    whole = bytearray(4 * Q.numel() + 1)
    q = torch.frombuffer(whole, dtype=torch.float32, offset=1).view(Q.shape)
    with pytest.raises(ArgumentError, match="not a multiple of 4"):
        check_tensor("x", q, tuple(Q.shape), torch.float32)
    # Queries, keys and values are copied before they are read.
    assert torch.equal(attend(q, q, q, backend="native"), Q)


@pytest.mark.parametrize("size", [0, 64])
def test_memory_that_was_freed(size: int) -> None:
    q = torch.randn(1, 2, 5, 4)
    q.untyped_storage().resize_(size)
    with pytest.raises(ArgumentError, match=rf"v of shape .* at byte 160 of {size}"):
        attend(Q, Q, q, backend="native")
    norms = torch.zeros(1, 2, 5)
    norms.untyped_storage().resize_(size // 2)
    with pytest.raises(ArgumentError, match=rf"norms of shape .* at byte 40 of {size // 2}"):
        check_tensor("norms", norms, (1, 2, 5), torch.float32)
    zeros = torch._efficientzerotensor(Q.shape)
    with pytest.raises(ArgumentError, match=r"q of shape .* is not in memory"):
        attend(zeros, Q, Q, backend="native")


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (1, 2, 0, 4)], ids=["no texts", "no tokens"])
def test_empty_tensors_with_any_strides(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape).as_strided(shape, (40, 20, 1, 5))
    assert attend(empty, empty, empty, backend="native").shape == shape


def test_ranges_beyond_the_keys_are_those_of_the_keys() -> None:
    q, nowhere = torch.randn(1, 2, 5, 4), torch.tensor([[torch.nan, 1e30]])
    assert attention(q, q, q, False, *Lowered(key_range=nowhere))[0].isfinite().all()
    plain = compute_heads(q, q, q, Lowered())
    wide = compute_heads(q, q, q, Lowered(key_range=torch.tensor([[-(2**40), 2**40]])))
    assert torch.equal(wide[0]["heads"], plain[0]["heads"])
    none, _ = compute_heads(q, q, q, Lowered(key_range=torch.tensor([[4, 2]])))
    assert not none["heads"].any()


def test_unavailable_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q = Q.clone().requires_grad_()
    heads, *_ = attention(q, Q, Q, False, *Lowered())
    monkeypatch.setenv(SWITCH, "0")
    library.cache_clear()
    with pytest.raises(UnsupportedError, match=r"no kernel for the backward pass \(switched off"):
        heads.sum().backward()
    library.cache_clear()
