"""Statistical evidence for roles: intervals, baselines and one family of tests, over texts.

NumPy alone: no model is needed, and every law can be tested by simulation. The sampling unit is
the text, because the tokens of one text depend on each other: texts are resampled, texts get a
random sign, and texts are split into halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int64

from headwise.roles.relations import Role
from headwise.tables import ratio_interval

PerText = Float[np.ndarray, "M N"]
Column = Float[np.ndarray, " N"]

FEWEST_TEXTS, FEWEST_INSTANCES = 30, 20
_CHUNK = 250  # sign flips computed at once


@dataclass(frozen=True)
class Family:
    """Sums of `M` texts for `N` hypotheses: that a head has a role, for every role and head.

    Attributes:
        value: The sum of the score over the queries of a text.
        count: The number of those queries.
        nulls: For each null (a baseline that involves no knowledge), its sums over the same
            queries; NaN where it does not apply.
        roles: The roles. The columns of the first role come first, one for each head.
        null_names: For each null, its name for each role: `offset -1`, say.
        measures: Further columns of the table: `chosen_half`, `mass` and `value`.
    """

    value: PerText
    count: PerText
    nulls: Mapping[str, PerText]
    roles: tuple[Role, ...] = ()
    null_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measures: Mapping[str, Column] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The result of testing each hypothesis on held-out texts; NaN where there is no data.

    Attributes:
        effect: The score per query.
        low: The lower end of its interval (95 %, bootstrap over texts).
        high: The upper end.
        rates: What each null scores per query.
        null: The strongest null, as a row of `rates`; −1 where none applies.
        baseline: What the strongest null scores.
        lift: The share of the remaining range, `(effect − baseline) / (1 − baseline)`.
        n: The number of queries.
        texts: The number of texts with at least one query.
        p: Adjusted for the whole family; NaN for too few queries or texts.
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
    """Draw the texts of the selection half at random; the others are held out for reporting."""
    selection = np.zeros(texts, dtype=bool)
    selection[np.random.default_rng(seed).permutation(texts)[: texts // 2]] = True
    return selection


def best_of(
    value: Float[np.ndarray, "M R K"], count: Float[np.ndarray, "M R"]
) -> Int64[np.ndarray, " R"]:
    """Which of `K` candidates scores best on each role; `count` holds the queries per text."""
    total = value.sum(0)
    queries = np.broadcast_to(count.sum(0)[:, None], total.shape)
    return np.nan_to_num(_divide(total, queries), nan=-1.0).argmax(-1)


def judge(
    families: Sequence[Family], *, flips: int = 4000, draws: int = 1000, seed: int = 0
) -> list[Verdict]:
    """Test all hypotheses together, so that p is adjusted over all of them.

    Args:
        families: The hypotheses of one family share their texts; those of two families do not.
        flips: Number of random sign flips; no adjusted p lies below `1 / (flips + 1)`.
        draws: Bootstrap draws for the intervals.
    Source:
        Westfall & Young 1993, the step-down procedure's first step (max-T).
    """
    nulls = [_strongest_null(family) for family in families]
    tested = [_enough_data(family) for family in families]
    gains = [
        (family.value - null_sums)[:, keep]
        for family, (_, _, null_sums), keep in zip(families, nulls, tested, strict=True)
    ]
    adjusted = max_t(gains, flips=flips, seed=seed)
    verdicts = []
    for family, null, keep, p_tested in zip(families, nulls, tested, adjusted, strict=True):
        p = np.full(len(keep), np.nan)
        p[keep] = p_tested
        ends = ratio_interval(family.value, family.count, draws=draws, seed=seed)
        verdicts.append(_verdict(family, null[:2], p, ends))
    return verdicts


def max_t(
    gains: Sequence[Float[np.ndarray, "_ _"]], *, flips: int = 4000, seed: int = 0
) -> list[Float[np.ndarray, " _"]]:
    """Adjusted one-sided p of the sums of gains, by flipping the signs of whole texts.

    The statistic `T = ΣD / √ΣD²` of each column is compared with the largest T of any column
    under random signs; all columns of a text get the same sign. A column of zeros has T = 0. If
    all gains are symmetric about 0 or lie below it, the probability that any adjusted p is at
    most α is at most α, over all columns together.

    Args:
        gains: What each text gains over its null; the columns of one array share their texts.
    Source:
        Westfall & Young 1993.
    """
    scaled = [_scaled(gain) for gain in gains]
    observed = [gain.sum(0) for gain in scaled]
    rng = np.random.default_rng(seed)
    exceedances = [np.ones(len(t)) for t in observed]
    for start in range(0, flips, _CHUNK):
        size = min(_CHUNK, flips - start)
        largest = np.full(size, -np.inf, dtype=np.float32)
        for gain in scaled:
            signs = rng.integers(0, 2, (size, len(gain))).astype(np.float32) * 2 - 1
            if gain.size:
                largest = np.maximum(largest, (signs @ gain).max(1))
        # Slightly lower, so that a flip that restores all signs ties despite rounding.
        ordered = np.sort(largest)
        for t, count in zip(observed, exceedances, strict=True):
            count += size - np.searchsorted(ordered, t - 1e-4)
    return [count / (flips + 1) for count in exceedances]


def lift(effect: Column, baseline: Column) -> Column:
    """The share of the range above the baseline that is reached; NaN for a baseline of 1."""
    return _divide(effect - baseline, 1 - baseline)


def _scaled(gain: PerText) -> PerText:
    """Divide columns by their length, so that their sums are T."""
    length = np.sqrt((gain.astype(np.float64) ** 2).sum(0))
    return _divide(gain, np.broadcast_to(length, gain.shape), empty=0.0).astype(np.float32)


def _strongest_null(
    family: Family,
) -> tuple[Float[np.ndarray, "K N"], Int64[np.ndarray, " N"], PerText]:
    """The rate of each null, which is the strongest (−1: none), and its sums in each text."""
    n = family.count.sum(0, dtype=np.float64)
    sums = np.stack(list(family.nulls.values()))
    rates = _divide(sums.sum(1, dtype=np.float64), np.broadcast_to(n, (len(sums), len(n))))
    strongest = np.nan_to_num(rates, nan=-1.0).argmax(0)
    columns = np.arange(len(n))
    applies = ~np.isnan(rates[strongest, columns])
    strongest_sums = np.nan_to_num(sums[strongest, :, columns].T)
    return rates, np.where(applies, strongest, -1), strongest_sums


def _enough_data(family: Family) -> Bool[np.ndarray, " N"]:
    texts = (family.count > 0).sum(0)
    return (texts >= FEWEST_TEXTS) & (family.count.sum(0) >= FEWEST_INSTANCES)


def _verdict(
    family: Family,
    null: tuple[Float[np.ndarray, "K N"], Int64[np.ndarray, " N"]],
    p: Column,
    ends: tuple[Column, Column],
) -> Verdict:
    rates, strongest = null
    n = family.count.sum(0, dtype=np.float64)
    effect = _divide(family.value.sum(0, dtype=np.float64), n)
    baseline = np.where(strongest < 0, np.nan, rates[strongest, np.arange(len(n))])
    return Verdict(
        effect=effect,
        low=ends[0],
        high=ends[1],
        rates=rates,
        null=strongest,
        baseline=baseline,
        lift=lift(effect, baseline),
        n=n,
        texts=(family.count > 0).sum(0).astype(np.float64),
        p=p,
    )


def _divide(
    above: Float[np.ndarray, "*shape"], below: Float[np.ndarray, "*shape"], empty: float = np.nan
) -> Float[np.ndarray, "*shape"]:
    out = np.full(above.shape, empty, dtype=np.result_type(above, np.float32))
    return np.divide(above, below, out=out, where=below > 0)
