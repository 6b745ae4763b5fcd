"""The formula of attention as papers print it, and its parts: the softmax and additive masks."""

import math

import numpy as np
from jaxtyping import Bool, Float

from headwise.errors import ArgumentError, MaskError, ShapeError

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
    added = additive("scaled_dot_product: mask", mask, logits.shape)
    weights, _ = softmax(logits + added)
    weights = weights.astype(logits.dtype)  # a mask in float64 does not change the type
    return weights @ v, weights


def check_arrays(caller: str, **inputs: object) -> None:
    """Refuse tensors, lists and the like.

    Raises:
        ArgumentError: an input is not a NumPy array.
    """
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            raise ArgumentError(
                f"{caller}: {name} is a {type(value).__name__}, not a NumPy array. Give "
                f"np.asarray({name}), or {name}.detach().numpy() of a tensor."
            )


def additive(argument: str, mask: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
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


def softmax(logits: np.ndarray, sink: float = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    """The softmax along the last axis and its log-sum-exp."""
    top = np.maximum(logits.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(top == -np.inf, 0.0, top)  # a row without keys: zeros, not NaN
    exponentials = np.exp(logits - top)
    total = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return exponentials / np.where(total == 0, 1.0, total), lse[..., 0]
