"""The differences of two tables of sums per text: paired intervals and one family of tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from headwise.roles import FEWEST_TEXTS, step_down
from headwise.tables import TextSums

Column = Float64[np.ndarray, " N"]
PerText = Float64[np.ndarray, "M N"]


class HeadDifferences(NamedTuple):
    """The differences of one statistic, for `N` heads."""

    before: Column  # the mean
    after: Column
    difference: Column  # after minus before
    low: Column  # the ends of its interval: 95 %, bootstrap over texts
    high: Column
    texts: Column  # with a row, of the model that has fewer
    p: Column  # two-sided, adjusted for all heads and statistics; NaN for too few texts


def same_texts(before: Mapping[str, TextSums], after: Mapping[str, TextSums]) -> bool:
    """Whether every statistic counts the same rows in the same texts of both tables."""
    return all(np.array_equal(sums.count, after[name].count) for name, sums in before.items())


def without_rounding(before: TextSums, after: TextSums, tolerance: float) -> TextSums:
    """The sums after, with those of before wherever a text's means differ by rounding alone.

    Args:
        tolerance: The largest difference that is rounding, for values up to 1; beyond, a share
            of the value.
    """
    limit = tolerance * np.maximum(before.count, np.abs(before.total))
    equal = (before.count == after.count) & (np.abs(after.total - before.total) <= limit)
    return replace(after, total=np.where(equal, before.total, after.total))


def differences(
    before: Mapping[str, TextSums],
    after: Mapping[str, TextSums],
    *,
    paired: bool,
    draws: int = 4000,
    seed: int = 0,
) -> dict[str, HeadDifferences]:
    """Test every head and statistic as one family.

    The statistic is Student's t of the influence of each text on the difference of the means,
    which are ratios of sums over texts. Both signs of every column are in the family, so that a
    test is two-sided.

    Args:
        before: The sums of each statistic, by name, with a column per head.
        after: The same for the other model.
        paired: Whether the texts are the same.
        draws: Bootstrap resamples of the test.
    Source:
        Romano & Wolf 2005, algorithm 4.2 (`headwise.roles`).
    """
    names, sides = list(before), []
    for side in (before, after):  # all statistics as columns of one, which share the resamples
        parts = zip(*(side[name].parts for name in names), strict=True)
        sides.append(TextSums(*(np.concatenate(columns, axis=1) for columns in parts)))
    counts = [(side.count > 0).sum(0).astype(np.float64) for side in sides]
    texts = np.minimum(*counts)
    tested = texts >= FEWEST_TEXTS
    p = np.full(len(texts), np.nan)
    gains = _influence(sides[0], sides[1], paired)[:, tested]
    [both_signs] = step_down([np.concatenate([gains, -gains], axis=1)], draws=draws, seed=seed)
    p[tested] = np.minimum(*np.split(both_signs.astype(np.float64), 2))
    ends = sides[0].difference_interval(sides[1], paired=paired, seed=seed)
    means = [_mean(side) for side in sides]
    columns = (*means, means[1] - means[0], *ends, texts, p)
    by_name = zip(*(np.split(column, len(names)) for column in columns), strict=True)
    return {name: HeadDifferences(*each) for name, each in zip(names, by_name, strict=True)}


def _influence(before: TextSums, after: TextSums, paired: bool) -> PerText:
    """How far each text moves the difference of the means; their mean is the difference.

    If the models read different texts, the rows of both follow one another, weighted by the share
    of each model's texts, so that the variance of the mean over rows is the sum of both variances.
    """
    parts = [_centred(sums) for sums in (before, after)]
    difference = _mean(after) - _mean(before)
    if paired:
        return parts[1] - parts[0] + difference
    n = sum(map(len, parts))
    rows = [-n / len(parts[0]) * parts[0], n / len(parts[1]) * parts[1]]
    return np.concatenate(rows) + difference


def _centred(sums: TextSums) -> PerText:
    size = sums.count.mean(0)
    safe = np.where(size > 0, size, 1.0)
    return (sums.total - np.nan_to_num(_mean(sums)) * sums.count) / safe


def _mean(sums: TextSums) -> Column:
    total, count = sums.total.sum(0), sums.count.sum(0)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
