"""The statistics of attention: what each one measures, its unit and its range."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["STATISTICS", "Statistic"]


@dataclass(frozen=True)
class Statistic:
    """What a number means: its unit, its range, and a sentence about it."""

    unit: str
    low: float
    high: float
    says: str


_SHARE = ("share", 0.0, 1.0)
STATISTICS: Mapping[str, Statistic] = {
    "entropy": Statistic("nats", 0.0, np.inf, "how widely the head spreads its attention"),
    "max_weight": Statistic(*_SHARE, "the largest weight of a query"),
    "first": Statistic(*_SHARE, "attention given to the first token of the text, where visible"),
    "self": Statistic(*_SHARE, "attention a token gives to itself"),
    "previous": Statistic(*_SHARE, "attention given to the token before, where visible"),
    "next": Statistic(*_SHARE, "attention given to the token after, where visible"),
    "distance": Statistic("tokens", 0.0, np.inf, "how far away the head looks on average"),
    "max_logit": Statistic("logit", -np.inf, np.inf, "the largest scaled query·key product"),
    "lse": Statistic("logit", -np.inf, np.inf, "log of the sum of the exponentiated logits"),
    "sink": Statistic(*_SHARE, "attention lost to a sink that is no token"),
    "participation": Statistic("keys", 1.0, np.inf, "how many keys take part, (Σp)² / Σp²"),
    "output_norm": Statistic("norm", 0.0, np.inf, "how much the head writes, by its length"),
}
