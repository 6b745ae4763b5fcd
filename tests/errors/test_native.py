"""What the native kernel refuses: by name, with the values, before a pointer leaves Python."""

from typing import Any

import pytest
import torch

from headwise import masks
from headwise._native import library
from headwise.errors import ArgumentError, HeadwiseError, ShapeError
from headwise.kernels import RowRequest, attend, make_rule, row_statistics
from headwise.kernels.native._check import check_apart, check_tensor

Q = torch.zeros(1, 2, 5, 4)

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q.double(), "k": Q.double(), "v": Q.double()}, "does not compute in torch.float64"),
        ({"q": Q.clone().requires_grad_()}, "it has no gradients"),
        ({"dropout_p": 0.5}, "dropout_p=0.5"),
        ({"q": Q.to("meta"), "k": Q.to("meta"), "v": Q.to("meta")}, "not plain tensors on a CPU"),
        (
            {"q": torch.zeros(1, 2, 4096, 4), "mask": ~masks.causal(), "k": None, "v": None},
            "a mask of 1 x 1 x 4096 x 4096 entries",
        ),
    ],
)
def test_attend_refuses_by_name(change: dict[str, Any], message: str) -> None:
    given = {"q": Q, "k": Q, "v": Q} | change
    q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
    k, v = (q if x is None else x for x in (k, v))
    with pytest.raises(ArgumentError, match=f"backend='native' cannot.*{message}"):
        attend(q, k, v, **given, backend="native")


def test_row_statistics_refuse_by_name() -> None:
    rule = make_rule(head_dim=4)
    with pytest.raises(ArgumentError, match="'eager' is not known"):
        row_statistics(Q, Q, Q, rule, RowRequest(), backend="eager")
    with pytest.raises(ArgumentError, match=r"does not compute in torch\.float64"):
        row_statistics(Q.double(), Q.double(), Q.double(), rule, RowRequest(), backend="native")


@pytest.mark.parametrize(
    ("x", "steps", "error", "message"),
    [
        (torch.zeros(2, 5).double(), 0, ArgumentError, "x is torch.float64 on cpu"),
        (torch.zeros(2, 5, device="meta"), 0, ArgumentError, "float32 on meta"),
        (torch.zeros(2, 6), 0, ShapeError, r"\(2, 6\) instead of \(2, 5\)"),
        (torch.zeros(5, 2).T, 1, ArgumentError, r"steps of \(1, 2\), but its last axis is"),
        (torch.zeros(2, 6)[:, :5], 0, ArgumentError, r"steps of \(6, 1\), but its axes are"),
        (torch._neg_view(torch.zeros(2, 5)), 0, ArgumentError, "may not be in memory"),
    ],
)
def test_an_array_of_another_kind(
    x: torch.Tensor, steps: int, error: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_tensor("x", x, (2, 5), torch.float32, steps)


def test_an_array_that_is_not_aligned() -> None:
    whole = bytearray(64)
    x = torch.frombuffer(whole, dtype=torch.float32, count=10, offset=1).view(2, 5)
    with pytest.raises(ArgumentError, match="no multiple of 4"):
        check_tensor("x", x, (2, 5), torch.float32)


def test_memory_that_is_shared() -> None:
    whole = torch.zeros(10)
    with pytest.raises(ArgumentError, match="heads shares memory with q"):
        check_apart({"heads": whole[:6]}, {"q": whole[5:]})
    with pytest.raises(ArgumentError, match="heads shares memory with lse"):
        check_apart({"heads": whole[:6], "lse": whole[5:]}, {})
    check_apart({"heads": whole[:5]}, {"q": whole[5:]})
