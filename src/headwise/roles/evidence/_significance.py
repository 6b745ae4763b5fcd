"""Adjusted p for many hypotheses at once: a studentized bootstrap over texts, stepping down.

No symmetry is assumed. Flipping the signs of texts, the usual alternative, assumes that gains are
symmetric about 0 and rejects far too often where a head rarely loses much and often gains little.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int64

PerText = Float[np.ndarray, "_ _"]
Column = Float[np.ndarray, " _"]
Resampled = Float[np.ndarray, "_ _"]

_CHUNK = 100  # resamples computed at once
_LEAST_VARIANCE = 0.02  # of a resample, as a share of the variance of all texts
_LEAST_DEVIATION = 1e-3  # of a column, as a share of its mean: equal gains have no deviation
_TAIL = 250  # of the largest maxima, by which the tail is fitted
_LEAST_TAIL = 1e-12  # beyond that a fitted tail says nothing
_FEWEST_BEYOND = 10  # maxima that a share needs; with fewer the tail is used


def step_down(
    gains: Sequence[PerText],
    worst: Sequence[Column] | None = None,
    *,
    draws: int = 4000,
    seed: int = 0,
) -> list[Column]:
    """Adjusted one-sided p that the mean gain of each column is above 0.

    The statistic is Student's t of the gains of texts. Whole texts are resampled with
    replacement, each resample has a t about the observed mean, with its own deviation, and an
    adjusted p is the share of resamples in which any column that is not more significant
    reaches as large a t. Where fewer than ten do, a generalized Pareto distribution fitted to
    the 250 largest maxima continues the shares; its tail is never taken to be bounded, so p
    is never 0 and ranks columns, down to 1e-12 of the tail. A column of zeros has t = 0.

    Args:
        gains: What each text gains over its null; the columns of one array share their texts,
            those of two arrays do not.
        worst: The least possible gain of a text in each column. One imaginary text with that
            gain is added to the observed ones, since losses too rare to be observed cannot be
            resampled. None adds no text.
        draws: The number of resamples.
    Source:
        Romano & Wolf 2005, algorithm 4.2; Knijnenburg et al. 2009 for the tail.
    """
    imagined: Sequence[Column | None] = [None] * len(gains) if worst is None else worst
    observed = [_observed_t(*pair) for pair in zip(gains, imagined, strict=True)]
    t = np.concatenate([np.zeros(0, np.float32), *observed])
    if not t.size:
        return observed
    order = np.argsort(-t, kind="stable")
    beyond = np.zeros(len(t), dtype=np.int64)
    maxima: list[Column] = []
    for resampled in _resampled_t(gains, draws, seed):
        # Stepping down: a column competes with those that are not more significant, since the
        # others are rejected before it. All columns as rivals of each would be valid, but weaker.
        largest = np.maximum.accumulate(resampled[:, order[::-1]], axis=1)[:, ::-1]
        # t is in float32, so equal values may differ by rounding.
        beyond += (largest >= t[order] - 1e-4).sum(0)
        maxima.append(largest[:, 0])
    adjusted = np.empty(len(t))
    adjusted[order] = np.maximum.accumulate(_shares(t[order], beyond, np.concatenate(maxima)))
    ends = np.cumsum([gain.shape[1] for gain in gains])[:-1]
    return np.split(adjusted, ends)


def _observed_t(gain: PerText, worst: Column | None) -> Column:
    """Student's t of each column, with the imaginary text counted if there is one."""
    texts = len(gain)
    mean, squares = gain.mean(0, dtype=np.float64), np.square(gain, dtype=np.float64).mean(0)
    if worst is not None:
        mean = (texts * mean + worst) / (texts + 1)
        squares = (texts * squares + worst**2) / (texts + 1)
    deviation = np.sqrt(np.clip(squares - mean**2, (_LEAST_DEVIATION * mean) ** 2, None))
    t = np.sqrt(texts) * mean
    return np.divide(t, deviation, out=np.zeros_like(t), where=deviation > 0).astype(np.float32)


def _resampled_t(gains: Sequence[PerText], draws: int, seed: int) -> Iterator[Resampled]:
    """The t of every column in each resample, about the observed mean, some resamples at once."""
    rng = np.random.default_rng(seed)
    centered = [(gain - gain.mean(0, dtype=np.float64)).astype(np.float32) for gain in gains]
    squares = [np.square(gain) for gain in centered]
    # Equal gains differ from their mean by rounding alone, whose t could be any number.
    floors = [
        np.maximum(_LEAST_VARIANCE * square.mean(0), (_LEAST_DEVIATION * gain.mean(0)) ** 2)
        for gain, square in zip(gains, squares, strict=True)
    ]
    for start in range(0, draws, _CHUNK):
        size = min(_CHUNK, draws - start)
        columns = []
        for gain, square, floor in zip(centered, squares, floors, strict=True):
            texts = len(gain)
            chosen = rng.multinomial(texts, np.full(texts, 1 / texts), size).astype(np.float32)
            mean = chosen @ gain / texts
            deviation = np.sqrt(np.maximum(chosen @ square / texts - mean**2, floor))
            t = np.zeros_like(mean)
            columns.append(np.divide(np.sqrt(texts) * mean, deviation, out=t, where=deviation > 0))
        yield np.concatenate(columns, axis=1)


def _shares(t: Column, beyond: Int64[np.ndarray, " _"], maxima: Column) -> Column:
    """The share of resamples beyond each t: counted where many are, else from the fitted tail."""
    counted = (beyond + 1) / (len(maxima) + 1)
    few = beyond < _FEWEST_BEYOND
    if len(maxima) < 2 * _TAIL or not few.any():
        return counted
    counted[few] = np.minimum(tail_shares(t[few], maxima), _FEWEST_BEYOND / len(maxima))
    return counted


def tail_shares(t: Column, maxima: Column) -> Column:
    """The share of maxima beyond each `t`, by a generalized Pareto distribution.

    Fitted by probability-weighted moments to the 250 largest maxima; a shape below 0, whose
    tail would end, is taken as 0 (an exponential tail).

    Source: Hosking & Wallis 1987, section 4; Knijnenburg et al. 2009.
    """
    ordered = np.sort(maxima)[::-1].astype(np.float64)
    start = ordered[_TAIL]
    excess = ordered[:_TAIL] - start
    mean = max(excess.mean(), 1e-12)
    # E[X · P(exceeding X)]: the largest excess comes first and has the least weight.
    weighted = max((excess * (np.arange(_TAIL) + 0.35) / _TAIL).mean(), 1e-12)
    shape = 2 - mean / max(mean - 2 * weighted, 1e-12)
    # Below 0 the tail would end, and a p of 0 would claim what no resample shows; from 1 on its
    # mean, which the fit uses, would not exist.
    shape = float(np.clip(shape, 0.0, 0.9))
    scale = mean * (1 - shape)
    further = np.clip(t - start, 0.0, None) / scale
    tail = np.exp(-further) if shape < 1e-6 else (1 + shape * further) ** (-1 / shape)
    return _TAIL / len(maxima) * np.maximum(tail, _LEAST_TAIL)
