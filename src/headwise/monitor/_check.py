"""What a monitor takes: rules on what it watches, and receivers of what it finds."""

from collections.abc import Sequence
from typing import Any

from headwise.errors import ArgumentError
from headwise.monitor._alarms import AlarmRule
from headwise.monitor._log import ScalarWriter


def check_rules(rules: Any, statistics: Any) -> None:
    """Refuse what is no rule, or one on a statistic that is not watched.

    Raises:
        ArgumentError: the statistics or rules are of another type, or do not fit.
    """
    if isinstance(statistics, str) or not statistics:
        raise ArgumentError(f"HeadMonitor: statistics={statistics!r}. Give a list of names.")
    if not isinstance(rules, Sequence) or not all(isinstance(rule, AlarmRule) for rule in rules):
        raise ArgumentError(
            f"HeadMonitor: rules={rules!r}. Give a list of Above(...) and Below(...)."
        )
    for rule in rules:
        if rule.statistic not in statistics:
            raise ArgumentError(
                f"HeadMonitor: a rule is on {rule.statistic!r}, which is not watched. "
                f"Add it to statistics={tuple(statistics)}."
            )


def check_receivers(log: Any, on_alarm: Any) -> None:
    """Refuse a receiver that cannot be called, before the middle of a run.

    Raises:
        ArgumentError: one is neither None nor can be called.
    """
    if not isinstance(log, ScalarWriter | None) and not callable(log):
        raise ArgumentError(
            f"HeadMonitor: log={log!r}. Give a SummaryWriter, or a function of the numbers and "
            f"the step."
        )
    if on_alarm is not None and not callable(on_alarm):
        raise ArgumentError(f"HeadMonitor: on_alarm={on_alarm!r}. Give a function of an alarm.")
