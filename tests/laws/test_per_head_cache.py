"""A cache with a window for each kv head equals one pass under the mask of each head."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import ArgumentError, ShapeError

WINDOWS, SINKS, T = (None, 3, 5), 2, 13


def layer(**more: Any) -> Any:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(12, 6, 3, rope=hw.RoPE(2), **more).double().eval()


def by_definition(padding: Tensor) -> Tensor:
    """`[B, H, T, S]`, pair by pair."""
    visible = torch.zeros(len(padding), 6, T, T, dtype=torch.bool)
    for b, first in enumerate(padding.tolist()):
        for h in range(6):
            window = WINDOWS[h // 2]
            for i in range(T):
                for j in range(first, i + 1):
                    near = window is None or i - j < window or j - first < SINKS
                    visible[b, h, i, j] = near
    return visible


@pytest.mark.parametrize("pieces", [[T], [1] * T, [6, 1, 1, 5], [4, 9]])
@pytest.mark.parametrize("padding", [[0, 0], [0, 4]])
def test_it_equals_one_pass_under_a_mask(pieces: list[int], padding: list[int]) -> None:
    x, attention = torch.randn(2, T, 12, dtype=torch.float64), layer()
    first = torch.tensor(padding)
    cache = hw.PerHeadKVCache(WINDOWS, n_sinks=SINKS, left_padding=padding)
    with torch.no_grad():
        expected = attention(x, mask=by_definition(first))
        parts = [attention(part, causal=True, cache=cache) for part in x.split(pieces, 1)]
    real = torch.arange(T) >= first[:, None]
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real])
    assert len(cache) == T


def test_what_is_dropped_takes_no_memory() -> None:
    attention, x = layer(), torch.randn(1, 200, 12, dtype=torch.float64)
    cache, full = hw.PerHeadKVCache(WINDOWS, n_sinks=SINKS), hw.KVCache()
    with torch.no_grad():
        for part in x.split(20, 1):
            attention(part, causal=True, cache=cache)
            attention(part, causal=True, cache=full)
    token = 2 * 2 * 8  # a key and a value of two numbers
    assert cache.nbytes == token * (200 + 3 + 5 + 2 * SINKS)
    stored = [x.untyped_storage().nbytes() for _, group in cache._groups for x in group._slots[:2]]
    assert sum(stored) == cache.nbytes < 0.4 * (full._slots.k.nbytes + full._slots.v.nbytes)


def test_rows_are_selected_with_their_padding() -> None:
    x, attention = torch.randn(2, T, 12, dtype=torch.float64), layer()
    first, rows = torch.tensor([4, 0]), torch.tensor([1, 0, 0])
    cache = hw.PerHeadKVCache(WINDOWS, n_sinks=SINKS, left_padding=[4, 0])
    with torch.no_grad():
        expected = attention(x, mask=by_definition(first))
        attention(x[:, :9], causal=True, cache=cache)
        cache.reorder(rows)
        rest = attention(x[rows, 9:], causal=True, cache=cache)
    torch.testing.assert_close(rest, expected[rows, 9:])


@pytest.mark.parametrize("windows", [[], [0], [None, -3], [4, True]])
def test_windows_below_one(windows: list[Any]) -> None:
    with pytest.raises(ArgumentError, match=r"windows=\["):
        hw.PerHeadKVCache(windows)


def test_a_window_for_each_head_and_no_crop() -> None:
    cache = hw.PerHeadKVCache([None, 3])
    with pytest.raises(ShapeError, match="3 kv heads, but windows for 2"):
        layer()(torch.zeros(1, 4, 12, dtype=torch.float64), cache=cache)
    with pytest.raises(ArgumentError, match=r"crop: to 3, but heads keep windows \[None, 3\]"):
        cache.crop(3)
