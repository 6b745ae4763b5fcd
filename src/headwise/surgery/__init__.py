"""Smaller models: plan which heads to remove, and prune them."""

from headwise.surgery._choose_heads import plan as plan
from headwise.surgery._choose_heads import plan_curves as plan_curves
from headwise.surgery._choose_heads import removal_order as removal_order
from headwise.surgery._costs import Costs as Costs
from headwise.surgery._measure import PassTimes as PassTimes
from headwise.surgery._measure import costs as costs
from headwise.surgery._measure import time_passes as time_passes
from headwise.surgery._plan import LayerPlan as LayerPlan
from headwise.surgery._plan import Plan as Plan
from headwise.surgery._prune import prune as prune
