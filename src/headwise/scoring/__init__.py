"""Importance scores: how much each head matters to what a model should keep doing."""

from headwise.scoring._batches import BatchesLike, paired, read_batches
from headwise.scoring._curves import in_fifths, prune_curves
from headwise.scoring._importance import importance
from headwise.scoring._loss import (
    EMBEDDING,
    Inputs,
    Loss,
    Score,
    find_loss,
    rank_correlation,
    token_losses,
)
from headwise.scoring.methods import Gates

__all__ = [
    "EMBEDDING",
    "BatchesLike",
    "Gates",
    "Inputs",
    "Loss",
    "Score",
    "find_loss",
    "importance",
    "in_fifths",
    "paired",
    "prune_curves",
    "rank_correlation",
    "read_batches",
    "token_losses",
]
