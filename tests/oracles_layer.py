"""The layer by its definition, with the weights of a module copied into NumPy."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise import reference
from headwise.kernels import AttentionRule, attend
from headwise.layer import ALiBi, HeadAttention, MultiHeadAttention, RoPE


def by_definition(
    layer: MultiHeadAttention, query: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, **options: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The output and the weights of a layer, one head and one query at a time."""
    key = query if key is None else key
    value = key if value is None else value
    q = _normed(layer.q_norm, _heads(linear(layer.q_proj, query), layer.n_heads))
    k = _normed(layer.k_norm, _heads(linear(layer.k_proj, key), layer.n_kv_heads))
    v = _heads(linear(layer.v_proj, value), layer.n_kv_heads)
    T, S = q.shape[2], k.shape[2]
    if layer.rope is not None:
        q = rotated(layer.rope, q, np.arange(S - T, S))
        k = rotated(layer.rope, k, np.arange(S))
    options = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    if layer.position_bias is not None:
        options["bias"] = position_bias(layer.position_bias, T, S)
    heads, weights, *_ = reference.attention(q, k, v, **options, need_weights=True)
    if layer.gate_proj is not None:
        gate = 1 / (1 + np.exp(-linear(layer.gate_proj, query)))
        heads = heads * gate.swapaxes(1, 2)[..., None]
    concat = heads.swapaxes(1, 2).reshape(*query.shape[:2], -1)
    return linear(layer.out_proj, concat), weights


class AttentionWith(HeadAttention):
    """The attention of a layer with options that `attend` has and our layer has not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, *qkv: Tensor, **options: Any) -> Any:
        return attend(*qkv, **options, **self.options)

    def rule(self, q: Tensor, **options: Any) -> AttentionRule:
        return replace(super().rule(q, **options), **self.options)


def rotated(rope: RoPE, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Each pair of features as a complex number, times a number on the unit circle."""
    first = np.arange(rope.width // 2)
    second = first + rope.width // 2
    angles = positions[:, None] * float(rope.base) ** (-2 * first / rope.width)
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out = x.copy()
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def position_bias(part: ALiBi, T: int, S: int) -> np.ndarray:
    """One query, one key and one head at a time."""
    bias = np.zeros((1, part.n_heads, T, S))
    for h, t, s in np.ndindex(part.n_heads, T, S):
        ahead = s - (t + S - T)
        bias[0, h, t, s] = -part.slopes()[h] * abs(ahead)
    return bias


def linear(module: nn.Linear, x: Tensor | np.ndarray) -> np.ndarray:
    out = np.asarray(x) @ array(module.weight).T
    return out if module.bias is None else out + array(module.bias)


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def close(ours: Tensor, theirs: np.ndarray, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(ours.detach(), torch.as_tensor(theirs), rtol=rtol, atol=atol)


def _normed(norm: nn.Module, x: np.ndarray) -> np.ndarray:
    if isinstance(norm, nn.Identity):
        return x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * array(norm.weight)


def _heads(x: np.ndarray, n_heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], n_heads, -1).swapaxes(1, 2)  # B H T D
