"""Impossible layers, position schemes and caches: one clear error each, with the values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import ArgumentError, HeadwiseError, ShapeError, UnsupportedError
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE

X = torch.zeros(2, 3, 12)
LAYERS: list[tuple[dict[str, Any], type[HeadwiseError], str]] = [
    ({"d_model": 12.0}, ArgumentError, r"d_model=12\.0"),
    ({"d_model": 10, "n_heads": 3}, ShapeError, "d_model=10 cannot be shared by n_heads=3"),
    ({"n_heads": "3"}, ArgumentError, "n_heads='3'"),
    ({"n_heads": 0}, ArgumentError, "n_heads=0"),
    ({"n_kv_heads": 3}, ShapeError, "n_heads=4 cannot share n_kv_heads=3"),
    ({"n_kv_heads": "2"}, ArgumentError, "n_kv_heads='2'"),
    ({"head_dim": 3.0}, ArgumentError, r"head_dim=3\.0"),
    ({"head_dim": -1}, ArgumentError, "head_dim=-1"),
    ({"v_head_dim": 0}, ArgumentError, "v_head_dim=0"),
    ({"kdim": 0}, ArgumentError, "kdim=0"),
    ({"dropout": -0.1}, ArgumentError, "dropout=-0.1"),
    ({"dropout": 1.5}, ArgumentError, "dropout=1.5"),
    ({"bias": "qk"}, ArgumentError, "bias='qk'"),
    ({"rope": 10000}, ArgumentError, "rope=10000 is not a RoPE"),
    ({"rope": RoPE(4)}, ShapeError, "rope rotates 4 features.*head_dim=3"),
    ({"position_bias": "alibi"}, ArgumentError, "='alibi' is not an ALiBi"),
    ({"position_bias": ALiBi(3)}, ShapeError, "for 3 heads where n_heads=4"),
]


def _layer(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(**{"d_model": 12, "n_heads": 4} | options)


def _joined(k: torch.Tensor) -> object:
    """Keys k after those of two texts of five tokens."""
    cache = KVCache()
    cache.store(torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4))
    return cache.joined(k, k)


def _torch(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4, **options))


@pytest.mark.parametrize(("call", "error", "message"), [
    *((partial(_layer, **options), *said) for options, *said in LAYERS),
    (lambda: RoPE(5), ShapeError, "width=5"),
    (lambda: RoPE(0), ShapeError, "width=0"),
    (lambda: RoPE(4.0), ShapeError, "width=4.0"),
    (lambda: RoPE(4, base=1.0), ArgumentError, "base=1.0"),
    (lambda: RoPE(4, base=float("nan")), ArgumentError, "base=nan"),
    (lambda: ALiBi(0), ArgumentError, "n_heads=0"),
    (lambda: _layer()(X.numpy()), ArgumentError, r"query is an ndarray\. Give"),
    (lambda: _layer()(X.double()), ArgumentError, r"query torch.float64.*weights torch.float32"),
    (lambda: _layer()(X, X.half()), ArgumentError, r"query torch.float32.*key torch.float16"),
    (lambda: _layer()(X, X.to("meta")), ArgumentError, r"key torch.float32 on meta"),
    (lambda: _layer(kdim=5)(X[..., 1:], X[..., :5]), ShapeError, r"query \(2, 3, 11\).*12"),
    (lambda: _layer(kdim=5)(X), ShapeError, r"key \(2, 3, 12\).*5"),
    (lambda: _layer()(X[0]), ShapeError, r"query \(3, 12\)"),
    (lambda: _layer()(X, X, cache=KVCache()), ArgumentError, "cache given together with key"),
    (lambda: _layer()(X, cache="x"), ArgumentError, "cache='x' is not a KVCache"),
    (lambda: _joined(torch.ones(2, 3, 1, 4)), ShapeError, r"\(2, 3, 1, 4\) .* after \(2, 2, 5"),
    (lambda: _joined(torch.ones(3, 2, 1, 4)), ShapeError, r"k \(3, 2, 1, 4\) .* after"),
    (lambda: _joined(torch.ones(2, 2, 1, 4).half()), ShapeError, r"float16 .* of torch.float32"),
    (lambda: MultiHeadAttention.from_torch(nn.Linear(3, 3)), ArgumentError,
     r"from_torch: Linear is not an nn\.MultiheadAttention"),
    (lambda: _torch(add_bias_kv=True), UnsupportedError, "h: add_bias_kv=True adds a key"),
    (lambda: _torch(add_zero_attn=True), UnsupportedError, "h: add_zero_attn=True adds a key"),
])  # fmt: skip
def test_what_cannot_be_is_refused(
    call: Callable[[], object], error: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
