"""One attention call of any model, in the words of this library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._torch_private import is_compiler_loaded
from headwise.kernels import (
    AttentionRule,
    RowRequest,
    RowStatistics,
    row_statistics,
    statistics_kernel,
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class AttentionCall:
    """What went into an attention and what heads came out of it.

    Attributes:
        module: The module that attended.
        rule: How its logits became weights.
        heads: The per-head outputs that the model computed itself, or what it made of them;
            empty in a call that it has not answered yet.
        watched: How the call was heard.
        kernel: The name of the implementation that computed them.
        exact: Whether `heads` follows from the rest: no weights were dropped.
        cross: Whether the keys belong to another text than the queries.
        join: What the model makes of its heads before they can be seen; None: nothing.
        real: False for keys that are padding, where the call itself tells.
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
    cross: bool
    join: Callable[[Tensor], Tensor] | None = None
    real: Bool[Tensor, "B S"] | None = None

    @property
    def statistics_kernel(self) -> str:
        """What computes its statistics."""
        return statistics_kernel(self.q, self.k, self.v, self.rule)

    def row_statistics(self, request: RowRequest) -> RowStatistics:
        """What the weights of every row were like; a largest logit that is not known is NaN."""
        return row_statistics(self.q, self.k, self.v, self.rule, request)


Hear = Callable[[AttentionCall], None]
# Heads for a call that the model has not answered; None: it shall answer it itself.
Answer = Callable[[AttentionCall], Float[Tensor, "B H T Dv"] | None]


def uncompiled(tell: Callable[P, R]) -> Callable[P, R]:
    """What is heard is for Python to take in, also where the model around it is compiled."""
    # Nothing is compiled in a process that has not imported the compiler, which is slow to.
    apart: Any = torch.compiler.disable
    return apart(tell) if is_compiler_loaded() else tell
