"""What heads cost: numbers, bytes, and time."""

from headwise.surgery.pricing._costs import Costs, costs
from headwise.surgery.pricing._time import PassTimes, time_passes

__all__ = ["Costs", "PassTimes", "costs", "time_passes"]
