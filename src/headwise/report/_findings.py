"""The heads that stand out in a table: one sentence each, beside uniform attention."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from headwise._display import counted
from headwise._packages import require
from headwise.tables import Head, HeadTable

MAX_FINDINGS = 3
MIN_LIFT = 0.25
# A standard error over fewer texts means little, however small it is.
MIN_TEXTS = 5
_ERROR_RATE = 0.05
_TARGETS = {
    "first": "the first token of the text",
    "self": "the token itself",
    "previous": "the previous token",
    "next": "the next token",
}


class Finding(NamedTuple):
    """A share of attention that is significantly above that of uniform attention."""

    head: Head
    statistic: str
    mean: float  # the head's share, 0 … 1
    margin: float  # half the width of its interval
    even: float  # the share that uniform attention over the same keys would give
    lift: float  # how far the share lies from uniform attention (0) to all of it (1)

    def line(self, meanings: Mapping[str, str]) -> str:
        """A sentence with the share, its interval, and the share of uniform attention."""
        target = _TARGETS.get(self.statistic)
        if target is None:
            meaning = meanings.get(self.statistic)
            target = f"“{self.statistic}”" + (f" ({meaning})" if meaning else "")
        # Rounded up: a margin must not look smaller than it is.
        margin = max(math.ceil(self.margin * 100), 1) / 100
        return (
            f"{self.head} puts {self.mean:.2f} ± {margin:.2f} of its attention on {target}; "
            f"uniform attention would put {self.even:.2f} there."
        )


def significant_findings(
    table: HeadTable, meanings: Mapping[str, str], whole_texts: int | None = None
) -> list[Finding]:
    """Up to three findings, the largest lift first: at most one per statistic and per head.

    Args:
        whole_texts: How many texts there were before long texts were split; None if none was.
    """
    if whole_texts is not None and whole_texts < MIN_TEXTS:
        return []
    statistics = _testable_statistics(table, meanings)
    n_tests = len(table.heads) * len(statistics)
    candidates = (_strongest_finding(table, statistic, n_tests) for statistic in statistics)
    chosen: dict[Head, Finding] = {}
    for finding in sorted(filter(None, candidates), key=lambda finding: -finding.lift):
        chosen.setdefault(finding.head, finding)
    return list(chosen.values())[:MAX_FINDINGS]


def no_finding_line(
    table: HeadTable, meanings: Mapping[str, str], whole_texts: int | None = None
) -> str:
    """The line for a table in which no head stands out: it says what was tested."""
    statistics = _testable_statistics(table, meanings)
    if not statistics:
        return "No head stands out: the table holds no share of attention to test."
    tests = (
        f"{counted(len(table.heads), 'head')} × {counted(len(statistics), 'share')} of attention "
        f"({', '.join(statistics)})"
    )
    texts = int(max(table.totals[statistic].texts.max(initial=0) for statistic in statistics))
    texts = texts if whole_texts is None else min(texts, whole_texts)
    if texts < MIN_TEXTS:
        return (
            f"Shares of attention not tested: {counted(texts, 'text')}, {MIN_TEXTS} needed. To be "
            f"tested: {tests}."
        )
    return (
        f"No head stands out: on {texts:,} texts, no share is significantly a quarter or more of "
        f"the way from uniform attention to 1. Tested: {tests}."
    )


def _testable_statistics(table: HeadTable, meanings: Mapping[str, str]) -> list[str]:
    """The shares of attention that have a baseline and whose target has a description."""
    return [
        name
        for name in table.statistics
        if (name in _TARGETS or name in meanings) and np.isfinite(table.even(name)).any()
    ]


def _strongest_finding(table: HeadTable, statistic: str, n_tests: int) -> Finding | None:
    """The head with the largest lift, among those whose whole interval is above the threshold."""
    mean, even = table.mean(statistic), table.even(statistic)
    texts = table.totals[statistic].texts
    # Bonferroni over heads × statistics: the largest of many numbers is often large by chance.
    stats = require("scipy.stats", "report", "findings")
    quantile = stats.t.isf(_ERROR_RATE / 2 / n_tests, np.maximum(texts - 1, 1))
    margin = table.standard_error(statistic) * quantile
    with np.errstate(divide="ignore", invalid="ignore"):  # no lift where uniform attention gives 1
        lift, lowest = (mean - even) / (1 - even), (mean - margin - even) / (1 - even)
    significant = (lowest >= MIN_LIFT) & (texts >= MIN_TEXTS)
    if not significant.any():
        return None
    row = int(np.where(significant, lift, -np.inf).argmax())
    numbers = (float(column[row]) for column in (mean, margin, even, lift))
    return Finding(table.heads[row], statistic, *numbers)
