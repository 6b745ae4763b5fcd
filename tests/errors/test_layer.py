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
        ({"sinks": torch.zeros(3)}, ShapeError, r"sinks \(3,\) for n_heads=4"),
        ({"softcap": -1.0}, ArgumentError, "softcap=-1.0"),
        ({"window": (2, -1)}, ArgumentError, r"\(2, -1\)"),
        ({"dropout": -0.1}, ArgumentError, "dropout=-0.1"),
        ({"scale": float("nan")}, ArgumentError, "scale=nan"),
        ({"softcap": float("nan")}, ArgumentError, "softcap=nan"),
        ({"softcap": float("inf")}, ArgumentError, "softcap=inf"),
        ({"sinks": float("nan")}, ArgumentError, "sinks=nan"),
        ({"sinks": float("inf")}, ArgumentError, "sinks=inf"),
        ({"n_kv_heads": "2"}, ArgumentError, "n_kv_heads='2'"),
        ({"head_dim": 3.0}, ArgumentError, r"head_dim=3\.0"),
        ({"rope": 10000}, ArgumentError, "rope=10000 is not of type RoPE"),
        ({"position_bias": "alibi"}, ArgumentError, "='alibi' is not of type ALiBi"),
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
    (lambda: RoPE(4, pairing="both"), ArgumentError, "pairing='both'"),
    (lambda: RoPE(4.0), ShapeError, "width=4.0"),
    (lambda: RoPE(4, base=float("nan")), ArgumentError, "base=nan"),
    (lambda: ALiBi(0), ArgumentError, "n_heads=0"),
    (lambda: KVCache(max_length=0), ArgumentError, "max_length=0"),
    (lambda: KVCache(window=-3), ArgumentError, "window=-3"),
    (lambda: KVCache(n_sinks=4), ArgumentError, "n_sinks=4, window=None"),
    (lambda: KVCache(n_sinks=-1, window=3), ArgumentError, "n_sinks=-1"),
    (lambda: KVCache(max_length=9, window=3), ArgumentError, "max_length=9, window=3"),
    (lambda: KVCache(max_length=4.5), ArgumentError, "max_length=4.5"),
    (lambda: KVCache(window="a"), ArgumentError, "window='a'"),
    (lambda: KVCache(left_padding=[2, -1]), ArgumentError, r"left_padding=\[2, -1\]"),
    (lambda: KVCache(left_padding=[1.5]), ArgumentError, r"left_padding \[1.5\] are torch"),
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


