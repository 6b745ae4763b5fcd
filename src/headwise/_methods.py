"""The methods of `importance`, by name; commands list them before torch is imported."""

from collections.abc import Mapping
from typing import NamedTuple


class Method(NamedTuple):
    """What a method needs and leaves; its scores are computed in `scoring.methods`.

    Attributes:
        by_text: Whether it scores each text by itself, so that it may read a corpus in shards.
        resumable: Whether it takes long and saves its scores as it goes.
    """

    by_text: bool = True
    resumable: bool = False


METHODS: Mapping[str, Method] = {
    "half-gate": Method(),
    "gradient": Method(),
    "curvature": Method(),
    "ablation": Method(by_text=False, resumable=True),  # by the mean over all texts
    "zero-ablation": Method(resumable=True),
    "gates": Method(by_text=False),
}
