"""How much each head matters to what a model should go on doing."""

from headwise.gauge._batches import Given, paired, read_given
from headwise.gauge._curves import prune_curves
from headwise.gauge._importance import importance
from headwise.gauge._loss import Loss, embedding, find_loss
from headwise.gauge._score import Inputs, Score
from headwise.gauge.methods import RESUMABLE, Gates

__all__ = [
    "RESUMABLE",
    "Gates",
    "Given",
    "Inputs",
    "Loss",
    "Score",
    "embedding",
    "find_loss",
    "importance",
    "paired",
    "prune_curves",
    "read_given",
]
