"""Attention by definition: one query at a time, over exactly the keys that it may attend to."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Num

from headwise.errors import ArgumentError, ShapeError
from headwise.reference._formula import Mask, additive, check_arrays, softmax


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
    check_arrays("attention", q=q, k=k, v=v)
    _check_sizes(q, k, v, sinks)
    _check_values(scale, softcap, window)
    (B, H, T, D), (Hkv, S), Dv = q.shape, k.shape[1:3], v.shape[3]
    factor = 1 / math.sqrt(D) if scale is None else scale
    added = additive("attention: mask", mask, (B, H, T, S))
    added = added + additive("attention: bias", bias, (B, H, T, S))
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
        row, lse[b, h, t] = softmax(logits, -np.inf if sinks is None else float(sinks[h]))
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
