"""The definition of attention in NumPy: slow and obvious, the reference for all other paths.

`attention` computes one query at a time in float64, over exactly the keys that it may attend to.
`scaled_dot_product` is the formula as papers print it. The layer is built on that formula, once
as a loop over heads and once as a batched expression. Query head `h` reads kv head `h // G`.
"""

import copy
import math
from numbers import Integral
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Num
from numpy.typing import DTypeLike

from headwise._display import type_of
from headwise.errors import ArgumentError, MaskError, ShapeError

__all__ = [
    "AttentionOutput",
    "MultiHeadAttention",
    "attention",
    "multi_head_batched",
    "multi_head_loop",
    "scaled_dot_product",
    "single_head",
]

Mask = Bool[np.ndarray, "*mask"] | Float[np.ndarray, "*mask"]


def scaled_dot_product(
    q: Float[np.ndarray, "*B T D"],
    k: Float[np.ndarray, "*B S D"],
    v: Float[np.ndarray, "*B S Dv"],
    mask: Mask | None = None,
) -> tuple[Float[np.ndarray, "*B T Dv"], Float[np.ndarray, "*B T S"]]:
    """Compute softmax(q kᵀ / sqrt(D)) v and its weights in one expression, as papers print it.

    All leading axes are batch axes. A query that may attend to no key gets zeros. Unlike in
    `attention`, a NaN among masked values is multiplied by 0 and makes the result NaN.

    Raises:
        ShapeError: the mask does not broadcast to the weights `[*B, T, S]`.
        MaskError: the mask is neither boolean nor float.
    Source:
        Vaswani et al. 2017, eq. 1 (arXiv:1706.03762).
    """
    logits = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    added = _additive("scaled_dot_product: mask", mask, logits.shape)
    weights, _ = _softmax(logits + added)
    weights = weights.astype(logits.dtype)  # a mask in float64 does not change the type
    return weights @ v, weights


def _check_arrays(caller: str, **inputs: object) -> None:
    """Refuse tensors, lists and the like."""
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            raise ArgumentError(
                f"{caller}: {name} is {type_of(value)}, not a NumPy array. Give "
                f"np.asarray({name}), or {name}.detach().numpy() of a tensor."
            )


