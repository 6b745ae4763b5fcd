"""Models on our kernel at any size: what decides by size is set so that nothing is too small."""

from typing import Any

import pytest
from torch import Tensor, nn

import headwise as hw
from headwise.kernels import _attend, _statistics
from headwise.kernels.native import _kernel as native
from headwise.models.attention.huggingface import _implementation, _masks

_THRESHOLDS = "LEAST_PRODUCTS", "LEAST_PRODUCTS_HALF", "MORE_IN_TRAINING", "LEAST_QUERIES"
# What was chosen for earlier calls rests on the thresholds.
_REMEMBERED = (_attend, "_SETTLED"), (_statistics, "_PREPARED"), (_implementation, "_ROUTES")


@pytest.fixture
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is preferred, and masks are rules, also in tiny models."""
    hw.register_attention()
    for name in _THRESHOLDS:
        monkeypatch.setattr(native, name, 0)
    for module, name in _REMEMBERED:
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(_masks, "FEW_ENTRIES", 0)


@pytest.fixture
def left_to_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules whose calls went to the function of `sdpa`."""
    modules: list[str] = []
    original = _implementation.sdpa_attention_forward

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modules.append(type(module).__name__)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(_implementation, "sdpa_attention_forward", forward)
    return modules


def count_queries(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """The number of queries of each call of `attend` from now on, through this Python module."""
    queries: list[int] = []
    original = module.attend

    def attend(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(q.shape[2])
        return original(q, *args, **kwargs)

    monkeypatch.setattr(module, "attend", attend)
    return queries
