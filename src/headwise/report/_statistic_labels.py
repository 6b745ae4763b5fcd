"""The names of statistics in words, as pages show them."""

_LABELS = {
    "entropy": "Entropy",
    "max_weight": "Largest weight",
    "first": "On the first token",
    "self": "On the token itself",
    "previous": "On the previous token",
    "next": "On the next token",
    "distance": "Distance",
    "max_logit": "Largest logit",
    "lse": "Log-sum-exp",
    "sink": "On the learned sink",
    "participation": "Attended keys",
    "output_norm": "Output norm",
    "special": "On special tokens",
    "punctuation": "On punctuation",
}


def statistic_label(statistic: str) -> str:
    """The name of a statistic in words; one that a request has named keeps its own."""
    return _LABELS.get(statistic, statistic)