def _kv(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(*shape), torch.ones(*shape)


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
    cache.append(*_kv(2, 2, 5, 4))
    with pytest.raises(error, match=message):
        cache.append(k, k)


def test_padding_is_given_for_every_text() -> None:
    with pytest.raises(ShapeError, match="3 texts, but the cache holds 2"):
        KVCache(left_padding=[0, 1]).append(*_kv(3, 2, 5, 4))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([2, 0], r"index=\[2, 0\] of 2 texts"),
        (torch.tensor([-1, 0]), r"index=\[-1, 0\] of 2 texts"),
        (torch.tensor([[0, 1]]), r"index=\[\[0, 1\]\] of 2 texts"),
        (torch.tensor([0.0, 1.0]), r"index \[0.0, 1.0\] are torch.float32"),
        ([True, False], r"index \[True, False\] are torch.bool"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
def test_reordering_to_missing_texts_is_refused(index: Any, message: str, begun: bool) -> None:
    cache = KVCache(left_padding=[0, 1])
    if begun:
        cache.append(*_kv(2, 2, 5, 4))
    with pytest.raises(ArgumentError, match=message):
        cache.reorder(index)
    assert (len(cache), cache.lengths.tolist()) == ((5, [5, 4]) if begun else (0, [0, 0]))


def test_exceeding_the_allocation_is_refused_and_nothing_is_written() -> None:
    cache = KVCache(max_length=6)
    held = cache.append(*_kv(2, 2, 5, 4))
    with pytest.raises(ShapeError, match="2 tokens after 5 do not fit max_length=6"):
        cache.append(*_kv(2, 2, 2, 4))
    assert (len(cache), cache.lengths.tolist()) == (5, [5])
    assert held.k.all()
    cache.append(*_kv(2, 2, 1, 4))  # there is still room for one


def test_an_allocated_cache_refuses_gradients() -> None:
    k = torch.ones(2, 2, 5, 4, requires_grad=True)
    with pytest.raises(ArgumentError, match="max_length=6 is written in place"):
        KVCache(max_length=6).append(k, k)


def test_cropping_to_forgotten_tokens_is_refused() -> None:
    cache = KVCache(window=3)
    cache.append(*_kv(2, 2, 5, 4))
    with pytest.raises(ArgumentError, match=r"to \[4\].*window=3"):
        cache.crop(4)
    with pytest.raises(ArgumentError, match=r"\[-1\]"):
        cache.crop(-1)
    with pytest.raises(ArgumentError, match=r"lengths 2.5 are torch.float32"):
        cache.crop(2.5)
    with pytest.raises(ShapeError, match="3 lengths for 2 texts"):
        cache.crop(torch.tensor([1, 2, 3]))


def test_a_cache_that_does_not_fit_the_layer_is_refused() -> None:
    layer, x = MultiHeadAttention(12, 4), torch.zeros(2, 3, 12)
    with pytest.raises(ArgumentError, match="cache given together with key"):
        layer(x, x, cache=KVCache())
    near = MultiHeadAttention(12, 4, window=(5, 0))
    with pytest.raises(ArgumentError, match=r"window=\(5, 0\) hides the n_sinks=2"):
        near(x, cache=KVCache(window=4, n_sinks=2))
    with pytest.raises(ArgumentError, match=r"window=\(5, 0\) sees 5 keys.*window=5"):
        near(x, cache=KVCache(window=5))
    near(x, cache=KVCache(window=6))
    with pytest.raises(ArgumentError, match="cache='x' is not a KVCache"):
        layer(x, cache="x")


def _torch(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(12, 4, **options)


@pytest.mark.parametrize(("state", "error", "message"), [
    ({"w": torch.ones(1)}, ArgumentError, r"unknown \['w'\]"),
    ({"q_proj.bias": torch.ones(12)}, ArgumentError, r"unknown \['q_proj.bias'\], missing"),
    ({"q_proj.weight": torch.ones(12, 11)}, ShapeError, r"q_proj.weight \(12, 11\).*\(12, 12\)"),
    ({"in_proj_weight": torch.ones(30, 12)}, ShapeError, r"30 rows.*12 \+ 6 \+ 6"),
    ({"bias_k": torch.ones(1, 1, 12)}, UnsupportedError, r"bias_k \(1, 1, 12\)"),
    ({"bias_v": torch.ones(1, 1, 12)}, UnsupportedError, r"bias_v \(1, 1, 12\)"),
    ({"in_proj_weight": torch.ones(24, 12)}, ArgumentError,
     "in_proj_weight gives k_proj.weight, q_proj.weight, v_proj.weight for the second time"),
    ({"q_proj.weight": 3}, ArgumentError, "q_proj.weight is of type int"),
    ({"in_proj_weight": [3]}, ArgumentError, "in_proj_weight is of type list"),
])  # fmt: skip
def test_a_state_of_another_layer_is_refused_and_nothing_copied(
    state: dict[str, torch.Tensor], error: type[HeadwiseError], message: str
) -> None:
    layer = MultiHeadAttention(12, 4, 2)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(error, match=message):
        layer.load_state_dict(new | state)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_module_that_is_no_layer_of_torch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"from_torch: Linear is not an nn\.MultiheadAttention"):
        MultiHeadAttention.from_torch(nn.Linear(3, 3))


def test_a_subclass_that_takes_other_arguments() -> None:
    class Two(MultiHeadAttention):
        def __init__(self, width: int) -> None:
            super().__init__(width, 2)

    with pytest.raises(ArgumentError, match=r"the constructor of Two .*\(too many positional"):
        Two.from_torch(_torch())


def test_an_adapted_projection_is_refused() -> None:
    layer = MultiHeadAttention(12, 4)
    layer.q_proj = nn.Sequential(layer.q_proj)
    with pytest.raises(UnsupportedError, match="q_proj of Sequential"):
        layer.to_torch()


def test_features_only_torch_has_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="add_bias_kv=True"):
        MultiHeadAttention.from_torch(_torch(add_bias_kv=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_kv_heads": 2}, "n_kv_heads=2"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"v_head_dim": 5}, "v_head_dim=5"),
        ({"bias": "qkv"}, "bias='qkv'"),
        ({"qk_norm": True}, "qk_norm"),
        ({"gate": True}, "gate"),
        ({"out_proj": False}, "out_proj=False"),
        ({"rope": RoPE(2)}, r"rope=RoPE\(width=2"),
        ({"position_bias": ALiBi(4), "scale": 0.3}, "position_bias, scale=0.3"),
        ({"softcap": 4.0}, "softcap=4.0"),
        ({"window": 3}, "window=3"),
        ({"sinks": 0.5}, "sinks other than 0"),
        ({"sinks": nn.Parameter(torch.zeros(4))}, "sinks other than 0"),
    ],
)
def test_features_only_our_layer_has_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        MultiHeadAttention(12, 4, **options).to_torch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"position_bias": ALiBi(4)}, "position_bias"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"out_proj": False}, "out_proj=False"),
    ],
)
def test_layers_that_cannot_be_sharded_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tensor_parallel_plan.*{message}"):
        MultiHeadAttention(12, 4, **options).tensor_parallel_plan()
