"""Checks of a monitor's arguments: rules on watched statistics, receivers of results, and steps."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Site
from headwise.monitor._alarms import AlarmRule
from headwise.monitor._log import ScalarWriter


def check_rules(rules: Any, statistics: Any) -> None:
    """Refuse objects that are not rules, and rules on statistics that are not watched.

    Raises:
        ArgumentError: the statistics or rules have the wrong type, or a rule is on a statistic
            that is not watched.
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
    """Refuse receivers that cannot be called, before training starts.

    Raises:
        ArgumentError: a receiver is neither None nor callable.
    """
    if not isinstance(log, ScalarWriter | None) and not callable(log):
        raise ArgumentError(
            f"HeadMonitor: log={log!r}. Give a SummaryWriter, or a function of the scalars and "
            f"the step."
        )
    if on_alarm is not None and not callable(on_alarm):
        raise ArgumentError(f"HeadMonitor: on_alarm={on_alarm!r}. Give a function of an alarm.")


def check_captured(
    sites: Collection[Site], layers: Collection[int] | None, step: int, model: nn.Module
) -> None:
    """Refuse a watched step without attention, or without that of a chosen layer.

    Raises:
        ArgumentError: a layer was not captured.
        UnsupportedError: nothing was captured.
    """
    if not sites:
        raise UnsupportedError(
            f"HeadMonitor: no attention was captured in step {step} of {type(model).__name__}. "
            f"Give the module that training calls, in training mode and with gradients, and call "
            f"step() after its forward pass."
        )
    missing = set(layers or ()) - {site.layer for site in sites}
    if missing:
        raise ArgumentError(
            f"HeadMonitor: layers {sorted(missing)} were not captured in step {step}. "
            f"Name layers of the model, counted from 0."
        )
