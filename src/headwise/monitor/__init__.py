"""Statistics of heads during training: scalars for a logger, alarms, and QK-clip limits."""

from headwise.monitor._alarms import Above, Alarm, AlarmedHead, AlarmRule, Below
from headwise.monitor._log import Log, ScalarWriter
from headwise.monitor._monitor import HeadMonitor

__all__ = [
    "Above",
    "Alarm",
    "AlarmRule",
    "AlarmedHead",
    "Below",
    "HeadMonitor",
    "Log",
    "ScalarWriter",
]
