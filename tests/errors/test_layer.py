"""Impossible layers, position schemes and caches: one clear error each, with the values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import ArgumentError, HeadwiseError, ShapeError, UnsupportedError
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"v_head_dim": 0}, ArgumentError, "v_head_dim=0"),
        ({"rope": RoPE(4)}, ShapeError, "rope rotates 4 features.*head_dim=3"),
        ({"position_bias": ALiBi(3)}, ShapeError, "for 3 heads where n_heads=4"),
        ({"dropout": -0.1}, ArgumentError, "dropout=-0.1"),
        ({"n_kv_heads": "2"}, ArgumentError, "n_kv_heads='2'"),
        ({"head_dim": 3.0}, ArgumentError, r"head_dim=3\.0"),
        ({"rope": 10000}, ArgumentError, "rope=10000 is not a RoPE"),
        ({"position_bias": "alibi"}, ArgumentError, "='alibi' is not an ALiBi"),
        ({"bias": "qk"}, ArgumentError, "bias='qk'"),
    ],
)
def test_a_part_of_other_sizes_is_refused(
    options: dict[str, Any], error: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(12, 4, **options)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: MultiHeadAttention(12, "3"), ArgumentError, "n_heads='3'"),
    (lambda: MultiHeadAttention(12.0, 4), ArgumentError, r"d_model=12\.0"),
    (lambda: RoPE(5), ShapeError, "width=5"),
    (lambda: RoPE(0), ShapeError, "width=0"),
    (lambda: RoPE(4, base=1.0), ArgumentError, "base=1.0"),
    (lambda: RoPE(4.0), ShapeError, "width=4.0"),
    (lambda: RoPE(4, base=float("nan")), ArgumentError, "base=nan"),
    (lambda: ALiBi(0), ArgumentError, "n_heads=0"),
])  # fmt: skip
def test_an_impossible_part_is_refused(
    make: Callable[[], object], error: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_inputs_that_are_no_tensors_are_refused() -> None:
    layer = MultiHeadAttention(12, 4)
    with pytest.raises(ArgumentError, match=r"query is a ndarray\. Give"):
        layer(torch.zeros(1, 3, 12).numpy())


def test_mixed_dtypes_and_devices_are_refused() -> None:
    layer, x = MultiHeadAttention(12, 4), torch.zeros(2, 3, 12)
    with pytest.raises(ArgumentError, match=r"query torch.float64.*weights torch.float32"):
        layer(x.double())
    with pytest.raises(ArgumentError, match=r"query torch.float32.*key torch.float16"):
        layer(x, x.half())
    with pytest.raises(ArgumentError, match=r"key torch.float32 on meta"):
        layer(x, x.to("meta"))


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (torch.ones(2, 3, 1, 4), ShapeError, r"k \(2, 3, 1, 4\) after \(2, 2, 5, 4\)"),
        (torch.ones(3, 2, 1, 4), ShapeError, r"k \(3, 2, 1, 4\) after"),
        (torch.ones(2, 2, 1, 4).half(), ArgumentError, "k torch.float16.*after torch.float32"),
    ],
)
def test_a_cache_serves_one_layer_and_batch(
    k: torch.Tensor, error: type[HeadwiseError], message: str
) -> None:
    cache = KVCache()
    cache.store(torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4))
    with pytest.raises(error, match=message):
        cache.joined(k, k)


def test_a_cache_that_does_not_fit_the_layer_is_refused() -> None:
    layer, x = MultiHeadAttention(12, 4), torch.zeros(2, 3, 12)
    with pytest.raises(ArgumentError, match="cache given together with key"):
        layer(x, x, cache=KVCache())
    with pytest.raises(ArgumentError, match="cache='x' is not a KVCache"):
        layer(x, cache="x")


def test_a_module_that_is_no_layer_of_torch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"from_torch: Linear is not an nn\.MultiheadAttention"):
        MultiHeadAttention.from_torch(nn.Linear(3, 3))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_features_only_torch_has_are_refused(option: str) -> None:
    with pytest.raises(UnsupportedError, match=f"from_torch: {option}=True adds a key"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 4, **{option: True}))
