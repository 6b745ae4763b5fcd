"""One attention call of any model, and the call of the module that it is in."""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._count_names import HEADS
from headwise._torch_private import MODULE_CALL
from headwise.kernels import (
    AttentionRule,
    RowRequest,
    RowStatistics,
    row_statistics,
    statistics_kernel,
)

# The local variable, in the frame of a module's call, that holds what is known about the call.
_KNOWN = "_headwise_call"
# Parts of the names of arguments that are another text, as in cross-attention.
_CONTEXT = ("encoder", "context", "memory", "cross", "key", "source", "kv")


@dataclass(eq=False)
class ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        queries: The queries of its latest attention call.
        counted: The sites whose tokens were counted during this call.
        number: Tells it apart from all others.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queries: Tensor | None = None
    counted: set[Any] = field(default_factory=set)
    number: int = field(default_factory=count(1).__next__)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The arguments that may be token vectors: float tensors with three axes."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        return [x for x in tensors if x.ndim == 3 and x.is_floating_point()]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the token vectors that the module receives; None if that is unknown."""
        return tuple(self.inputs[0].shape) if self.inputs else None

    @property
    def n_ids(self) -> int | None:
        """The length of the first argument that may be token ids; None if none may."""
        tensors = (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor))
        ids = (x for x in tensors if x.ndim == 2 and not x.is_floating_point())
        return next((x.shape[1] for x in ids), None)

    def is_cross_attention(self, T: int, S: int) -> bool | None:
        """Whether `S` keys come from another text than `T` queries; None if that is unknown.

        More keys than queries are not enough: keys of the same text may come from a cache.
        """
        if not self.inputs:
            return None
        first, *others = self.inputs
        if others and first is others[0]:
            return False
        # Embeddings of positions are as long as the text that they are added to.
        if any(x.shape[1] == S and (S != T or self._is_context(x)) for x in others):
            return True
        return False if first.shape[1] == T else None

    def _is_context(self, x: Tensor) -> bool:
        """Whether the name of an argument says that it is another text."""
        parameters = inspect.signature(self.module.forward).parameters
        names = [name for name, value in self.kwargs.items() if value is x]
        names += [name for name, value in zip(parameters, self.args, strict=False) if value is x]
        return any(part in name for name in names for part in _CONTEXT)


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


def running_calls(modules: Container[int]) -> Iterator[ModuleCall]:
    """The calls of some modules that have not returned, the innermost first.

    Frames are read in place of hooks, which would cost at every call of every module. What is
    found stays in its frame, so that two attention calls within one call of a module know it.

    Args:
        modules: Their identities.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            variables = frame.f_locals
            module = variables["self"]
            if id(module) in modules:
                call = variables.get(_KNOWN)
                if call is None:
                    call = ModuleCall(module, variables["args"], variables["kwargs"])
                    variables[_KNOWN] = call
                yield call
        frame = frame.f_back


def n_heads_of(module: nn.Module) -> int:
    """The number of heads that a module declares; 1 if it declares none."""
    counts = [getattr(module, name, None) for name in (*HEADS, "nhead")]
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


def reason_unsupported(call: AttentionCall, around: Iterable[ModuleCall]) -> str | None:
    """Why a call is not attention between the tokens of a text; None if it is.

    The shapes of the module's inputs decide: a layer that receives windows attends within texts.

    Args:
        around: The calls of all modules that run.
    """
    shape = None if call.module_call is None else call.module_call.shape
    if shape is None:
        return None
    B, H, T, S = *call.q.shape[:3], call.k.shape[2]
    among = f"not supported: attends among {T} positions where it was given {shape[1]} tokens"
    if shape[1] > T and T not in shape and _are_chunks(call.module, H):
        return among
    if T in shape[1:] or any(outer.n_ids == T for outer in around):
        return None
    if T == S and shape[2] == H * T and call.v.shape[-1] == shape[1]:
        return f"not supported: attends among {T} channels of each head, not among tokens"
    if shape[1] != S and (shape[1] == H or B * T == shape[0] * shape[1] == B):
        return f"not supported: attends among {S} positions for each of {shape[1]} tokens"
    windows = shape[0] * shape[1] == B * T
    return among if shape[1] > T and T == S and not windows else None


def _are_chunks(module: nn.Module, H: int) -> bool:
    """Whether `H` heads are several chunks of the heads that a module declares."""
    heads = n_heads_of(module)
    return 1 < heads < H and H % heads == 0
