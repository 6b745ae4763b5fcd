"""Whether a score would stand up: intervals, nulls, and one family of tests, over texts.

NumPy alone: no model is needed, and every law here can be tested by simulation. The unit is
the text: tokens of one text are not independent of each other, so texts are drawn, texts are
flipped, and texts are split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

from headwise.tables import ratio_interval

PerText = Float[np.ndarray, "M N"]
Column = Float[np.ndarray, " N"]

FEWEST_TEXTS, FEWEST_INSTANCES = 30, 20
_CHUNK = 250  # flips at once


@dataclass(frozen=True)
class Scored:
    """Sums of `M` texts for `N` questions (a head and a role each), and what nulls would score.

    Attributes:
        value: The sum of the score over the queries of a text.
        count: How many queries those are.
        nulls: The same sums for each null, over the same queries; NaN where it does not apply.
    """

    value: PerText
    count: PerText
    nulls: Mapping[str, PerText]


@dataclass(frozen=True)
class Verdict:
    """What held-out texts say about each question; NaN where they say nothing.

    Attributes:
        effect: The score per query.
        low: Where its interval begins (95 %, texts drawn with replacement).
        high: Where it ends.
        rates: What each null scores per query.
        null: The strongest null, as a row of `rates`; −1 where none applies.
        baseline: What the strongest null scores.
        lift: The share of what the null leaves open, `(effect − baseline) / (1 − baseline)`.
        n: Queries.
        texts: Texts with at least one.
        p: Adjusted for the whole family; NaN for a question with too few queries or texts.
    """

    effect: Column
    low: Column
    high: Column
    rates: Float[np.ndarray, "K N"]
    null: Int64[np.ndarray, " N"]
    baseline: Column
    lift: Column
    n: Column
    texts: Column
    p: Column


def halves(texts: int, seed: int = 0) -> Bool[np.ndarray, " M"]:
    """Which texts are for choosing; the others are for reporting. Drawn at random."""
    chosen = np.zeros(texts, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(texts)[: texts // 2]] = True
    return chosen


def best_of(
    value: Float[np.ndarray, "M R K"], count: Float[np.ndarray, "M R"]
) -> Int64[np.ndarray, " R"]:
    """Which of `K` rules scores best on each role; `count` is the queries of each text and role."""
    total = value.sum(0)
    asked = np.broadcast_to(count.sum(0)[:, None], total.shape)
    return np.nan_to_num(_divide(total, asked), nan=-1.0).argmax(-1)


def judge(
    families: Sequence[Scored], *, flips: int = 4000, draws: int = 1000, seed: int = 0
) -> list[Verdict]:
    """Judge all questions as one family, whichever texts they were asked of.

    Args:
        families: Questions that share their texts; questions of different families don't.
        flips: Sign flips; no adjusted p lies below `1 / (flips + 1)`.
        draws: Texts drawn with replacement for the intervals.
    Source:
        Westfall & Young 1993, the step-down procedure's first step (max-T).
    """
    against = [_strongest(scored) for scored in families]
    asked = [_enough(scored) for scored in families]
    gains = [
        (scored.value - null.sums)[:, keep]
        for scored, null, keep in zip(families, against, asked, strict=True)
    ]
    adjusted = max_t(gains, flips=flips, seed=seed)
    verdicts = []
    for scored, null, keep, p_kept in zip(families, against, asked, adjusted, strict=True):
        p = np.full(len(keep), np.nan)
        p[keep] = p_kept
        ends = ratio_interval(scored.value, scored.count, draws=draws, seed=seed)
        verdicts.append(_verdict(scored, null, p, ends))
    return verdicts


def max_t(
    gains: Sequence[Float[np.ndarray, "_ _"]], *, flips: int = 4000, seed: int = 0
) -> list[Float[np.ndarray, " _"]]:
    """Adjusted p of the sums of gains, one-sided, by flipping the signs of whole texts.

    `T = ΣD / √ΣD²` of each column is held against the largest T of any column under random
    signs, the same signs for all columns of a text. A column of zeros has T = 0. Under the
    null that gains are symmetric about 0, or lie below it, some adjusted p is at most α with a
    probability of at most α, over all columns together.

    Args:
        gains: What each text gains over its null; the columns of one array share their texts.
    Source:
        Westfall & Young 1993.
    """
    scaled = [_scaled(gain) for gain in gains]
    observed = [one.sum(0) for one in scaled]
    rng = np.random.default_rng(seed)
    reached = [np.ones(len(t)) for t in observed]
    for start in range(0, flips, _CHUNK):
        size = min(_CHUNK, flips - start)
        largest = np.full(size, -np.inf, dtype=np.float32)
        for one in scaled:
            signs = rng.integers(0, 2, (size, len(one))).astype(np.float32) * 2 - 1
            if one.size:
                largest = np.maximum(largest, (signs @ one).max(1))
        # A hair lower, so that a flip that gives back the same signs ties, whatever the rounding.
        ordered = np.sort(largest)
        for t, count in zip(observed, reached, strict=True):
            count += size - np.searchsorted(ordered, t - 1e-4)
    return [count / (flips + 1) for count in reached]


def lift(effect: Column, baseline: Column) -> Column:
    """The share of what the null leaves open; NaN where it leaves nothing open."""
    return _divide(effect - baseline, 1 - baseline)


def _scaled(gain: PerText) -> PerText:
    """Columns divided by their length, so that their sums are T."""
    length = np.sqrt((gain.astype(np.float64) ** 2).sum(0))
    return _divide(gain, np.broadcast_to(length, gain.shape), empty=0.0).astype(np.float32)


@dataclass(frozen=True)
class _Null:
    """What each null scores, which is the strongest, and its sums in each text."""

    rates: Float[np.ndarray, "K N"]
    strongest: Int64[np.ndarray, " N"]
    sums: PerText


def _strongest(scored: Scored) -> _Null:
    n = scored.count.sum(0, dtype=np.float64)
    sums = np.stack(list(scored.nulls.values()))
    rates = _divide(sums.sum(1, dtype=np.float64), np.broadcast_to(n, (len(sums), len(n))))
    strongest = np.nan_to_num(rates, nan=-1.0).argmax(0)
    columns = np.arange(len(n))
    applies = ~np.isnan(rates[strongest, columns])
    chosen = np.nan_to_num(sums[strongest, :, columns].T)
    return _Null(rates, np.where(applies, strongest, -1), chosen)


def _enough(scored: Scored) -> Bool[np.ndarray, " N"]:
    texts = (scored.count > 0).sum(0)
    return (texts >= FEWEST_TEXTS) & (scored.count.sum(0) >= FEWEST_INSTANCES)


def _verdict(scored: Scored, null: _Null, p: Column, ends: tuple[Column, Column]) -> Verdict:
    n = scored.count.sum(0, dtype=np.float64)
    effect = _divide(scored.value.sum(0, dtype=np.float64), n)
    best = null.rates[null.strongest, np.arange(len(n))]
    baseline = np.where(null.strongest < 0, np.nan, best)
    return Verdict(
        effect=effect,
        low=ends[0],
        high=ends[1],
        rates=null.rates,
        null=null.strongest,
        baseline=baseline,
        lift=lift(effect, baseline),
        n=n,
        texts=(scored.count > 0).sum(0).astype(np.float64),
        p=p,
    )


def _divide(
    above: Float[np.ndarray, "*shape"], below: Float[np.ndarray, "*shape"], empty: float = np.nan
) -> Float[np.ndarray, "*shape"]:
    out = np.full(above.shape, empty, dtype=np.result_type(above, np.float32))
    return np.divide(above, below, out=out, where=below > 0)
