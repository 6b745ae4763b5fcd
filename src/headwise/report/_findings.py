"""What stands out in a table, said plainly, beside what even attention would give."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from headwise._display import counted
from headwise.tables import Head, HeadTable

MOST = 3
LEAST_LIFT = 0.25
# A spread seen on fewer texts measures nothing, however small it came out.
FEWEST_TEXTS = 5
_ERROR = 0.05
_TARGETS = {
    "first": "the first token of the text",
    "self": "the token itself",
    "previous": "the token before",
    "next": "the token after",
}


@dataclass(frozen=True)
class Finding:
    """A share of attention that surely lies above what even attention would give.

    Attributes:
        mean: The share that the head gives, 0 … 1.
        margin: Half the width of its interval.
        even: What attention spread evenly over the same keys would give.
        lift: How far the share lies on the way from even (0) to all (1).
    """

    head: Head
    statistic: str
    mean: float
    margin: float
    even: float
    lift: float

    def line(self, meanings: Mapping[str, str]) -> str:
        """A sentence: the number, its interval, and even attention beside it."""
        target = _TARGETS.get(self.statistic)
        if target is None:
            says = meanings.get(self.statistic)
            target = f"“{self.statistic}”" + (f" ({says})" if says else "")
        # Rounded up: a margin must not look smaller than it is.
        margin = max(math.ceil(self.margin * 100), 1) / 100
        return (
            f"{self.head} gives {self.mean:.2f} ± {margin:.2f} of its attention to {target}; "
            f"spread evenly it would be {self.even:.2f}."
        )


def telling(
    table: HeadTable, meanings: Mapping[str, str], whole: int | None = None
) -> list[Finding]:
    """Up to three findings, by lift: at most one for a statistic and one for a head.

    Args:
        whole: How many texts there were before long ones were cut; None where none was.
    """
    if whole is not None and whole < FEWEST_TEXTS:
        return []
    judged = _judged(table, meanings)
    looks = len(table.heads) * len(judged)
    best = [found for name in judged if (found := _best(table, name, looks)) is not None]
    chosen: list[Finding] = []
    for finding in sorted(best, key=lambda found: found.lift, reverse=True):
        if finding.head not in [other.head for other in chosen]:
            chosen.append(finding)
    return chosen[:MOST]


def nothing_found(table: HeadTable, meanings: Mapping[str, str], whole: int | None = None) -> str:
    """The line for a table in which nothing stands out: it says what was looked at."""
    judged = _judged(table, meanings)
    if not judged:
        return "No head stands out: the table holds no share of attention to judge heads by."
    looked = f"{counted(len(table.heads), 'head')} × {counted(len(judged), 'share')} of attention"
    looked = f"{looked} ({', '.join(judged)})"
    texts = int(max(table.totals[name].texts.max(initial=0) for name in judged))
    texts = texts if whole is None else min(texts, whole)
    if texts < FEWEST_TEXTS:
        return (
            f"Not tested: {counted(texts, 'text')}, {FEWEST_TEXTS} needed to tell "
            f"whether a head stands out. Looked at: {looked}."
        )
    return (
        f"No head stands out: on {texts:,} texts, none lies surely a quarter of the way or more "
        f"from even attention to all of it. Looked at: {looked}."
    )


def _judged(table: HeadTable, meanings: Mapping[str, str]) -> list[str]:
    """The shares that even attention gives a meaning to, and that name what is looked at."""
    return [
        name
        for name in table.statistics
        if (name in _TARGETS or name in meanings) and np.isfinite(table.even(name)).any()
    ]


def _best(table: HeadTable, statistic: str, looks: int) -> Finding | None:
    """The head with the largest lift, among those whose whole interval lies high enough."""
    mean, even = table.mean(statistic), table.even(statistic)
    texts = table.totals[statistic].texts
    # Bonferroni over heads × statistics: the largest of many numbers is often large by luck.
    quantile = stats.t.isf(_ERROR / 2 / looks, np.maximum(texts - 1, 1))
    margin = table.standard_error(statistic) * quantile
    with np.errstate(divide="ignore", invalid="ignore"):  # even may be 1: no lift then
        lift, lowest = (mean - even) / (1 - even), (mean - margin - even) / (1 - even)
    sure = (lowest >= LEAST_LIFT) & (texts >= FEWEST_TEXTS)
    if not sure.any():
        return None
    at = int(np.where(sure, lift, -np.inf).argmax())
    numbers = (float(column[at]) for column in (mean, margin, even, lift))
    return Finding(table.heads[at], statistic, *numbers)
