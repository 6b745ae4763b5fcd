"""The contract of a scoring method."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel

PerHead = Float[Tensor, "M N"]
HeadMask = Bool[Tensor, " N"]

Method = Callable[[GatedModel, HeadMask, Progress], PerHead]
"""Scores every head in every text of a gated model, from which the masked heads are removed."""
