"""The cost of heads: parameters, multiply-adds, cache bytes and time."""

from headwise.surgery.pricing._cost_table import Costs
from headwise.surgery.pricing._costs import costs
from headwise.surgery.pricing._time import PassTimes, time_passes

__all__ = ["Costs", "PassTimes", "costs", "time_passes"]
