"""Smaller models: which heads go, cutting them out, writing down what is left."""

from headwise.surgery._plan import LayerPlan, Plan
from headwise.surgery._prune import prune

__all__ = ["LayerPlan", "Plan", "prune"]
