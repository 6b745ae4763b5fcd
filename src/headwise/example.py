"""The worked example: multi-head attention of one query, in numbers to check by hand."""

from types import SimpleNamespace

import numpy as np

__all__ = ["worked_example"]

_TOKENS = ["The", "animal", "crossed", "the", "road", "because", "it", "was", "tired"]
# Two weights of each token, one for each head, and its value, which both heads use.
_OF_TOKENS = {
    "animal": ([0.70, 0.20], [0.8, 0.1, 0.0, 0.2]),
    "road": ([0.05, 0.05], [0.1, 0.7, 0.1, 0.0]),
    "because": ([0.10, 0.05], [0.2, 0.2, 0.6, 0.1]),
    "was": ([0.05, 0.15], [0.1, 0.1, 0.2, 0.8]),
    "tired": ([0.10, 0.55], [0.3, 0.6, 0.1, 0.2]),
}


def worked_example() -> SimpleNamespace:
    """Return what *it* attends to in two heads of width 4, with every later step.

    Returns:
        `tokens`, `query` (its position), `weights` [H, S], `values` [H, S, Dv], `heads` [H, Dv],
        `concat`, `out` (with the identity as `W_O`), `W_mix` and `out_mixed` (with `W_mix` as
        `W_O`, which gives head 1 plus head 2, then head 1 minus head 2).
    """
    rows = [_OF_TOKENS.get(token, ([0.0] * 2, [0.0] * 4)) for token in _TOKENS]
    weights = np.array([row[0] for row in rows]).T
    values = np.stack([np.array([row[1] for row in rows])] * 2)
    heads = np.einsum("hs,hsd->hd", weights, values)
    concat = heads.reshape(-1)
    W_mix = np.kron([[1.0, 1.0], [1.0, -1.0]], np.eye(4))
    return SimpleNamespace(
        tokens=tuple(_TOKENS), query=_TOKENS.index("it"), weights=weights, values=values,
        heads=heads, concat=concat, out=concat @ np.eye(8), W_mix=W_mix, out_mixed=concat @ W_mix,
    )  # fmt: skip
