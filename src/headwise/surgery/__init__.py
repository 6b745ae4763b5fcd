"""Smaller models: plan which heads to remove, and prune them."""

from headwise.surgery._choose_heads import plan, plan_curves, removal_order
from headwise.surgery._costs import Costs
from headwise.surgery._measure import PassTimes, costs, time_passes
from headwise.surgery._plan import LayerPlan, Plan, amount
from headwise.surgery._prune import prune

__all__ = [
    "Costs",
    "LayerPlan",
    "PassTimes",
    "Plan",
    "amount",
    "costs",
    "plan",
    "plan_curves",
    "prune",
    "removal_order",
    "time_passes",
]
