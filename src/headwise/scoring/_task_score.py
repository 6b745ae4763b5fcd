"""Task scores: one number for all texts together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headwise._packages import require
from headwise.models.texts import IGNORED

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """A score of all texts together; higher is better.

    Attributes:
        name: Its name in tables.
        read: Extracts the rows that the score needs from the model's output and the batch.
        of: Computes the score from the rows of all batches, in their order.
    """

    name: str
    read: Callable[[Any, Inputs], Tensor]
    of: Callable[[Float[Tensor, "rows F"]], float]


def label_score(labels: Tensor) -> Score:
    """Spearman's correlation where each text has a number as its label, else accuracy."""
    if labels.is_floating_point() and labels.numel() == len(labels):
        return Score("spearman", _predictions, lambda rows: rank_correlation(*rows.T.numpy()))
    return Score(
        "accuracy", _predictions, lambda rows: float((rows[:, 0] == rows[:, 1]).double().mean())
    )


def pair_score(
    embeddings: Callable[[Any, Inputs], Tensor],
    similarities: Sequence[float],
    order: Sequence[int],
) -> Score:
    """Spearman's correlation between the cosine of two sentences and their annotated similarity.

    Args:
        embeddings: Returns the embedding of each sentence of a batch, of length 1.
        similarities: The annotated similarity of each pair.
        order: The sentence of each row: of M pairs, the first sentences are 0 … M−1 and the
            second ones M … 2M−1.
    """

    def correlation(rows: Float[Tensor, "rows F"]) -> float:
        first, second = rows[np.argsort(order)].chunk(2)
        return rank_correlation((first * second).sum(1).numpy(), np.asarray(similarities))

    return Score("spearman", embeddings, correlation)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation; NaN where `x` or `y` is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    stats = require("scipy.stats", "hf", "importance")
    return float(stats.spearmanr(x, y).statistic)


def _predictions(output: Any, batch: Inputs) -> Float[Tensor, "rows 2"]:
    """The model's prediction beside each label."""
    logits, labels = getattr(output, "logits", output), batch["labels"]
    if labels.is_floating_point():
        predicted = logits if labels.numel() == len(labels) else (logits > 0).to(logits.dtype)
    else:
        predicted = logits.argmax(-1)
    labelled = (labels != IGNORED).flatten()
    rows = torch.stack([predicted.flatten().to(logits), labels.flatten().to(logits)], 1)
    return rows[labelled]
