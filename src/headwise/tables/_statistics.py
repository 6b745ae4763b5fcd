"""The statistics of attention: what each one measures, its unit and its range."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["STATISTICS", "Statistic", "statistic_label"]


@dataclass(frozen=True)
class Statistic:
    """The name of a statistic in words, its unit and its range, and a phrase that explains it."""

    label: str
    unit: str
    low: float
    high: float
    meaning: str


_SHARE = ("share", 0.0, 1.0)
STATISTICS: Mapping[str, Statistic] = {
    "entropy": Statistic(
        "Entropy", "nats", 0.0, np.inf, "how widely the head spreads its attention"
    ),
    "max_weight": Statistic("Largest weight", *_SHARE, "the largest weight of a query"),
    "first": Statistic(
        "On the first token", *_SHARE, "attention to the first token of the text, where visible"
    ),
    "self": Statistic("On the token itself", *_SHARE, "attention of a token to itself"),
    "previous": Statistic(
        "On the previous token", *_SHARE, "attention to the token before, where visible"
    ),
    "next": Statistic("On the next token", *_SHARE, "attention to the token after, where visible"),
    "distance": Statistic("Distance", "tokens", 0.0, np.inf, "mean distance of the attended keys"),
    "max_logit": Statistic(
        "Largest logit", "logit", -np.inf, np.inf, "the largest scaled query·key product"
    ),
    "lse": Statistic(
        "Log-sum-exp", "logit", -np.inf, np.inf, "log of the sum of the exponentiated logits"
    ),
    "sink": Statistic("On the learned sink", *_SHARE, "attention on a sink that is not a token"),
    "participation": Statistic(
        "Attended keys", "keys", 1.0, np.inf, "effective number of attended keys, (Σp)² / Σp²"
    ),
    "output_norm": Statistic(
        "Output norm", "norm", 0.0, np.inf, "norm of the head's contribution to the residual stream"
    ),
}


def statistic_label(name: str) -> str:
    """The name of a statistic in words; one that a request has named keeps its own."""
    classes = {"special": "On special tokens", "punctuation": "On punctuation"}
    return STATISTICS[name].label if name in STATISTICS else classes.get(name, name)
