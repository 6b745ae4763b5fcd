"""Bad sizes, masks and arguments: one clear error each, with the values."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from headwise import masks
from headwise.errors import ArgumentError, HeadwiseError, MaskError, ShapeError
from headwise.kernels import attend, make_rule
from headwise.layer import MultiHeadAttention

Q, K = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"q": torch.zeros(6, 5, 4)}, ShapeError, r"q \(6, 5, 4\).*four axes"),
    ({"k": torch.zeros(2, 4, 7, 4)}, ShapeError, "6 query heads cannot share 4"),
    ({"k": torch.zeros(2, 3, 7, 5)}, ShapeError, r"k \(2, 3, 7, 5\)"),
    ({"v": torch.zeros(2, 3, 8, 4)}, ShapeError, r"v \(2, 3, 8, 4\)"),
    ({"v": torch.zeros(2, 3, 7, 4).half()}, ArgumentError, "v torch.float16"),
    ({"mask": torch.ones(5, 7, dtype=torch.int64)}, MaskError, "torch.int64"),
    ({"mask": torch.ones(5, 8, dtype=torch.bool)}, ShapeError, r"\(1, 1, 5, 8\).*7 keys"),
    ({"mask": torch.ones(4, 7, dtype=torch.bool)}, ShapeError, r"\(1, 1, 4, 7\).*5 queries"),
    ({"mask": torch.ones(7, dtype=torch.bool)}, ShapeError, r"shape \(7,\)"),
    ({"mask": torch.ones(3, 1, 5, 7).bool()}, ShapeError, "3 texts where there are 2"),
    ({"mask": torch.ones(2, 3, 5, 7).bool()}, ShapeError, "3 heads where there are 6"),
    ({"bias": torch.ones(2, 3, 5, 7)}, ShapeError, "3 heads where there are 6"),
    ({"bias": torch.ones(5, 8)}, ShapeError, r"\(1, 1, 5, 8\).*7 keys"),
    ({"sinks": torch.ones(3)}, ShapeError, r"sinks \(3,\).*6 heads"),
    ({"window": (-1, 0)}, ArgumentError, r"\(-1, 0\)"),
    ({"window": "a"}, ArgumentError, r"window: \('a', 'a'\)"),
    ({"window": [1, 2]}, ArgumentError, r"window: \(\[1, 2\]"),
    ({"window": (1, 2, 3)}, ArgumentError, r"window: \(1, 2, 3\)"),
    ({"window": 1.5}, ArgumentError, r"window: \(1.5, 1.5\)"),
    ({"softcap": 0.0}, ArgumentError, "softcap=0.0"),
    ({"softcap": float("nan")}, ArgumentError, "softcap=nan"),
    ({"softcap": float("inf")}, ArgumentError, "softcap=inf"),
    ({"sinks": 0.5}, ArgumentError, "sinks of float.*6 floats"),
    ({"sinks": torch.ones(6, dtype=torch.int64)}, ArgumentError, "sinks of torch.int64"),
    ({"sinks": torch.full((6,), torch.inf)}, ArgumentError, "sinks hold inf"),
    ({"sinks": torch.full((6,), torch.nan)}, ArgumentError, "sinks hold nan"),
    ({"bias": torch.full((5, 7), torch.inf)}, ArgumentError, "holds inf"),
    ({"bias": torch.full((5, 7), torch.nan)}, ArgumentError, "holds nan"),
    ({"mask": torch.full((5, 7), torch.inf)}, ArgumentError, "holds inf"),
    ({"mask": torch.full((5, 7), torch.nan)}, ArgumentError, "holds nan"),
    ({"q": Q.long(), "k": K.long(), "v": K.long()}, ArgumentError, "q of torch.int64"),
    ({"v": K.numpy()}, ArgumentError, "v of ndarray"),
    ({"q": Q[:, :0]}, ShapeError, r"q \(2, 0, 5, 4\).*at least one head"),
    ({"k": K[:, :0], "v": K[:, :0]}, ShapeError, r"k \(2, 0, 7, 4\).*at least one head"),
    ({"q": Q[..., :0], "k": K[..., :0]}, ShapeError, r"q \(2, 6, 5, 0\).*width"),
    ({"scale": float("nan")}, ArgumentError, "scale=nan"),
    ({"scale": float("inf")}, ArgumentError, "scale=inf"),
    ({"scale": -float("inf")}, ArgumentError, "scale=-inf"),
    ({"mask": torch.ones(5, 7).tril()}, MaskError, r"\(5, 7\).*only 0 and 1.*from_binary"),
    ({"mask": np.ones((5, 7), dtype=bool)}, MaskError,
     r"a mask of ndarray\. Give torch.from_numpy\(array\), a tensor of booleans"),
    ({"bias": np.ones((5, 7))}, ArgumentError, r"bias is an ndarray\. Give torch.from_numpy"),
    ({"bias": 2.0}, ArgumentError, r"bias is a float\. Give a tensor of floats"),
    ({"dropout_p": 1.0}, ArgumentError, "dropout_p=1.0"),
    ({"backend": "eager"}, ArgumentError, "'eager' is not known"),
    ({"backend": "fused", "softcap": 2.0}, ArgumentError, "it has no softcap"),
    ({"backend": "fused", "dropout_p": 0.5, "need_weights": True}, ArgumentError, "dropout_p=0.5"),
    ({"mask": masks.documents(torch.zeros(2, 6).long())}, ShapeError, "6 ids for 7 keys"),
    ({"q": torch.zeros(2, 6, 8, 4), "mask": masks.documents(torch.zeros(2, 7).long())}, ShapeError,
     "8 queries and 7 keys"),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_attend_refuses(
    change: dict[str, Any], error: type[HeadwiseError], message: str, backend: str
) -> None:
    arguments = {"q": Q, "k": K, "v": K, "backend": backend} | change
    with pytest.raises(error, match=message):
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: masks.padding([3, -1]), ArgumentError, r"\[3, -1\]"),
    (lambda: masks.padding([1.5, 2]), ArgumentError, r"\[1.5, 2.0\]"),
    (lambda: masks.padding([True, False]), ArgumentError, r"\[True, False\]"),
    (lambda: masks.padding([3], side="up"), ArgumentError, "side='up'"),
    (lambda: masks.padding("abc"), ArgumentError, r"padding: lengths 'abc'\. Give one whole"),
    (lambda: masks.padding([[1], [1, 2]]), ArgumentError, r"\[\[1\], \[1, 2\]\]\. Give"),
    (lambda: masks.documents("aab"), ArgumentError, r"documents: ids 'aab'\. Give \[batch, "),
    (lambda: masks.documents([[0], [0, 1]]), ArgumentError, r"ids \[\[0\], \[0, 1\]\]"),
    (lambda: masks.window((3, "0")), ArgumentError, r"\(3, '0'\) is not \(left, right\)"),
    (lambda: masks.documents([0, 0, 1]), ShapeError, r"ids of shape \(3,\).*\[batch, keys\]"),
    (lambda: masks.window(-2), ArgumentError, r"\(-2, -2\)"),
    (lambda: masks.causal() & torch.ones(2, 2).bool(), MaskError, "value of type Tensor"),
    (lambda: masks.padding([1]) | torch.ones(2, 2).bool(), MaskError, "value of type Tensor"),
    (lambda: torch.ones(2, 2).bool() & masks.causal(), MaskError, "value of type Tensor"),
    (lambda: None | masks.causal(), MaskError, "value of type NoneType"),
    (lambda: masks.causal() & np.eye(2), MaskError, "type ndarray.*torch.from_numpy"),
    (lambda: (np.eye(2) > 0) | masks.causal(), MaskError, "type ndarray.*torch.from_numpy"),
    (lambda: masks.from_blocked(torch.zeros(2, 2)), MaskError, "torch.float32"),
    (lambda: masks.from_blocked(torch.zeros(3).bool()), ShapeError, r"\(3,\)"),
    (lambda: masks.from_flex(torch.ones(2, 2).bool()), MaskError, "a Tensor"),
    (lambda: masks.from_additive(torch.tensor([[0.5, 0.0]])), MaskError, "0.5"),
    (lambda: masks.from_additive(torch.tensor([[0.0, -1e9]])), MaskError,
     r"between -1e\+09 and 0 .*masks.from_blocked\(mask < 0\) if they block keys"),
    (lambda: masks.from_additive(torch.zeros(2, 2).bool()), MaskError, "torch.bool"),
    (lambda: masks.from_additive(torch.eye(3)), MaskError, r"\(3, 3\).*only 0 and 1"),
    (lambda: masks.from_binary(torch.tensor([[0.0, 0.5]])), MaskError, "holds 0.5"),
    (lambda: masks.from_binary(torch.tensor([[0, 1], [2, 1]])), MaskError, "holds 2"),
    (lambda: masks.from_binary(torch.tensor([[0.0, -torch.inf]])), MaskError, "holds -inf"),
    (lambda: masks.from_binary(torch.tensor([[1.0, torch.nan]])), MaskError, "holds nan"),
    (lambda: masks.from_binary(np.eye(2)), MaskError, "of type ndarray.*torch.from_numpy"),
    (lambda: masks.from_blocked([[True]]), MaskError, "from_blocked: a mask of type list"),
    (lambda: masks.from_additive(None), MaskError, "from_additive: a mask of type NoneType"),
    (lambda: masks.as_mask(np.eye(2)), MaskError, "mask: a mask of type ndarray.*from_numpy"),
    (lambda: masks.from_binary(torch.ones(3)), ShapeError, r"\(3,\)"),
])  # fmt: skip
def test_masks_refuse(make: Any, error: type[HeadwiseError], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


BINARY = torch.ones(5, 5).tril()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5)])
def test_every_door_refuses_a_float_mask_of_zeros_and_ones(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    q, mask = torch.randn(2, 6, 5, 4), BINARY.to(dtype).expand(shape)
    said = rf"{dtype} mask of shape {re.escape(str(shape))}.*bool\(\).*from_binary.*bias=mask"
    layer = MultiHeadAttention(24, 6)
    doors = [
        lambda: attend(q, q, q, mask=mask),
        lambda: make_rule(head_dim=4, mask=mask),
        lambda: masks.from_additive(mask),
        lambda: layer(torch.randn(2, 5, 24), mask=mask),
    ]
    for door in doors:
        with pytest.raises(MaskError, match=said):
            door()


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_numbers_that_are_zeros_and_ones_are_added_as_a_bias(backend: str) -> None:
    q = torch.randn(2, 6, 5, 4)
    heads = attend(q, q, q, bias=BINARY, backend=backend)
    logits = q @ q.mT / 2 + BINARY
    torch.testing.assert_close(heads, logits.softmax(-1) @ q)
    for mask in (torch.zeros(5, 5), torch.ones(5, 5), BINARY - 1, 2 * BINARY):  # no such masks
        assert attend(q, q, q, mask=mask, backend=backend).isfinite().all()


def test_where_values_cannot_be_read_zeros_and_ones_are_added() -> None:
    q = torch.randn(2, 6, 5, 4)
    added = attend(q, q, q, bias=BINARY)
    mapped = torch.func.vmap(lambda mask: attend(q, q, q, mask=mask, backend="rows"))(BINARY[None])
    torch.testing.assert_close(mapped[0], added)
    meta = attend(*[q.to("meta")] * 3, mask=BINARY.to("meta"))
    assert meta.shape == added.shape
