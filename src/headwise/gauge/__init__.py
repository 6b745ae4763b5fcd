"""How much each head matters to what a model should go on doing."""

from headwise.gauge._curves import prune_curves
from headwise.gauge._importance import importance
from headwise.gauge._loss import Loss, embedding, find_loss

__all__ = ["Loss", "embedding", "find_loss", "importance", "prune_curves"]
