"""Statistics of heads during training: scalars for a logger, alarms, and QK-clip."""

from headwise.monitor._alarms import Above, Alarm, AlarmedHead, AlarmRule, Below
from headwise.monitor._monitor import HeadMonitor, Log, ScalarWriter
from headwise.monitor._qk_clip import ClippedHead, ClipReport, QKClip

__all__ = [
    "Above",
    "Alarm",
    "AlarmRule",
    "AlarmedHead",
    "Below",
    "ClipReport",
    "ClippedHead",
    "HeadMonitor",
    "Log",
    "QKClip",
    "ScalarWriter",
]
