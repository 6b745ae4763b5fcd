"""Calls of models like earlier ones: decided once, computed as if they were the first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise._library import library
from headwise.kernels import _attend
from headwise.models.attention.huggingface import attention_forward
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch

native = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")
pytestmark = pytest.mark.usefixtures("at_any_size")
LAYER = nn.Identity()
LAYER.num_key_value_groups = 2
CALLS: dict[str, dict[str, Any]] = {
    "one token": {"T": 1},
    "a whole text": {"T": 24},
    "both ways": {"T": 24, "is_causal": False},
    "scaled": {"T": 24, "scaling": 0.3},
    "fewer queries than keys": {"T": 5},
    "softcap": {"T": 24, "softcap": 2.0},
    "sinks": {"T": 24, "s_aux": torch.ones(4)},
    "position bias": {"T": 24, "position_bias": torch.ones(1, 4, 24, 24)},
    "mask": {"T": 24, "attention_mask": torch.ones(24, 24).tril()[None, None].bool()},
}


def _heads(T: int, inputs: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    q, k, v = inputs
    options = {"attention_mask": None, **options}
    return attention_forward(LAYER, q[:, :, -T:], k, v, **options)[0]


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, 24, 8, dtype=dtype) for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@torch.no_grad()
def test_a_call_after_others_is_what_it_is_alone(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs()
    alone = _heads(**call, inputs=inputs)
    for other in (*CALLS.values(), call):
        _heads(**other, inputs=_inputs())
    assert torch.equal(_heads(**call, inputs=inputs), alone)
    monkeypatch.setattr(_attend, "_PREPARED", {})
    assert torch.equal(_heads(**call, inputs=inputs), alone)


@torch.no_grad()
def test_dropout_and_autocast_are_not_those_of_an_earlier_call(left_to_torch: list[str]) -> None:
    inputs = _inputs()
    plain = _heads(24, inputs)
    assert left_to_torch == []
    assert not torch.equal(_heads(24, inputs, dropout=0.5), plain)
    assert left_to_torch == ["Identity"]
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert _heads(24, inputs).dtype == torch.bfloat16
    assert torch.equal(_heads(24, inputs), plain)


def test_gradients_are_those_of_the_call_that_asks_for_them() -> None:
    q, k, v = _inputs()
    with torch.no_grad():
        plain = _heads(24, (q, k, v))
    learned = q.clone().requires_grad_()
    heads = _heads(24, (learned, k, v))
    torch.testing.assert_close(heads, plain)
    assert torch.autograd.grad(heads.sum(), learned)[0].any()


@torch.no_grad()
def test_what_was_left_to_torch_is_so_again(left_to_torch: list[str]) -> None:
    inputs = _inputs(torch.float64)
    first, second = (_heads(1, inputs) for _ in range(2))
    assert left_to_torch == ["Identity", "Identity"]
    assert torch.equal(first, second)
