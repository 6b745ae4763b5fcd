"""Which heads write for or against the right answer: sign flips over held-out examples.

NumPy alone: no model is needed, and every law can be tested by simulation.
"""

from math import erfc
from statistics import NormalDist

import numpy as np
from jaxtyping import Float64

FEWEST_EXAMPLES = 20
LEVEL = 0.05
_DRAWS = 4000
_CHUNK = 200  # sign flips computed at once
_POWER = 0.8  # the probability with which the smallest effect is found
_PROMISING = 1.0  # standard errors above 0, on the half that chooses
PerHead = Float64[np.ndarray, " N"]


def kinds_of(
    direct: Float64[np.ndarray, "M N"],
    of_others: Float64[np.ndarray, "M N"],
    by_chance: tuple[PerHead, PerHead],
    n_chosen: int,
    seed: int,
    *,
    screened: bool = True,
) -> tuple[PerHead, list[str], PerHead]:
    """The adjusted p of each head, whether it is a `writer`, a `canceller` or `none`, and the
    smallest mean effect that would have been found with a probability of .8.

    The first examples choose the direction of each head, and which heads are tested at all. The
    others test two null hypotheses, of which both have to be rejected: that the head writes as
    much for the answers of other examples, by sign flips; and that it writes what it would with
    its weights in another order.

    Args:
        direct: The direct effect of each head in each example.
        of_others: The effect that it has on the answers of other examples.
        by_chance: The mean and the deviation of its mean effect if its weights are permuted.
        n_chosen: How many examples choose.
        screened: Whether the first examples choose which heads are tested; otherwise all are.
    """
    gains = direct - of_others
    sign = np.where(gains[:n_chosen].mean(0) < 0, -1.0, 1.0)
    gains = sign * gains
    promising = (_t(gains[:n_chosen]) > _PROMISING) | (not screened)
    mean, deviation = by_chance
    away = sign * (direct[n_chosen:].mean(0) - mean)
    z = np.divide(away, deviation, out=np.zeros_like(away), where=deviation > 0)[promising]
    p = np.ones(len(sign))
    p[promising] = np.maximum(sign_flips(gains[n_chosen:][:, promising], seed), _holm(z))
    found = np.where(sign > 0, "writer", "canceller")
    smallest = _smallest(gains[n_chosen:], deviation, int(promising.sum()))
    return p, np.where(p < LEVEL, found, "none").tolist(), smallest


def _smallest(gains: Float64[np.ndarray, "M N"], deviation: PerHead, tests: int) -> PerHead:
    """The smallest mean gain that both nulls leave with probability `_POWER`, with Bonferroni's
    correction in the normal approximation; NaN where no flip of so few examples is significant."""
    n, spread = len(gains), gains.std(0, ddof=1)
    critical, power = (NormalDist().inv_cdf(x) for x in (1 - LEVEL / max(1, tests), _POWER))
    # Sign flips compare the mean with the root mean square, of which the mean is a part.
    of_flips = critical * spread / (n - critical**2) ** 0.5 if n > critical**2 else np.nan
    return np.maximum(of_flips, critical * deviation) + power * spread / n**0.5


def _t(gains: Float64[np.ndarray, "M N"]) -> PerHead:
    error = gains.std(0, ddof=1) / len(gains) ** 0.5
    return gains.mean(0) / np.maximum(error, 1e-12 + 1e-3 * np.abs(gains.mean(0)))


def _holm(z: PerHead) -> PerHead:
    """One-sided p of normal deviates, adjusted by Holm's method."""
    p = np.array([erfc(value / 2**0.5) / 2 for value in z])
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    left = len(p) - np.arange(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * left), 1.0)
    return adjusted


def sign_flips(gains: Float64[np.ndarray, "M N"], seed: int) -> PerHead:
    """Adjusted one-sided p that the mean gain of each column is above 0.

    Where the gains of a head are symmetric about 0, as when two answers are exchanged at random,
    every example could as well have the other sign. An adjusted p is the share of flips in
    which any column that is not more significant reaches as large a mean, in units of its own
    root mean square.

    Source: Westfall & Young 1993, algorithm 2.8 (step-down maxima).
    """
    size = np.sqrt(np.square(gains).sum(0))
    unit = np.divide(gains, size, out=np.zeros_like(gains), where=size > 0)
    observed = unit.sum(0)
    order = np.argsort(-observed, kind="stable")
    unit, reached = unit[:, order], np.ones(len(order))
    rng = np.random.default_rng(seed)
    for _ in range(_DRAWS // _CHUNK):
        flipped = rng.choice([-1.0, 1.0], (_CHUNK, len(unit))) @ unit
        # Stepping down: a column competes with those that are not more significant.
        largest = np.maximum.accumulate(flipped[:, ::-1], axis=1)[:, ::-1]
        reached += (largest >= observed[order] - 1e-9).sum(0)
    p = np.empty(len(order))
    p[order] = np.maximum.accumulate(reached / (_DRAWS + 1))
    return p
