"""The layer that courses define: four matrices, once as a loop over heads, once batched."""

import copy
import math
from numbers import Integral

import numpy as np
from jaxtyping import Float, Num
from numpy.typing import DTypeLike

from headwise.errors import ArgumentError, ShapeError
from headwise.reference._formula import Mask, additive, check_arrays, scaled_dot_product

Rows = Num[np.ndarray, "*B T d_model"]
Memory = Num[np.ndarray, "*B S d_model"]
Out = Float[np.ndarray, "*B T d_model"]
Weights = Float[np.ndarray, "*B H T S"]


class MultiHeadAttention:
    """A seeded layer with four d_model × d_model matrices, without biases, used as `x @ W`.

    Head h owns columns h · d_head to (h + 1) · d_head of `W_Q`, `W_K` and `W_V`, and the
    same rows of `W_O`. Entries are drawn from a normal distribution in the order Q, K, V, O and
    scaled by 1 / sqrt(d_model), in float32.

    Raises:
        ArgumentError: a size is not a whole number.
        ShapeError: d_model cannot be divided evenly among the heads.
    """

    def __init__(self, d_model: int, n_heads: int, seed: int = 0) -> None:
        sizes: dict[str, object] = {"d_model": d_model, "n_heads": n_heads}
        for name, size in sizes.items():
            if not isinstance(size, Integral):
                raise ArgumentError(
                    f"MultiHeadAttention: {name}={size!r}. Give a positive whole number."
                )
        if d_model < 1 or n_heads < 1 or d_model % n_heads:
            raise ShapeError(
                f"MultiHeadAttention: d_model {d_model} cannot be divided evenly among "
                f"n_heads {n_heads}. Make d_model a multiple of n_heads."
            )
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_model // n_heads
        shrink = np.float32(1 / math.sqrt(d_model))
        normal = np.random.default_rng(seed).standard_normal
        self.W_O: np.ndarray | None  # None only where `single_head` leaves it out
        self.W_Q, self.W_K, self.W_V, self.W_O = (
            normal((d_model, d_model)).astype(np.float32) * shrink for _ in "QKVO"
        )

    def astype(self, dtype: DTypeLike) -> "MultiHeadAttention":
        """Return a layer with the same weights in another dtype, such as float64."""
        layer = copy.copy(self)
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            if (matrix := getattr(self, name)) is not None:
                setattr(layer, name, matrix.astype(dtype))
        return layer

    def forward(
        self,
        x: Rows,
        mask: Mask | None = None,
        *,
        memory: Memory | None = None,
        need_weights: bool = False,
    ) -> Out | tuple[Out, Weights]:
        """Attend from `x` to itself, or to `memory`. With `need_weights`, return the weights too.

        Arguments, results and errors are those of `multi_head_batched`.
        """
        out, weights = multi_head_batched(self, x, mask, memory)
        return (out, weights) if need_weights else out

    __call__ = forward


def multi_head_batched(
    layer: MultiHeadAttention, x: Rows, mask: Mask | None = None, memory: Memory | None = None
) -> tuple[Out, Weights]:
    """Compute all heads of a layer at once, with heads as one more batch axis.

    Args:
        mask: True = may attend, or floats added to the logits: `[T, S]` for every head, or
            all axes of the weights, such as `[B, 1, T, S]`.
        memory: The input of keys and values, for cross-attention. None is `x` itself.
    Returns:
        The output, and the weights of every head (T×S numbers between 0 and 1, never averaged).
    Raises:
        ArgumentError: x or memory is not a NumPy array.
        ShapeError: x, memory or mask do not fit the layer or each other.
        MaskError: the mask is neither boolean nor float.
    Source:
        Vaswani et al. 2017, section 3.2.2 (arXiv:1706.03762).
    """
    q, k, v, full_mask = _project(layer, x, mask, memory)
    q, k, v = (
        rows.reshape(*rows.shape[:-1], layer.n_heads, layer.d_head).swapaxes(-2, -3)
        for rows in (q, k, v)
    )  # *B H T D
    heads, weights = scaled_dot_product(q, k, v, full_mask)
    concat = heads.swapaxes(-2, -3).reshape(x.shape)  # *B T d_model
    return _mixed(concat, layer), weights


def multi_head_loop(
    layer: MultiHeadAttention, x: Rows, mask: Mask | None = None, memory: Memory | None = None
) -> tuple[Out, Weights]:
    """Compute one head after the other, concatenate them, and multiply by `W_O`.

    Equal to `multi_head_batched` up to rounding, with the same arguments, results and errors.
    """
    q, k, v, full_mask = _project(layer, x, mask, memory)
    heads, weights = [], []
    for h in range(layer.n_heads):
        columns = slice(h * layer.d_head, (h + 1) * layer.d_head)
        head = scaled_dot_product(
            q[..., columns], k[..., columns], v[..., columns], full_mask[..., h, :, :]
        )
        heads.append(head[0])
        weights.append(head[1])
    return _mixed(np.concatenate(heads, axis=-1), layer), np.stack(weights, axis=-3)


def single_head(d_model: int, seed: int = 0, *, out_proj: bool = True) -> MultiHeadAttention:
    """Make the layer with one head of full width, for comparison.

    It has the same matrices as any layer of that width and seed, but computes one distribution
    over the keys per query instead of one per head.

    Args:
        out_proj: Whether there is a `W_O`. Without it, `W_V @ W_O` takes the place of `W_V`, so
            that three matrices compute what the four do: 3 · d_model² parameters, not 4 · d_model².
    """
    layer = MultiHeadAttention(d_model, 1, seed)
    if not out_proj and layer.W_O is not None:
        layer.W_V, layer.W_O = layer.W_V @ layer.W_O, None
    return layer


def _mixed(concat: np.ndarray, layer: MultiHeadAttention) -> np.ndarray:
    return concat if layer.W_O is None else concat @ layer.W_O


def _project(
    layer: MultiHeadAttention, x: Rows, mask: Mask | None, memory: Memory | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of all heads, concatenated, and the mask of every head."""
    memory = x if memory is None else memory
    check_arrays("MultiHeadAttention", x=x, memory=memory)
    fits = x.ndim in (2, 3) and x.shape[:-2] == memory.shape[:-2]
    if not fits or {x.shape[-1], memory.shape[-1]} != {layer.d_model}:
        raise ShapeError(
            f"MultiHeadAttention: x {x.shape} and memory {memory.shape} do not fit d_model "
            f"{layer.d_model}. Give [T, d_model] or [B, T, d_model], with the same B for both."
        )
    shape = (*x.shape[:-2], layer.n_heads, x.shape[-2], memory.shape[-2])
    added = additive("MultiHeadAttention: mask", mask, shape)
    return x @ layer.W_Q, memory @ layer.W_K, memory @ layer.W_V, added
