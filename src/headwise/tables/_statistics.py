"""The statistics of attention: what each one measures, its unit and its range."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["STATISTICS", "Statistic"]


@dataclass(frozen=True)
class Statistic:
    """The unit and the range of a statistic, and a phrase that explains it."""

    unit: str
    low: float
    high: float
    meaning: str


_SHARE = ("share", 0.0, 1.0)
STATISTICS: Mapping[str, Statistic] = {
    "entropy": Statistic("nats", 0.0, np.inf, "how widely the head spreads its attention"),
    "max_weight": Statistic(*_SHARE, "the largest weight of a query"),
    "first": Statistic(*_SHARE, "attention to the first token of the text, where visible"),
    "self": Statistic(*_SHARE, "attention of a token to itself"),
    "previous": Statistic(*_SHARE, "attention to the token before, where visible"),
    "next": Statistic(*_SHARE, "attention to the token after, where visible"),
    "distance": Statistic("tokens", 0.0, np.inf, "mean distance of the attended keys"),
    "max_logit": Statistic("logit", -np.inf, np.inf, "the largest scaled query·key product"),
    "lse": Statistic("logit", -np.inf, np.inf, "log of the sum of the exponentiated logits"),
    "sink": Statistic(*_SHARE, "attention on a sink that is not a token"),
    "participation": Statistic(
        "keys", 1.0, np.inf, "effective number of attended keys, (Σp)² / Σp²"
    ),
    "output_norm": Statistic(
        "norm", 0.0, np.inf, "norm of the head's contribution to the residual stream"
    ),
}
