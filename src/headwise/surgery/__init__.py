"""Smaller models: which heads go, cutting them out, writing down what is left."""

from headwise.surgery._costs import Costs, costs
from headwise.surgery._decide import plan
from headwise.surgery._plan import LayerPlan, Plan
from headwise.surgery._prune import prune
from headwise.surgery._save import save

__all__ = ["Costs", "LayerPlan", "Plan", "costs", "plan", "prune", "save"]
