"""One attention call of any model, in the words of this library."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from headwise.kernels import Rule


@dataclass(frozen=True)
class Call:
    """What went into an attention and what heads came out of it.

    Attributes:
        module: The module that attended.
        rule: How its logits became weights.
        heads: The per-head outputs that the model computed itself.
        kernel: The name of the implementation that computed them.
        exact: Whether `heads` follows from the rest: no weights were dropped.
        cross: Whether the keys belong to another text than the queries.
    """

    module: nn.Module
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: Rule
    heads: Float[Tensor, "B H T Dv"]
    kernel: str
    exact: bool
    cross: bool
