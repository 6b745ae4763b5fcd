"""One attention call of any model, in the terms of this library."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise.kernels import (
    AttentionRule,
    RowRequest,
    RowStatistics,
    row_statistics,
    statistics_kernel,
)


@dataclass(eq=False)  # frozen, it would take longer to make than to describe
class AttentionCall:
    """The inputs of an attention call and the heads it returned.

    Attributes:
        module: The module that attends.
        rule: How weights follow from queries and keys.
        heads: The per-head outputs that the model computed, or what `join` makes of them;
            empty (width 0) if the model has not computed them yet.
        watched: How the call was captured.
        kernel: The name of the implementation that computed the heads.
        exact: Whether `heads` follows from the other fields: no weights were dropped.
        cross: Whether the keys belong to another text than the queries; None if the modules
            around the call decide.
        join: What the model applies to its heads before they become visible; None: nothing.
        real: False for keys that are padding, if the call itself says so.
        ours: Whether the model runs on the native kernel, whose statistics come with these heads
            to the last bit.
    """

    module: nn.Module
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    heads: Float[Tensor, "B #H T _"]
    watched: str
    kernel: str
    exact: bool
    cross: bool | None = None
    join: Callable[[Tensor], Tensor] | None = None
    real: Bool[Tensor, "B S"] | None = None
    ours: bool = False

    @property
    def knows_logits(self) -> bool:
        """Whether the largest logit before any bias is known."""
        return True

    @property
    def statistics_kernel(self) -> str:
        """The kernel that computes the statistics of the call."""
        return statistics_kernel(self.q, self.k, self.v, self.rule)

    def row_statistics(self, request: RowRequest) -> RowStatistics:
        """The statistics of every row of weights; a largest logit that is unknown is NaN."""
        return row_statistics(self.q, self.k, self.v, self.rule, request)


OnCall = Callable[[AttentionCall], None]
# Computes the heads of a call in place of the model; None leaves the call to the model.
Answer = Callable[[AttentionCall], Float[Tensor, "B H T Dv"] | None]
