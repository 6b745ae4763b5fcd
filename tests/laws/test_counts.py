"""Counts from sizes equal the parameters and operations of real layers, and the textbooks'."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from headwise.counts import layer_sizes
from headwise.errors import ArgumentError, HeadwiseError, ShapeError
from headwise.layer import MultiHeadAttention

sizes = st.integers(1, 5)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that `layer_sizes` and `MultiHeadAttention` share."""
    n_kv_heads, group, head_dim = (draw(sizes) for _ in range(3))
    n_heads = n_kv_heads * group
    chosen = {"d_model": n_heads * draw(sizes), "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return chosen | ({"head_dim": head_dim} if draw(st.booleans()) else {})


def held(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@given(layers(), st.booleans())
def test_each_projection_has_the_counted_parameters(arguments: dict[str, Any], bias: bool) -> None:
    sizes = layer_sizes(**arguments, biases="QKVO" if bias else "")
    layer = MultiHeadAttention(**arguments, bias=bias)
    modules = {"Q": layer.q_proj, "K": layer.k_proj, "V": layer.v_proj, "O": layer.out_proj}
    actual = {role: held(module) for role, module in modules.items()}
    assert sizes.parameters() == actual
    assert sum(actual.values()) == held(layer)


@given(layers(), st.integers(1, 7), st.integers(1, 7))
def test_each_projection_does_the_counted_multiplications(
    arguments: dict[str, Any], T: int, S: int
):
    layer = MultiHeadAttention(**arguments)
    done: dict[str, int] = {}

    def watch(role: str, module: nn.Linear) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor], __: Tensor) -> None:
            done[role] = inputs[0].shape[:-1].numel() * module.weight.numel()

        module.register_forward_hook(hook)

    def watch_heads(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], __: Tensor) -> None:
        (_, H, T, D), (_, _, S, Dv) = inputs[0].shape, inputs[2].shape
        done.update(logits=H * T * S * D, mix=H * T * S * Dv)

    for role, name in zip("QKVO", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        watch(role, getattr(layer, name))
    layer.attention.register_forward_hook(watch_heads)
    key, value = torch.randn(1, S, layer.kdim), torch.randn(1, S, layer.vdim)
    layer(torch.randn(1, T, layer.d_model), key, value)
    assert done == layer_sizes(**arguments).multiply_adds(T, S)


@given(layers(), st.integers(1, 9), st.integers(1, 9))
def test_decoding_computes_each_key_once(arguments: dict[str, Any], T: int, more: int):
    sizes = layer_sizes(**arguments)
    first, later = sizes.multiply_adds(T), sizes.multiply_adds(more, cached=T)
    whole = sizes.multiply_adds(T + more)
    for role in "QKVO":
        assert first[role] + later[role] == whole[role]
    # Only hidden pairs are saved: the first queries never see later keys.
    for name in ("logits", "mix"):
        saved = whole[name] - first[name] - later[name]
        assert saved == sizes.n_heads * T * more * sizes.head_dim


@given(layers(), st.integers(1, 5), st.sampled_from(["float64", "float32", "bfloat16", "float16"]))
def test_a_cache_holds_the_keys_and_values(arguments: dict[str, Any], tokens: int, dtype: str):
    sizes = layer_sizes(**arguments)
    shape = (sizes.n_kv_heads, tokens, sizes.head_dim)
    kept = [torch.empty(shape, dtype=getattr(torch, dtype)) for _ in ("keys", "values")]
    assert tokens * sizes.cache_bytes(dtype) == sum(tensor.nbytes for tensor in kept)


@given(layers(), st.integers(1, 5))
def test_a_model_has_the_counts_of_its_layers_together(arguments: dict[str, Any], n_layers: int):
    layer, model = layer_sizes(**arguments), layer_sizes(**arguments, n_layers=n_layers)
    assert model.cache_bytes() == n_layers * layer.cache_bytes()
    for counts, of_layer in (
        (model.parameters(), layer.parameters()),
        (model.multiply_adds(3, 5), layer.multiply_adds(3, 5)),
    ):
        assert counts == {name: n_layers * number for name, number in of_layer.items()}


# Costs known from papers, or computed by hand.


def test_bert_base():
    bert = layer_sizes(768, 12, biases="QKVO", n_layers=12)
    assert sum(layer_sizes(768, 12).weights().values()) == 2_359_296
    assert sum(bert.weights().values()) == 28_311_552
    assert sum(bert.parameters().values()) == 28_348_416
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("bert"))
    assert held(model) == 109_482_240
    assert 28_348_416 / held(model) == pytest.approx(0.259, abs=0.0005)
    projections = ("query.", "key.", "value.", "attention.output.dense.")
    actual = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if any(projection in name for projection in projections)
    )
    assert actual == 28_348_416


def test_single_and_multi_head_by_the_textbook():
    d = 512  # Vaswani et al. 2017
    assert sum(layer_sizes(d, 1, out_proj=False).parameters().values()) == 3 * d**2 == 786_432
    assert sum(layer_sizes(d, 8).parameters().values()) == 4 * d**2
    assert sum(layer_sizes(d, 8, biases="QKVO").parameters().values()) == 4 * d**2 + 4 * d


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"n_heads": 0}, ArgumentError, "n_heads=0, biases=''"),
        ({"n_heads": 3, "biases": "QX"}, ArgumentError, "n_heads=3, biases='QX'"),
        ({"n_heads": 5}, ShapeError, "d_model=12 is not a multiple of n_heads=5"),
        ({"n_heads": 3, "head_dim": -2}, ArgumentError, "head_dim=-2"),
        ({"n_heads": 3, "n_kv_heads": 0}, ArgumentError, "n_kv_heads=0"),
        ({"n_heads": 3, "n_layers": 0}, ArgumentError, "n_layers=0"),
        ({"n_heads": 6, "n_kv_heads": 4}, ShapeError, "n_heads=6 is not a multiple of n_kv_heads="),
    ],
)
def test_sizes_that_do_not_fit_together(
    sizes: dict[str, Any], error: type[HeadwiseError], message: str
):
    with pytest.raises(error, match=message):
        layer_sizes(12, **sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"queries": 0}, "0 queries and 0 keys, 0 of them cached"),
        ({"queries": 2, "cached": -1}, "2 queries and 1 keys, -1 of them cached"),
        ({"queries": 2, "keys": 3, "cached": 4}, "2 queries and 3 keys, 4 of them cached"),
    ],
)
def test_impossible_texts(text: dict[str, int], message: str):
    with pytest.raises(ArgumentError, match=message):
        layer_sizes(12, 3).multiply_adds(**text)


def test_an_unknown_dtype():
    with pytest.raises(ArgumentError, match=r"'int3' is unknown\. Give float64, float32"):
        layer_sizes(12, 3).cache_bytes("int3")
