"""Statistics of heads during training: scalars for a logger, alarms, and QK-clip."""

from headwise.monitor._alarms import Above as Above
from headwise.monitor._alarms import Alarm as Alarm
from headwise.monitor._alarms import AlarmedHead as AlarmedHead
from headwise.monitor._alarms import AlarmRule as AlarmRule
from headwise.monitor._alarms import Below as Below
from headwise.monitor._monitor import HeadMonitor as HeadMonitor
from headwise.monitor._monitor import Log as Log
from headwise.monitor._qk_clip import ClipReport as ClipReport
from headwise.monitor._qk_clip import QKClip as QKClip
