"""What the Triton kernel refuses, with the values."""

from typing import Any

import pytest
import torch

from describing import assert_refused
from headwise import masks
from headwise.errors import ArgumentError
from headwise.kernels import RowRequest, attend, make_rule, row_statistics
from headwise.kernels.triton import is_installed

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="no Triton: pip install 'headwise[triton]'"
)
Q = torch.zeros(1, 2, 5, 4)
WIDE = torch.zeros(1, 2, 5, 257)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize(("change", "message"), [
    ({"q": Q.double()}, "does not compute in torch.float64"),
    ({"q": Q.clone().requires_grad_()}, "it has no gradients"),
    ({"dropout_p": 0.5}, "dropout_p=0.5"),
    ({"q": WIDE}, "widths up to 256 and .* not 257 and 10"),
    ({"q": torch.zeros(1, 2, 4096, 4), "mask": ~masks.causal()},
     "a mask of 1 x 1 x 4096 x 4096 entries"),
])  # fmt: skip
def test_attend_refuses_by_name(change: dict[str, Any], message: str) -> None:
    assert_refused("triton", change, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": True}, "does not compute top"),
        ({"key_norms": torch.ones(1, 2, 5)}, "does not compute value"),
        ({"classes": torch.ones(1, 5, 65)}, "does not compute 65 classes, more than 64"),
    ],
)
def test_row_statistics_refuse_by_name(options: dict[str, Any], message: str) -> None:
    request = RowRequest(**options)
    with pytest.raises(ArgumentError, match=f"backend='triton' cannot.*{message}"):
        row_statistics(Q, Q, Q, make_rule(head_dim=4), request, backend="triton")


def test_tensors_that_are_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ArgumentError, match="these tensors are on cpu"):
        attend(Q, Q, Q, backend="triton")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own error under vmap
def test_tensors_under_vmap() -> None:
    with pytest.raises(ArgumentError, match="some are mapped over, or traced"):
        torch.func.vmap(lambda q: attend(q, Q, Q, backend="triton"))(Q[None])


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.triton._kernel.is_installed", lambda: False)
    with pytest.raises(ArgumentError, match=r"not installed.*headwise\[triton\]"):
        attend(Q, Q, Q, backend="triton")
