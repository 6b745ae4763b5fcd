"""Smaller models: which heads go, cutting them out, writing down what is left."""

from headwise.surgery._choose_heads import plan
from headwise.surgery._plan import LayerPlan, Plan, amount
from headwise.surgery._prune import prune
from headwise.surgery.grouping import GroupedLayer, Method, group_heads
from headwise.surgery.pricing import Costs, PassTimes, costs, time_passes
from headwise.surgery.saving import Format, files_beside, form_of, save

__all__ = [
    "Costs",
    "Format",
    "GroupedLayer",
    "LayerPlan",
    "Method",
    "PassTimes",
    "Plan",
    "amount",
    "costs",
    "files_beside",
    "form_of",
    "group_heads",
    "plan",
    "prune",
    "save",
    "time_passes",
]
