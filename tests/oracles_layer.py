"""The layer by its definition: the weights of a module, copied into NumPy."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise import reference
from headwise.layer import MultiHeadAttention

Arrays = tuple[np.ndarray, np.ndarray]


def by_definition(
    layer: MultiHeadAttention, query: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, **how: Any,
) -> Arrays:  # fmt: skip
    """The output and the weights of a layer, one head and one query at a time."""
    key = query if key is None else key
    value = key if value is None else value
    q = _heads(linear(layer.q_proj, query), layer.n_heads)
    k = _heads(linear(layer.k_proj, key), layer.n_kv_heads)
    v = _heads(linear(layer.v_proj, value), layer.n_kv_heads)
    how = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in how.items()}
    found = reference.attention(q, k, v, **how, need_weights=True)
    concat = found.out.transpose(0, 2, 1, 3).reshape(*query.shape[:2], -1)
    return linear(layer.out_proj, concat), found.weights


def linear(module: nn.Linear, x: Tensor | np.ndarray) -> np.ndarray:
    out = np.asarray(x) @ array(module.weight).T
    return out if module.bias is None else out + array(module.bias)


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def close(ours: Tensor, theirs: np.ndarray, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(ours.detach(), torch.as_tensor(theirs), rtol=rtol, atol=atol)


def _heads(x: np.ndarray, n_heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], n_heads, -1).transpose(0, 2, 1, 3)  # B H T D
