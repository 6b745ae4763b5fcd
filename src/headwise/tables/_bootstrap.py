"""Intervals over texts, most of them by the bootstrap, which resamples whole texts.

Tokens of one text are not independent of each other, so the text is the unit.
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

DRAWS = 1000
TAILS = (0.025, 0.975)  # of an interval of 95 %
# The least error of a resample, as a share of that of all texts: its texts may be nearly alike, and
# then a lower one makes intervals wider without holding the truth more often.
_LEAST_ERROR = 0.25


def bootstrap_means(
    values: Float64[np.ndarray, "M N"], draws: int = DRAWS, seed: int = 0
) -> Float64[np.ndarray, "draws N"]:
    """The mean of each column over texts, for each of `draws` resamples of the texts.

    All columns share the resamples, so differences of columns keep what texts have in common.
    """
    # One product of matrices in place of a thousand gathered copies of the values.
    return (resample_counts(len(values), draws, seed) / len(values)) @ values


def mean_interval(
    values: Float64[np.ndarray, "M N"],
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """The bootstrap interval (95 %) of the mean of each column over texts."""
    low, high = np.quantile(bootstrap_means(values), TAILS, axis=0)
    return low, high


def ratio_interval(
    totals: Float[np.ndarray, "M N"],
    counts: Float[np.ndarray, "M N"],
    *,
    studentized: bool = False,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """The bootstrap interval of `Σ totals / Σ counts` in each column.

    NaN where fewer than two texts have a count above 0.

    Args:
        totals: The sum of each text.
        counts: The number of rows behind each sum.
        studentized: Whether each resample's distance from the ratio is divided by its own standard
            error. Where a few long texts decide, as in the mean distance, percentiles are too
            narrow, BCa is hardly better, and this holds the truth most often. No end then lies
            beyond the means of single texts.
        level: The coverage of the interval, between 0 and 1.
        draws: How many resamples of the texts are drawn.
        seed: The seed of the resamples. Equal seeds and numbers of texts give equal resamples.
    Source:
        Efron & Tibshirani 1993, section 12.5; the error of a ratio by linearization.
    """
    known = has_interval(counts)
    if not studentized:
        ratios = resampled_ratios(totals[:, known], counts[:, known], draws, seed)
        return interval_of(ratios, level, known)
    all_texts = np.ones((1, len(totals)))
    ratio, error = (row[0] for row in _ratios_and_errors(all_texts, totals, counts))
    resamples = resample_counts(len(totals), draws, seed).astype(np.float64)
    ratios, errors = _ratios_and_errors(resamples, totals, counts)
    errors = np.maximum(errors, _LEAST_ERROR * error)
    t = np.divide(ratios - ratio, errors, out=np.zeros_like(ratios), where=errors > 0)
    # High t leave a low end, and the reverse.
    ends = interval_of(np.where(np.isnan(ratios), np.nan, -t)[:, known], level, known)
    low, high = (ratio + end * error for end in ends)
    means = rate(totals, counts)
    least, most = np.fmin.reduce(means, axis=0), np.fmax.reduce(means, axis=0)
    return np.clip(low, np.fmin(least, ratio), ratio), np.clip(high, ratio, np.fmax(most, ratio))


def share_interval(
    totals: Float[np.ndarray, "M N"], counts: Float[np.ndarray, "M N"], level: float = 0.95
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """The interval of a share of rows, `Σ totals / Σ counts`, in each column.

    This is Wilson's interval for the number of independent rows that would have the standard error
    over texts; where that error is 0, for the number of texts, since rows that are too rare to be
    in the data cannot be resampled. NaN where fewer than two texts have a count above 0.

    Source:
        Wilson 1927; Dean & Pagano 2015, of clustered rows.
    """
    share, error = (row[0] for row in _ratios_and_errors(np.ones((1, len(totals))), totals, counts))
    texts = (counts > 0).sum(0)
    variance = share * (1 - share)
    rows = np.where(error > 0, rate(variance, error**2) * (texts - 1) / texts, texts)
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (share + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z * np.sqrt(variance / rows + (z / (2 * rows)) ** 2) / (1 + z**2 / rows)
    known = has_interval(counts)
    return np.where(known, middle - half, np.nan), np.where(known, middle + half, np.nan)


def _ratios_and_errors(
    resamples: Float64[np.ndarray, "draws M"],
    totals: Float64[np.ndarray, "M N"],
    counts: Float64[np.ndarray, "M N"],
) -> tuple[Float64[np.ndarray, "draws N"], Float64[np.ndarray, "draws N"]]:
    """The ratio of each resample, and its standard error by linearization."""
    count = resamples @ counts
    ratios = rate(resamples @ totals, count)
    squares = resamples @ totals**2 - 2 * ratios * (resamples @ (totals * counts))
    squares += ratios**2 * (resamples @ counts**2)
    return ratios, rate(np.sqrt(np.maximum(squares, 0.0)), count)


def resampled_ratios(
    totals: Float[np.ndarray, "M N"], counts: Float[np.ndarray, "M N"], draws: int, seed: int
) -> Float[np.ndarray, "draws N"]:
    """`Σ totals / Σ counts` of each column in each resample of the texts.

    NaN where a resample misses every text that has a count above 0.
    """
    resamples = resample_counts(len(totals), draws, seed).astype(totals.dtype)
    return rate(resamples @ totals, resamples @ counts)


def has_interval(counts: Float[np.ndarray, "M N"]) -> Bool[np.ndarray, " N"]:
    """Which columns have a count above 0 in at least two texts."""
    return (counts > 0).sum(0) > 1


def interval_of(
    drawn: Float[np.ndarray, "draws known"],
    level: float,
    known: Bool[np.ndarray, " N"],
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """The ends of the central interval of what was drawn; NaN for columns that are not known."""
    ends = np.full((2, len(known)), np.nan)
    if known.any():
        ends[:, known] = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return ends[0], ends[1]


def resample_counts(texts: int, draws: int, seed: int) -> Int64[np.ndarray, "draws M"]:
    """How often each resample, drawn with replacement, contains each text."""
    return np.random.default_rng(seed).multinomial(
        texts, np.full(texts, 1 / max(1, texts)), size=draws
    )


def rate(above: np.ndarray, below: np.ndarray, empty: float = np.nan) -> np.ndarray:
    """One over the other, in the precision of the first; `empty` where there is nothing below."""
    above, below = np.broadcast_arrays(above, below)
    out = np.full(above.shape, empty, dtype=np.result_type(above, np.float32))
    return np.divide(above, below, out=out, where=below > 0)


def halves(texts: int, seed: int | Sequence[int] = 0) -> Bool[np.ndarray, " M"]:
    """Draw the texts of the selection half at random; the others are held out for reporting."""
    selection = np.zeros(texts, dtype=bool)
    selection[np.random.default_rng(seed).permutation(texts)[: texts // 2]] = True
    return selection
