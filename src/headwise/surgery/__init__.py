"""Smaller models: plan which heads to remove, prune them, or let heads share keys and values."""

from headwise.surgery._choose_heads import plan, removal_order
from headwise.surgery._costs import Costs
from headwise.surgery._measure import PassTimes, costs, time_passes
from headwise.surgery._plan import LayerPlan, Plan, amount
from headwise.surgery._prune import prune
from headwise.surgery.grouping import GroupedLayer, group_heads

__all__ = [
    "Costs",
    "GroupedLayer",
    "LayerPlan",
    "PassTimes",
    "Plan",
    "amount",
    "costs",
    "group_heads",
    "plan",
    "prune",
    "removal_order",
    "time_passes",
]
