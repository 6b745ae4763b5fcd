"""One attention to compute: its inputs, its rule, and the requested extras."""

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
    """The input of a kernel: to decide whether and how it computes this, and to compute it."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    dropout_p: float = 0.0  # the share of weights dropped
    extras: Extras = HEADS_ALONE
