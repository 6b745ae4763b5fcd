"""The layer by its definition, with the weights of a module copied into NumPy."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise import reference
from headwise.layer import ALiBi, MultiHeadAttention, RoPE

Arrays = tuple[np.ndarray, np.ndarray]


def by_definition(
    layer: MultiHeadAttention, query: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, **options: Any,
) -> Arrays:  # fmt: skip
    """The output and the weights of a layer, one head and one query at a time."""
    output = _attention(layer, query, key, value, **options)
    heads = output.out
    if layer.gate_proj is not None:
        gate = 1 / (1 + np.exp(-linear(layer.gate_proj, query)))
        heads = heads * gate.swapaxes(1, 2)[..., None]
    concat = heads.swapaxes(1, 2).reshape(*query.shape[:2], -1)
    mixes = isinstance(layer.out_proj, nn.Linear)
    return linear(layer.out_proj, concat) if mixes else concat, output.weights


def by_definition_with_lse(layer: MultiHeadAttention, *inputs: Tensor, **options: Any) -> Arrays:
    """The log-sum-exps and the weights of a layer."""
    output = _attention(layer, *inputs, **options)
    return output.lse, output.weights


def _attention(
    layer: MultiHeadAttention, query: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, **options: Any,
) -> reference.AttentionOutput:  # fmt: skip
    key = query if key is None else key
    value = key if value is None else value
    q = _normed(layer.q_norm, _heads(linear(layer.q_proj, query), layer.n_heads))
    k = _normed(layer.k_norm, _heads(linear(layer.k_proj, key), layer.n_kv_heads))
    v = _heads(linear(layer.v_proj, value), layer.n_kv_heads)
    T, S = q.shape[2], k.shape[2]
    if layer.rope is not None:
        q = turned(layer.rope, q, np.arange(S - T, S))
        k = turned(layer.rope, k, np.arange(S))
    options = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    core = layer.attention
    options |= {"scale": core.scale, "softcap": core.softcap, "window": core.window}
    if core.sinks is not None:
        options["sinks"] = np.broadcast_to(
            array(torch.as_tensor(core.sinks, dtype=torch.float64)), layer.n_heads
        )
    if layer.position_bias is not None:
        options["bias"] = position_bias(layer.position_bias, T, S)
    return reference.attention(q, k, v, **options, need_weights=True, need_lse=True)


def turned(rope: RoPE, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Each pair of features as a complex number, times a number on the unit circle."""
    n_pairs = rope.width // 2
    first = np.arange(n_pairs) * (1 if rope.pairing == "half" else 2)
    second = first + (n_pairs if rope.pairing == "half" else 1)
    frequencies = array(rope.frequencies(torch.float64))
    angles = positions[:, None] * frequencies
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
