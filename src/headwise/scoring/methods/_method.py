"""What a method is: how important every head is in every text."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from headwise.scoring._gated_model import GatedModel

Tell = Callable[[int, int], None]
PerHead = Float[Tensor, "M N"]
Gone = Bool[Tensor, " N"]

Method = Callable[[GatedModel, Gone, Tell], PerHead]
"""How important every head is in every text, when some heads are gone already."""
