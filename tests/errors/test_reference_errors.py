"""What the definition refuses, with the value that is wrong."""

import re

import numpy as np
import pytest
import torch

from headwise import masks, reference
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.reference import MultiHeadAttention


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape)


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        ((5, 3), (1, 1, 5, 3), (1, 1, 5, 3), r"q \(5, 3\)"),
        ((2, 1, 5, 3), (1, 1, 7, 3), (1, 1, 7, 3), r"q \(2, 1, 5, 3\), k \(1, 1, 7, 3\)"),
        ((1, 1, 5, 3), (1, 1, 7, 2), (1, 1, 7, 3), r"k \(1, 1, 7, 2\)"),
        ((1, 1, 5, 3), (1, 1, 7, 3), (1, 1, 11, 3), r"v \(1, 1, 11, 3\)"),
        ((1, 2, 5, 3), (1, 2, 7, 3), (1, 1, 7, 3), r"v \(1, 1, 7, 3\)"),
    ],
)
def test_sizes_that_do_not_fit_are_named(q, k, v, said):
    with pytest.raises(ShapeError, match=f"^attention: .*{said}.* do not fit together. Give"):
        reference.attention(zeros(*q), zeros(*k), zeros(*v))


@pytest.mark.parametrize("n_kv_heads", [0, 3])
def test_heads_that_cannot_share_are_counted(n_kv_heads):
    keys = zeros(1, n_kv_heads, 7, 3)
    with pytest.raises(ShapeError, match=f"8 query heads cannot share {n_kv_heads} key/value"):
        reference.attention(zeros(1, 8, 5, 3), keys, keys)


@pytest.mark.parametrize("value", [torch.zeros(1, 1, 5, 3), [[[[0.0] * 3] * 5]], "words", None])
def test_inputs_that_are_not_arrays_are_named(value):
    said = rf"is a {type(value).__name__}, not a NumPy array\. Give np\.asarray\("
    q, layer = zeros(1, 1, 5, 3), MultiHeadAttention(6, 2)
    with pytest.raises(ArgumentError, match=rf"^attention: k {said}k\)"):
        reference.attention(q, value, q)
    with pytest.raises(ArgumentError, match=rf"^MultiHeadAttention: x {said}x\)"):
        layer(value)
    if value is not None:
        with pytest.raises(ArgumentError, match=rf"^MultiHeadAttention: memory {said}memory\)"):
            layer(zeros(5, 6), memory=value)


def test_sinks_must_be_one_for_each_head():
    q = zeros(1, 2, 5, 3)
    with pytest.raises(ShapeError, match=r"sinks \(3,\).*each of 2 heads"):
        reference.attention(q, q, q, sinks=zeros(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale": float("inf")}, "scale=inf"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": -2.0}, "softcap=-2.0"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"window": (-1, 2)}, r"window=\(-1, 2\)"),
        ({"window": (None, -3)}, r"window=\(None, -3\)"),
    ],
)
def test_an_impossible_cap_or_window_is_named(options, said):
    q = zeros(1, 2, 5, 3)
    with pytest.raises(ArgumentError, match=said):
        reference.attention(q, q, q, **options)


@pytest.mark.parametrize(("d_model", "n_heads"), [(8, 3), (8, 0), (8, -2), (0, 2), (4, 8)])
def test_a_width_that_does_not_divide_is_named_with_both_values(d_model, n_heads):
    with pytest.raises(ShapeError, match=f"d_model {d_model} .* n_heads {n_heads}. Make d_model"):
        MultiHeadAttention(d_model, n_heads)


def test_sizes_are_whole_numbers():
    with pytest.raises(ArgumentError, match=r"n_heads='2'\. Give a positive whole number"):
        MultiHeadAttention(6, "2")
    with pytest.raises(ArgumentError, match=r"d_model=6\.0"):
        MultiHeadAttention(6.0, 2)


@pytest.mark.parametrize(
    ("name", "shapes", "said"),
    [
        ("x", [(6,), (5, 7), (2, 3, 5, 6)], "x {} .*d_model 6. Give"),
        ("memory", [(7, 6), (3, 7, 6), (2, 7, 5)], "memory {} do not fit d_model 6"),
        ("mask", [(5, 6), (5,), (2, 5, 5), (2, 3, 5, 5)], r"mask of shape {} .* \(2, 2, 5, 5\)"),
    ],
)
def test_the_layer_names_shapes_that_do_not_fit(name, shapes, said):
    for shape in shapes:
        inputs = {"x": zeros(2, 5, 6), name: zeros(*shape)}
        with pytest.raises(ShapeError, match=said.format(re.escape(str(shape)))):
            MultiHeadAttention(6, 2).forward(**inputs)


def test_a_rule_as_a_mask_leads_to_its_booleans():
    rule = masks.causal()
    with pytest.raises(MaskError, match=r"mask of type Window\. .*mask\.dense\(T, S\)\[0, 0\]"):
        MultiHeadAttention(6, 2)(zeros(5, 6), rule)
    MultiHeadAttention(6, 2)(zeros(5, 6), rule.dense(5, 5)[0, 0].numpy())


def test_the_layer_names_the_type_of_a_wrong_mask():
    with pytest.raises(MaskError, match=r"mask of dtype int64\. Give booleans"):
        MultiHeadAttention(6, 2).forward(zeros(5, 6), np.ones((5, 5), dtype=np.int64))


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_float_mask_of_zeros_and_ones_is_refused(kind):
    q, mask = zeros(1, 1, 5, 3), np.tril(np.ones((5, 5), kind))
    said = rf"mask of {kind}, \(5, 5\), holds only 0 and 1.*bool.*bias=mask"
    doors = [
        lambda: reference.attention(q, q, q, mask=mask),
        lambda: reference.scaled_dot_product(q, q, q, mask),
        lambda: MultiHeadAttention(6, 2, seed=0).forward(zeros(5, 6), mask=mask),
    ]
    for door in doors:
        with pytest.raises(MaskError, match=said):
            door()
    assert np.isfinite(reference.attention(q, q, q, bias=mask)).all()
