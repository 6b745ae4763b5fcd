"""Bounds on statistics of heads, and alarms for heads that exceed them."""

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

    The alarm goes off for a head that breaks the bound on `patience` watched steps in a row, and
    stays active until the head keeps it again. NaN breaks every bound, unless no query was
    eligible.

    Attributes:
        statistic: Its name; the monitor must watch it.
        threshold: The bound, in the unit of the statistic.
        patience: How many watched steps in a row it must be broken.
    Raises:
        ArgumentError: the statistic is unknown, `patience` is below 1, or the threshold is not
            finite.
    """

    statistic: str
    threshold: float
    patience: int = 1

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

    @abstractmethod
    def broken_by(self, value: float) -> bool:
        """Whether a value is beyond the bound; True for NaN."""

    def __str__(self) -> str:
        return f"{self.statistic} {type(self).__name__.lower()} {self.threshold:g}"


class Above(AlarmRule):
    """The statistic of a head is above a threshold, as in `Above("max_logit", 100.0)`."""

    def broken_by(self, value: float) -> bool:
        return not value <= self.threshold


class Below(AlarmRule):
    """The statistic of a head is below a threshold, as in `Below("entropy", 0.1)`."""

    def broken_by(self, value: float) -> bool:
        return not value >= self.threshold


@dataclass(frozen=True, repr=False)
class AlarmedHead:
    """A head that breaks a rule.

    Attributes:
        since: The first of the consecutive watched steps on which it broke the rule.
        value: The statistic at the latest of these steps.
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
    """A rule that is broken, and the heads that break it.

    As text it is one line, such as `step 640: entropy below 0.1: L1.H2 (0.08 since step 630)`.

    Attributes:
        step: The watched step of the alarm.
        heads: The heads that break the rule, in the order of the table.
    """

    rule: AlarmRule
    step: int
    heads: tuple[AlarmedHead, ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.heads[:_NAMED]))
        unnamed = len(self.heads) - _NAMED
        return f"step {self.step}: {self.rule}: {named}" + (f" and {unnamed} more" * (unnamed > 0))

    def __repr__(self) -> str:
        heads = f"{len(self.heads)} heads" if len(self.heads) > 1 else str(self.heads[0].head)
        return f"<Alarm at step {self.step}: {self.rule}, {heads}>"


class Alarms:
    """Counts, for every rule and head, for how many watched steps the rule has been broken."""

    def __init__(self, rules: Sequence[AlarmRule]) -> None:
        # Of each head that breaks a rule: since when, for how many steps, whether an alarm is on.
        self._broken: dict[AlarmRule, dict[Head, tuple[AlarmedHead, int, bool]]] = {
            rule: {} for rule in rules
        }

    def update(self, step: int, statistics: StepStatistics) -> list[Alarm]:
        """The alarms that go off at this step, one for each rule."""
        new = []
        for rule, before in self._broken.items():
            after, going_off = {}, []
            for head, value in statistics.each(rule.statistic):
                first = AlarmedHead(head, step, value), 0, False
                alarmed, length, active = before.get(head, first)
                if rule.broken_by(value):
                    alarmed, length = replace(alarmed, value=value), length + 1
                    if not active and length >= rule.patience:
                        active = True
                        going_off.append(alarmed)
                    after[head] = alarmed, length, active
            self._broken[rule] = after
            if going_off:
                new.append(Alarm(rule, step, tuple(going_off)))
        return new

    def active(self, step: int) -> list[Alarm]:
        """The alarms that are active at this step, one for each rule."""
        alarms = [
            Alarm(rule, step, tuple(head for head, _, active in broken.values() if active))
            for rule, broken in self._broken.items()
        ]
        return [alarm for alarm in alarms if alarm.heads]
