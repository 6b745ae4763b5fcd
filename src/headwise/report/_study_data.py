"""The fields of a study, and the heads that stand out in it; its page and folder import these.

They cannot import `Study`, whose methods call them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwise._display import counted
from headwise._extras import require
from headwise.head_effects import HeadEffects
from headwise.report._comparison import Comparison
from headwise.report._samples import Sample
from headwise.roles import Roles
from headwise.surgery import Plan
from headwise.tables import Curves, Head, HeadTable, Scores

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
    uniform: float  # the share that uniform attention over the same keys would give
    lift: float  # how far the share lies from uniform attention (0) to all of it (1)


@dataclass(frozen=True)
class StudyData:
    """The results of a study: all that the page shows. `Study` describes the fields."""

    title: str
    model: Mapping[str, str | int]
    text: Mapping[str, str | int]
    table: HeadTable
    meanings: Mapping[str, str]
    samples: tuple[Sample, ...]
    training: Mapping[str, str | int | float] | None
    roles: Roles | None = None
    effects: HeadEffects | None = None
    scores: Scores | None = None
    plan: Plan | None = None
    curves: Curves | None = None
    comparison: Comparison | None = None

    def findings(self) -> list[str]:
        """Up to three lines about heads that stand out, or one line if none does.

        A head stands out if its share of attention is significantly above that of uniform
        attention over the same keys. That does not show what the head is for.
        """
        return [self._line(found) for found in self.significant()] or [self._no_finding_line()]

    def significant(self) -> list[Finding]:
        """Up to three findings, the largest lift first: at most one per statistic and per head."""
        texts = self._whole_texts
        if texts is not None and texts < MIN_TEXTS:
            return []
        statistics = self._testable_statistics()
        n_tests = len(self.table.heads) * len(statistics)
        candidates = (_strongest_finding(self.table, name, n_tests) for name in statistics)
        chosen: dict[Head, Finding] = {}
        for finding in sorted(filter(None, candidates), key=lambda finding: -finding.lift):
            chosen.setdefault(finding.head, finding)
        return list(chosen.values())[:MAX_FINDINGS]

    @property
    def _whole_texts(self) -> int | None:
        """How many texts were studied, each long text counted once; None if that is unknown."""
        texts = self.text.get("texts")
        return texts if isinstance(texts, int) else None

    def _testable_statistics(self) -> list[str]:
        """The shares of attention that have a baseline and whose target has a description."""
        return [
            name
            for name in self.table.statistics
            if (name in _TARGETS or name in self.meanings)
            and np.isfinite(self.table.uniform(name)).any()
        ]

    def _line(self, found: Finding) -> str:
        """A sentence with the share, its interval, and the share of uniform attention."""
        target = _TARGETS.get(found.statistic)
        if target is None:
            meaning = self.meanings.get(found.statistic)
            target = f"“{found.statistic}”" + (f" ({meaning})" if meaning else "")
        # Rounded up: a margin must not look smaller than it is.
        margin = max(math.ceil(found.margin * 100), 1) / 100
        return (
            f"{found.head} puts {found.mean:.2f} ± {margin:.2f} of its attention on {target}; "
            f"uniform attention would put {found.uniform:.2f} there."
        )

    def _no_finding_line(self) -> str:
        """The line for a table in which no head stands out: it says what was tested."""
        table, statistics = self.table, self._testable_statistics()
        if not statistics:
            return "No head stands out: the table holds no share of attention to test."
        tests = (
            f"{counted(len(table.heads), 'head')} × {counted(len(statistics), 'share')} of "
            f"attention ({', '.join(statistics)})"
        )
        texts = int(max(table.totals[name].texts.max(initial=0) for name in statistics))
        texts = texts if self._whole_texts is None else min(texts, self._whole_texts)
        if texts < MIN_TEXTS:
            return (
                f"Shares of attention not tested: {counted(texts, 'text')}, {MIN_TEXTS} needed. "
                f"To be tested: {tests}."
            )
        return (
            f"No head stands out: on {texts:,} texts, no share is significantly a quarter or more "
            f"of the way from uniform attention to 1. Tested: {tests}."
        )


def _strongest_finding(table: HeadTable, statistic: str, n_tests: int) -> Finding | None:
    """The head with the largest lift, among those whose whole interval is above the threshold."""
    mean, uniform = table.mean(statistic), table.uniform(statistic)
    texts = table.totals[statistic].texts
    # Bonferroni over heads × statistics: the largest of many numbers is often large by chance.
    stats = require("scipy.stats", "report", "findings")
    # Student's t: the error of a mean over few texts is itself uncertain.
    quantile = stats.t.isf(_ERROR_RATE / 2 / n_tests, np.maximum(texts - 1, 1))
    margin = table.standard_error(statistic) * quantile
    with np.errstate(divide="ignore", invalid="ignore"):  # no lift where uniform attention gives 1
        lift, lowest = (mean - uniform) / (1 - uniform), (mean - margin - uniform) / (1 - uniform)
    significant = (lowest >= MIN_LIFT) & (texts >= MIN_TEXTS)
    if not significant.any():
        return None
    row = int(np.where(significant, lift, -np.inf).argmax())
    numbers = (float(column[row]) for column in (mean, margin, uniform, lift))
    return Finding(table.heads[row], statistic, *numbers)
