"""The statistics of attention: what each one measures, and its unit."""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["STATISTICS", "Statistic", "statistic_label"]


class Statistic(NamedTuple):
    """The name of a statistic in words, its unit, and a phrase that explains it."""

    label: str
    unit: str
    meaning: str
    from_zero: bool = True  # whether its least value is 0


STATISTICS: Mapping[str, Statistic] = {
    "entropy": Statistic("Entropy", "nats", "how widely the head spreads its attention"),
    "max_weight": Statistic("Largest weight", "share", "the largest weight of a query"),
    "first": Statistic(
        "On the first token", "share", "attention to the first token of the text, where visible"
    ),
    "self": Statistic("On the token itself", "share", "attention of a token to itself"),
    "previous": Statistic(
        "On the previous token", "share", "attention to the token before, where visible"
    ),
    "next": Statistic("On the next token", "share", "attention to the token after, where visible"),
    "distance": Statistic("Distance", "tokens", "mean distance of the attended keys"),
    "max_logit": Statistic(
        "Largest logit", "logit", "the largest scaled query·key product", from_zero=False
    ),
    "lse": Statistic(
        "Log-sum-exp", "logit", "log of the sum of the exponentiated logits", from_zero=False
    ),
    "sink": Statistic("On the learned sink", "share", "attention on a sink that is not a token"),
    "participation": Statistic(
        "Attended keys", "keys", "effective number of attended keys, (Σp)² / Σp²", from_zero=False
    ),
    "output_norm": Statistic(
        "Output norm", "norm", "norm of the head's contribution to the residual stream"
    ),
    "gate": Statistic("Gate", "share", "mean factor by which the model's gate multiplies the head"),
}


def statistic_label(name: str) -> str:
    """The name of a statistic in words; one that a request has named keeps its own."""
    classes = {"special": "On special tokens", "punctuation": "On punctuation"}
    return STATISTICS[name].label if name in STATISTICS else classes.get(name, name)
