"""How well a model does at its task, as one number for all texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor

Inputs = Mapping[str, Any]

_IGNORED = -100  # what Hugging Face writes where a token has no label


@dataclass(frozen=True)
class Score:
    """A score of all texts together; higher is better.

    Attributes:
        name: What tables call it.
        read: What is needed of a batch, from what the model gave and the batch: some rows.
        of: The score, from the rows of all batches in their order.
    """

    name: str
    read: Callable[[Any, Inputs], Tensor]
    of: Callable[[Float[Tensor, "rows F"]], float]


def label_score(labels: Tensor) -> Score:
    """Spearman's correlation where each text has a number, else the share of right labels."""
    if labels.is_floating_point() and labels.numel() == len(labels):
        return Score("spearman", _answers, lambda rows: rank_correlation(*rows.T.numpy()))
    return Score(
        "accuracy", _answers, lambda rows: float((rows[:, 0] == rows[:, 1]).double().mean())
    )


def pair_score(
    embeddings: Callable[[Any, Inputs], Tensor],
    similar: Sequence[float],
    places: Sequence[int],
) -> Score:
    """Spearman's correlation of the cosine of two sentences with how alike they are.

    Args:
        embeddings: The embedding of each sentence of a batch, of length 1.
        similar: How alike the sentences of each pair are.
        places: Which sentence each read one is: of M pairs the first ones are 0 … M−1, the
            second ones M … 2M−1.
    """

    def of(rows: Float[Tensor, "rows F"]) -> float:
        one, two = rows[np.argsort(places)].chunk(2)
        return rank_correlation((one * two).sum(1).numpy(), np.asarray(similar))

    return Score("spearman", embeddings, of)


def rank_correlation(one: np.ndarray, two: np.ndarray) -> float:
    """Spearman's, NaN where one is constant."""
    if np.ptp(one) == 0 or np.ptp(two) == 0:
        return float("nan")
    return float(spearmanr(one, two).statistic)


def _answers(output: Any, batch: Inputs) -> Float[Tensor, "rows 2"]:
    """What the model says and what is right, for each label."""
    logits, labels = getattr(output, "logits", output), batch["labels"]
    if labels.is_floating_point():
        said = logits if labels.numel() == len(labels) else (logits > 0).to(logits.dtype)
    else:
        said = logits.argmax(-1)
    counted = (labels != _IGNORED).flatten()
    rows = torch.stack([said.flatten().to(logits), labels.flatten().to(logits)], 1)
    return rows[counted]
