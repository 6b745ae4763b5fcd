"""The methods of `importance`, by name; commands list them before torch is imported."""

from collections.abc import Mapping
from typing import NamedTuple


class Method(NamedTuple):
    """What a method needs; its scores are computed in `scoring.methods`.

    Attributes:
        by_text: Whether it scores each text by itself, so that batches of them can be scored apart.
    """

    by_text: bool = True


METHODS: Mapping[str, Method] = {
    "half-gate": Method(),
    "gradient": Method(),
    "curvature": Method(),
    "ablation": Method(by_text=False),  # by the mean over all texts
    "zero-ablation": Method(),
    "gates": Method(by_text=False),
}
