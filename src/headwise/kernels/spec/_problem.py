"""One attention to compute: its inputs, its rule, and what is wanted of it."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from headwise.kernels.spec._rule import AttentionRule


class Extras(NamedTuple):
    """What is returned besides the heads."""

    weights: bool = False
    lse: bool = False
    entropy: bool = False


HEADS_ALONE = Extras()


class AttentionProblem(NamedTuple):
    """What every kernel is given, be it asked whether it can, how it would, or to compute."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    dropout_p: float = 0.0  # the share of weights dropped
    extras: Extras = HEADS_ALONE
