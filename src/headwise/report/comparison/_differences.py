"""The differences of two tables of sums per text: paired intervals and one family of tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from headwise.roles import FEWEST_TEXTS, step_down
from headwise.tables import TextSums

Column = Float64[np.ndarray, " N"]
PerText = Float64[np.ndarray, "M N"]


@dataclass(frozen=True)
class HeadDifferences:
    """The differences of one statistic, for `N` heads.

    Attributes:
        before: The mean before.
        after: The mean after.
        difference: After minus before.
        low: The lower end of its interval (95 %, bootstrap over texts).
        high: The upper end.
        texts: The number of texts with a row, of the model that has fewer.
        p: Two-sided, adjusted for all heads and statistics; NaN for too few texts.
    """

    before: Column
    after: Column
    difference: Column
    low: Column
    high: Column
    texts: Column
    p: Column


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
    names = list(before)
    sides = [_beside([side[name] for name in names]) for side in (before, after)]
    texts = np.minimum(_texts_of(sides[0]), _texts_of(sides[1]))
    tested = texts >= FEWEST_TEXTS
    p = np.full(len(texts), np.nan)
    p[tested] = _two_sided(_influence(sides[0], sides[1], paired)[:, tested], draws, seed)
    ends = sides[0].difference_interval(sides[1], paired=paired, seed=seed)
    means = [_mean(side) for side in sides]
    columns = (*means, means[1] - means[0], *ends, texts, p)
    parts = [np.split(column, len(names)) for column in columns]
    return {
        name: HeadDifferences(*of) for name, of in zip(names, zip(*parts, strict=True), strict=True)
    }


def _beside(sums: Sequence[TextSums]) -> TextSums:
    """The sums of all statistics as columns of one, which share the resamples of texts."""
    return TextSums(
        *(np.concatenate(parts, axis=1) for parts in zip(*(x.parts for x in sums), strict=True))
    )


def _two_sided(gains: PerText, draws: int, seed: int) -> Column:
    [p] = step_down([np.concatenate([gains, -gains], axis=1)], draws=draws, seed=seed)
    return np.minimum(*np.split(p.astype(np.float64), 2))


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


def _texts_of(sums: TextSums) -> Column:
    return (sums.count > 0).sum(0).astype(np.float64)
