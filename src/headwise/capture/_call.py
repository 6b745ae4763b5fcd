"""An attention call of a model, as it is handed on."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._torch_private import FUSED_ATTENTION
from headwise.capture._running_calls import ModuleCall
from headwise.capture._site import Site
from headwise.kernels import (
    AttentionRule,
    RowRequest,
    RowStatistics,
    row_statistics,
    statistics_kernel,
)
from headwise.layer import HeadAttention


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
        module_call: The call of the module, while it has not returned; None if it is unknown.
        alike: The same for calls of a pass that differ in module and numbers alone; None if that is
            unknown.
        in_graph: Makes such a call of what an operator in a compiled graph is given; None if that
            does not tell all of it.
    """

    module: nn.Module
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    heads: Float[Tensor, " B #H T _"]
    watched: str
    kernel: str
    exact: bool
    cross: bool | None = None
    join: Callable[[Tensor], Tensor] | None = None
    real: Bool[Tensor, "B S"] | None = None
    ours: bool = False
    module_call: ModuleCall | None = None
    alike: Hashable = None
    in_graph: "OfGraph | None" = None

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
# Receives the queries and keys of a call at a site like an earlier one of the pass (`alike`);
# False if it has to be described.
OnRepeat = Callable[[Site, Hashable, ModuleCall, Tensor, Tensor], bool]
# Computes the heads of a call in place of the model; None leaves the call to the model.
Answer = Callable[[AttentionCall], Float[Tensor, "B H T Dv"] | None]


class GraphCall(NamedTuple):
    """What an operator in a compiled graph is given of an attention call.

    Attributes:
        values: None where the graph computes the heads.
    """

    module: nn.Module
    implementation: str
    q: Float[Tensor, "..."]
    k: Float[Tensor, "..."]
    values: Float[Tensor, "..."] | None
    mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    scale: float | None
    softcap: float | None
    is_causal: bool | None

    @property
    def v(self) -> Float[Tensor, "..."]:
        """The values; of width 0 where they are not given."""
        return self.k[..., :0] if self.values is None else self.values

    @property
    def heads(self) -> Float[Tensor, "... 0"]:
        """Heads are not given: they have width 0."""
        return self.q[..., :0]

    @property
    def needs_heads(self) -> bool:
        """Whether the graph leaves the heads to the operator."""
        return self.values is not None

    @property
    def rule_key(self) -> tuple[Any, ...] | None:
        """What the rule follows from besides the mask; None if that is not numbers alone."""
        module, name, q, k, _, _, bias, sinks, *numbers = self
        if bias is not None or sinks is not None or q.ndim != 4:
            return None
        of_module: Hashable = None  # torch's function asks no module
        if isinstance(module, HeadAttention):  # which has a rule of its own
            of_module = module
        elif name != FUSED_ATTENTION:
            of_module = type(module), getattr(module, "is_causal", True)
        return of_module, name, q.shape, k.shape, q.dtype, q.device, *numbers


OfGraph = Callable[[GraphCall], AttentionCall]
