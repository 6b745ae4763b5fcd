"""Rules that a head must not break for long, and which heads break them since when."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwise.errors import ArgumentError
from headwise.monitor._step_statistics import StepStatistics
from headwise.tables import STATISTICS, Head

_NAMED = 8  # heads named in a message; the others are counted


@dataclass(frozen=True)
class AlarmRule(ABC):
    """A bound on a statistic of every head; made as `Above` or `Below`.

    The alarm goes off for a head that breaks the bound on `patience` watched steps in a row,
    and stands until the head has come back as far as `release`. A value that is not a number,
    though queries were seen, breaks every bound.

    Attributes:
        statistic: Its name, one of those that the monitor watches.
        threshold: The bound, in the unit of the statistic.
        patience: How many watched steps in a row it must be broken.
        release: Where an alarm ends; None is at the threshold itself.
    Raises:
        ArgumentError: an unknown statistic, `patience` below 1, a bound that is not finite, or
            a release on the wrong side of it.
    """

    statistic: str
    threshold: float
    patience: int = 1
    release: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.statistic not in STATISTICS:
            raise ArgumentError(
                f"{name}: no statistic {self.statistic!r}. Choose from {', '.join(STATISTICS)}."
            )
        if self.patience < 1:
            raise ArgumentError(f"{name}: patience is {self.patience}. Give 1 or more.")
        if not math.isfinite(self.threshold):
            raise ArgumentError(f"{name}: threshold is {self.threshold}. Give a finite number.")
        if self.release is not None and not self._within(self.release, self.threshold):
            raise ArgumentError(
                f"{name}: release is {self.release} at a threshold of {self.threshold}, so an "
                f"alarm would never end as it should. Give the threshold or a calmer value."
            )

    def broken_by(self, value: float, standing: bool) -> bool:
        """Whether a value goes beyond the bound, or while an alarm stands beyond its release."""
        bound = self.release if standing and self.release is not None else self.threshold
        return not self._within(value, bound)

    @abstractmethod
    def _within(self, value: float, bound: float) -> bool:
        """False also of a value that is not a number."""

    def __str__(self) -> str:
        return f"{self.statistic} {type(self).__name__.lower()} {self.threshold:g}"


class Above(AlarmRule):
    """The statistic of a head is above a threshold, as in `Above("max_logit", 100.0)`."""

    def _within(self, value: float, bound: float) -> bool:
        return value <= bound


class Below(AlarmRule):
    """The statistic of a head is below a threshold, as in `Below("entropy", 0.1)`."""

    def _within(self, value: float, bound: float) -> bool:
        return value >= bound


@dataclass(frozen=True, repr=False)
class AlarmedHead:
    """A head that breaks a rule.

    Attributes:
        since: The first of the watched steps in a row on which it broke the rule.
        value: The statistic at the latest of them.
    """

    head: Head
    since: int
    value: float

    def __str__(self) -> str:
        return f"{self.head} ({self.value:.3g} since step {self.since})"

    def __repr__(self) -> str:
        return f"<AlarmedHead {self}>"


@dataclass(frozen=True, repr=False)
class Alarm:
    """A rule that is broken, and by whom.

    As text it is one line, such as `step 640: entropy below 0.1: L1.H2 (0.08 since step 630)`.

    Attributes:
        step: The watched step that this was found at.
        heads: Those who break the rule, in the order of the table.
    """

    rule: AlarmRule
    step: int
    heads: tuple[AlarmedHead, ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.heads[:_NAMED]))
        more = len(self.heads) - _NAMED
        return f"step {self.step}: {self.rule}: {named}" + (f" and {more} more" * (more > 0))

    def __repr__(self) -> str:
        heads = f"{len(self.heads)} heads" if len(self.heads) > 1 else str(self.heads[0].head)
        return f"<Alarm at step {self.step}: {self.rule}, {heads}>"


@dataclass(frozen=True)
class _Streak:
    """Watched steps in a row on which one head broke one rule."""

    found: AlarmedHead
    length: int
    standing: bool


class Alarms:
    """Keeps count, for every rule and head, of how long the rule has been broken."""

    def __init__(self, rules: Sequence[AlarmRule]) -> None:
        self._streaks: dict[AlarmRule, dict[Head, _Streak]] = {rule: {} for rule in rules}

    def take_in(self, step: int, reading: StepStatistics) -> list[Alarm]:
        """What goes off at this step, one alarm for each rule."""
        new = []
        for rule, before in self._streaks.items():
            after = self._streaks[rule] = _continued(rule, before, step, reading)
            heads = tuple(
                streak.found
                for head, streak in after.items()
                if streak.standing and not (head in before and before[head].standing)
            )
            if heads:
                new.append(Alarm(rule, step, heads))
        return new

    def standing(self, step: int) -> list[Alarm]:
        """What stands at this step, one alarm for each rule."""
        found = {
            rule: tuple(streak.found for streak in streaks.values() if streak.standing)
            for rule, streaks in self._streaks.items()
        }
        return [Alarm(rule, step, heads) for rule, heads in found.items() if heads]


def _continued(
    rule: AlarmRule, before: dict[Head, _Streak], step: int, reading: StepStatistics
) -> dict[Head, _Streak]:
    after = {}
    for head, value in reading.each(rule.statistic):
        last = before.get(head)
        if not rule.broken_by(value, standing=last is not None and last.standing):
            continue
        if last is None:
            last = _Streak(AlarmedHead(head, step, value), 0, False)
        length = last.length + 1
        found = replace(last.found, value=value)
        after[head] = _Streak(found, length, last.standing or length >= rule.patience)
    return after