def _additive(argument: str, mask: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Convert any mask to the additive form: −inf where a query may not attend."""
    rule, mask = mask, np.zeros((1, 1)) if mask is None else np.asarray(mask)
    advice = "Give booleans (True = may attend) or floats (added to the logits)."
    if hasattr(rule, "dense"):  # of headwise.masks
        raise MaskError(
            f"{argument} of type {type(rule).__name__}. {advice[:-1]}; a rule of headwise.masks "
            f"becomes booleans by mask.dense(T, S)[0, 0].numpy()."
        )
    if mask.dtype.kind not in "bf":
        raise MaskError(f"{argument} of dtype {mask.dtype}. {advice}")
    if argument.endswith("mask") and mask.dtype.kind == "f" and {*mask.flat} == {0, 1}:
        advice = "Give mask.astype(bool) if 1 means may attend, or bias=mask to add the numbers."
        raise MaskError(f"{argument} of {mask.dtype}, {mask.shape}, holds only 0 and 1. {advice}")
    sizes = shape[-2:] if mask.ndim == 2 else shape
    pairs = zip(mask.shape, sizes, strict=False)
    if mask.ndim != len(sizes) or any(has not in (1, size) for has, size in pairs):
        advice = f"Give {shape[-2:]}, or {shape} with ones to broadcast."
        raise ShapeError(f"{argument} of shape {mask.shape} does not fit weights {shape}. {advice}")
    allowed = mask if mask.dtype.kind == "b" else mask > np.finfo(mask.dtype).min
    added = np.where(allowed, 0.0 if mask.dtype.kind == "b" else mask.astype(np.float64), -np.inf)
    return np.broadcast_to(added, shape)


def _softmax(logits: np.ndarray, sink: float = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    """The softmax along the last axis and its log-sum-exp."""
    top = np.maximum(logits.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(top == -np.inf, 0.0, top)  # a row without keys: zeros, not NaN
    exponentials = np.exp(logits - top)
    total = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return exponentials / np.where(total == 0, 1.0, total), lse[..., 0]


class AttentionOutput(NamedTuple):
    """The result of `attention` with `need_weights` or `need_lse`; fields not requested are None.

    Weights lie between 0 and 1, with T×S numbers per head; `lse` has the unit of logits.
    """

    out: Float[np.ndarray, "B H T Dv"]
    weights: Float[np.ndarray, "B H T S"] | None
    lse: Float[np.ndarray, "B H T"] | None


def attention(
    q: Num[np.ndarray, "B H T D"],
    k: Num[np.ndarray, "B Hkv S D"],
    v: Num[np.ndarray, "B Hkv S Dv"],
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    bias: Float[np.ndarray, "*bias"] | None = None,
    softcap: float | None = None,
    sinks: Float[np.ndarray, " H"] | None = None,
    need_weights: bool = False,
    need_lse: bool = False,
) -> Float[np.ndarray, "B H T Dv"] | AttentionOutput:
    """Average the values of the keys that each query may attend to, by softmax(scale · q·k).

    Logits are scaled, then capped, then bias and mask are added. Queries are aligned with the end
    of the keys: query i is at key position i + S - T. A query that may attend to no key gets zeros
    and an lse of −inf (with a sink, the sink's logit). Masked keys and values never affect the
    result, even if they are NaN. The result is computed in float64 and rounded once to the dtype
    of the input.

    Args:
        mask: True = may attend, or floats added to the logits (−inf or the dtype's most negative
            number: may not). `[T, S]`, or four axes with ones to broadcast.
        causal: Whether a query sees only its own position and earlier ones.
        window: The keys visible before and after the query's own; None is no limit.
        scale: The factor on q·k. None is 1 / sqrt(D).
        bias: Added to the logits after the cap, in the same forms as a mask.
        softcap: Logits z become c · tanh(z / c), between −c and c.
        sinks: One more logit per head, in the softmax denominator only.
    Returns:
        The heads, or an `AttentionOutput`. A row's weights sum to 1 (less with a sink).
    Raises:
        ShapeError: sizes do not fit, H is not a multiple of Hkv, or a mask does not broadcast.
        MaskError: a mask or bias is neither boolean nor float, or a float mask is all 0 and 1.
        ArgumentError: an input that is not an array, a scale not finite, a softcap not positive,
            or a negative side of the window.
    Source:
        Vaswani et al. 2017, eq. 1 (arXiv:1706.03762); Ainslie et al. 2023 (arXiv:2305.13245).
    """
    _check_arrays("attention", q=q, k=k, v=v)
    _check_sizes(q, k, v, sinks)
    _check_values(scale, softcap, window)
    (B, H, T, D), (Hkv, S), Dv = q.shape, k.shape[1:3], v.shape[3]
    factor = 1 / math.sqrt(D) if scale is None else scale
    added = _additive("attention: mask", mask, (B, H, T, S))
    added = added + _additive("attention: bias", bias, (B, H, T, S))
    visible = (added > -np.inf) & _visible(T, S, causal, window)
    out, weights, lse = np.zeros((B, H, T, Dv)), np.zeros((B, H, T, S)), np.zeros((B, H, T))
    kind = np.result_type(q, k, v, np.float16)  # integers become floats
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    for b, h, t in np.ndindex(B, H, T):
        visible_keys, kv = visible[b, h, t], h // (H // Hkv)
        logits = factor * (k[b, kv, visible_keys] @ q[b, h, t])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        logits = logits + added[b, h, t, visible_keys]
        row, lse[b, h, t] = _softmax(logits, -np.inf if sinks is None else float(sinks[h]))
        weights[b, h, t, visible_keys] = row
        out[b, h, t] = row @ v[b, kv, visible_keys]
    kept = weights.astype(kind) if need_weights else None
    full = AttentionOutput(out.astype(kind), kept, lse.astype(kind) if need_lse else None)
    return full if need_weights or need_lse else full.out


def _visible(
    T: int, S: int, causal: bool, window: tuple[int | None, int | None] | None
) -> np.ndarray:
    """The visible pairs under causality and window, with the last query at the last key."""
    ahead = np.arange(S) - (np.arange(T)[:, None] + S - T)
    n_before, n_after = window or (None, None)
    least = -np.inf if n_before is None else -n_before
    most = 0 if causal else np.inf if n_after is None else n_after
    return (least <= ahead) & (ahead <= most)


def _check_sizes(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[3] == k.shape[3]
    if not fits or q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            f"attention: {shapes} do not fit together. "
            f"Give q [B, H, T, D], k [B, Hkv, S, D] and v [B, Hkv, S, Dv]."
        )
    H, Hkv = q.shape[1], k.shape[1]
    if Hkv == 0 or H % Hkv:
        uneven = f"{H} query heads cannot share {Hkv} key/value heads evenly ({shapes})"
        raise ShapeError(f"attention: {uneven}. Make H a multiple of Hkv.")
    if sinks is not None and sinks.shape != (H,):
        raise ShapeError(f"attention: sinks {sinks.shape}. Give one logit for each of {H} heads.")


def _check_values(
    scale: float | None, softcap: float | None, window: tuple[int | None, int | None] | None
) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ArgumentError(f"attention: scale={scale}. Give a finite number, or None.")
    negative = any(side is not None and side < 0 for side in window or ())
    if negative or not (softcap is None or softcap > 0):
        raise ArgumentError(
            f"attention: softcap={softcap}, window={window}. "
            f"Give a positive softcap and no negative side, or None for no limit."
        )


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
    _check_arrays("MultiHeadAttention", x=x, memory=memory)
    fits = x.ndim in (2, 3) and x.shape[:-2] == memory.shape[:-2]
    if not fits or {x.shape[-1], memory.shape[-1]} != {layer.d_model}:
        raise ShapeError(
            f"MultiHeadAttention: x {x.shape} and memory {memory.shape} do not fit d_model "
            f"{layer.d_model}. Give [T, d_model] or [B, T, d_model], with the same B for both."
        )
    shape = (*x.shape[:-2], layer.n_heads, x.shape[-2], memory.shape[-2])
    added = _additive("MultiHeadAttention: mask", mask, shape)
    return x @ layer.W_Q, memory @ layer.W_K, memory @ layer.W_V, added
