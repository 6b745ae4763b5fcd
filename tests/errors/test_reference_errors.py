"""What the definition refuses, with the value that is wrong."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headwise import masks, reference
from headwise.errors import ArgumentError, HeadwiseError, MaskError, ShapeError
from headwise.reference import MultiHeadAttention


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape)


Q = zeros(1, 2, 5, 3)
RULE = masks.causal()
# Shapes of q, k and v.
SIZES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]] = [
    ((5, 3), (1, 1, 5, 3), (1, 1, 5, 3), r"q \(5, 3\)"),
    ((2, 1, 5, 3), (1, 1, 7, 3), (1, 1, 7, 3), r"q \(2, 1, 5, 3\), k \(1, 1, 7, 3\)"),
    ((1, 1, 5, 3), (1, 1, 7, 2), (1, 1, 7, 3), r"k \(1, 1, 7, 2\)"),
    ((1, 1, 5, 3), (1, 1, 7, 3), (1, 1, 11, 3), r"v \(1, 1, 11, 3\)"),
    ((1, 2, 5, 3), (1, 2, 7, 3), (1, 1, 7, 3), r"v \(1, 1, 7, 3\)"),
]
OPTIONS: list[tuple[dict[str, Any], type[HeadwiseError], str]] = [
    ({"sinks": zeros(3)}, ShapeError, r"sinks \(3,\).*each of 2 heads"),
    ({"scale": float("inf")}, ArgumentError, "scale=inf"),
    ({"scale": float("nan")}, ArgumentError, "scale=nan"),
    ({"softcap": 0.0}, ArgumentError, "softcap=0.0"),
    ({"softcap": -2.0}, ArgumentError, "softcap=-2.0"),
    ({"softcap": float("nan")}, ArgumentError, "softcap=nan"),
    ({"window": (-1, 2)}, ArgumentError, r"window=\(-1, 2\)"),
    ({"window": (None, -3)}, ArgumentError, r"window=\(None, -3\)"),
]
# Inputs of a layer of two heads and a width of 6.
LAYER: list[tuple[str, list[tuple[int, ...]], str]] = [
    ("x", [(6,), (5, 7), (2, 3, 5, 6)], "x {} .*d_model 6. Give"),
    ("memory", [(7, 6), (3, 7, 6), (2, 7, 5)], "memory {} do not fit d_model 6"),
    ("mask", [(5, 6), (5,), (2, 5, 5), (2, 3, 5, 5)], r"mask of shape {} .* \(2, 2, 5, 5\)"),
]
NO_ARRAYS = (torch.zeros(1, 1, 5, 3), [[[[0.0] * 3] * 5]], "words")


def _attend(q: Any = Q, k: Any = Q, v: Any = Q, **options: Any) -> None:
    reference.attention(q, k, v, **options)


def _layer(**inputs: Any) -> None:
    MultiHeadAttention(6, 2, seed=0).forward(**{"x": zeros(2, 5, 6)} | inputs)


def _no_array(name: str, value: Any) -> str:
    kind = f"an? {type(value).__name__}"
    return rf"{name} is {kind}, not a NumPy array\. Give np\.asarray\({name}\)"


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(_attend, *map(np.zeros, shapes)), ShapeError,
       f"^attention: .*{message}.* do not fit together. Give") for *shapes, message in SIZES),
    *((partial(_attend, zeros(1, 8, 5, 3), *[zeros(1, n, 7, 3)] * 2), ShapeError,
       f"8 query heads cannot share {n} key/value") for n in (0, 3)),
    *((partial(_attend, **options), *said) for options, *said in OPTIONS),
    *((partial(_attend, k=value), ArgumentError, "^attention: " + _no_array("k", value))
      for value in (*NO_ARRAYS, None)),
    *((partial(_layer, x=value), ArgumentError, "^MultiHeadAttention: " + _no_array("x", value))
      for value in (*NO_ARRAYS, None)),
    *((partial(_layer, memory=value), ArgumentError, _no_array("memory", value))
      for value in NO_ARRAYS),
    *((partial(MultiHeadAttention, width, n), ShapeError,
       f"d_model {width} .* n_heads {n}. Make d_model")
      for width, n in ((8, 3), (8, 0), (8, -2), (0, 2), (4, 8))),
    (lambda: MultiHeadAttention(6, "2"), ArgumentError,
     r"n_heads='2'\. Give a positive whole number"),
    (lambda: MultiHeadAttention(6.0, 2), ArgumentError, r"d_model=6\.0"),
    *((partial(_layer, **{name: zeros(*shape)}), ShapeError,
       message.format(re.escape(str(shape))))
      for name, shapes, message in LAYER for shape in shapes),
    (lambda: _layer(mask=RULE), MaskError,
     r"mask of type Window\. .*mask\.dense\(T, S\)\[0, 0\]"),
    (lambda: _layer(mask=np.ones((5, 5), dtype=np.int64)), MaskError,
     r"mask of dtype int64\. Give booleans"),
])  # fmt: skip
def test_what_the_definition_refuses(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_a_rule_becomes_the_booleans_of_a_mask() -> None:
    MultiHeadAttention(6, 2)(zeros(5, 6), RULE.dense(5, 5)[0, 0].numpy())


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_float_mask_of_zeros_and_ones_is_refused(kind: str) -> None:
    mask = np.tril(np.ones((5, 5), kind))
    said = rf"mask of {kind}, \(5, 5\), holds only 0 and 1.*bool.*bias=mask"
    doors = (_attend, partial(reference.scaled_dot_product, Q, Q, Q), _layer)
    for door in doors:
        with pytest.raises(MaskError, match=said):
            door(mask=mask)
    assert np.isfinite(reference.attention(Q, Q, Q, bias=mask)).all()
