"""Models on our kernel at any size: what decides by size is set so that nothing is too small."""

from typing import Any

import pytest
from torch import Tensor, nn

import headwise as hw
from headwise.attention.huggingface import _call, _masks
from headwise.kernels import AttentionProblem, _attend
from headwise.kernels.native import _kernel as native

_THRESHOLDS = "LEAST_PRODUCTS", "LEAST_PRODUCTS_HALF", "MORE_IN_TRAINING", "LEAST_QUERIES"


@pytest.fixture
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is preferred, and masks are rules, also in tiny models."""
    hw.register_attention()
    for name in _THRESHOLDS:
        monkeypatch.setattr(native, name, 0)
    monkeypatch.setattr(_attend, "_PREPARED", {})  # what was chosen rests on the thresholds
    monkeypatch.setattr(_masks, "FEW_ENTRIES", 0)


@pytest.fixture
def left_to_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules whose calls went to the function of `sdpa`."""
    modules: list[str] = []
    original = _call.sdpa_attention_forward

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modules.append(type(module).__name__)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(_call, "sdpa_attention_forward", forward)
    return modules


def count_queries(monkeypatch: pytest.MonkeyPatch, module: Any, name: str = "attend") -> list[int]:
    """The number of queries of each call of `attend` from now on, through this Python module."""
    queries: list[int] = []
    original = getattr(module, name)

    def attend(first: Tensor | AttentionProblem, *args: Any, **kwargs: Any) -> Any:
        queries.append((first if isinstance(first, Tensor) else first.q).shape[2])
        return original(first, *args, **kwargs)

    monkeypatch.setattr(module, name, attend)
    return queries
