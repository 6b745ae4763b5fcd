"""What the calls of one forward pass share: positions, columns, requests and eligible rows."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from headwise._torch_private import version_of
from headwise.kernels import RowRequest
from headwise.masks import Mask, Window
from headwise.masks.parts import Dense
from headwise.models import AttentionCall, StackInputs, Text
from headwise.watch._eligible_rows import EligibleRows
from headwise.watch._pairs import Columns
from headwise.watch._positions import Positions
from headwise.watch._spans import SpanMembers

# Layers may alternate between several masks, and between self- and cross-attention.
_MOST = 8


@dataclass
class CallLayout:
    """Where the queries and keys of a call lie in their texts, and what follows from that alone.

    Attributes:
        key_text: The text of the keys.
        columns: The keys of each query under every offset, relation and set of pairs.
        spans: Which keys and queries belong to named stretches, if the request has any.
        requests: What kernels compute for such a call, by whether heads are among it.
        eligible: The rows that count, by the number of heads and whether there is a sink.
    """

    key_text: Text
    positions: Positions
    columns: Columns
    spans: SpanMembers | None = None
    requests: dict[bool, RowRequest] = field(default_factory=dict)
    eligible: dict[tuple[int, bool], EligibleRows] = field(default_factory=dict)


class CallLayouts:
    """The layouts of one forward pass, found again for calls on the same text and mask."""

    def __init__(self) -> None:
        self._pass = -1
        self._known: list[tuple[tuple[Any, ...], StackInputs, _Visible, CallLayout]] = []

    def find(
        self, forward_pass: int, call: AttentionCall, inputs: StackInputs, kind: str
    ) -> CallLayout | None:
        """The layout of an earlier call of this pass that fits a call, if there is one."""
        if forward_pass != self._pass:
            self._pass, self._known = forward_pass, []
        shape = _shape(call, kind)
        for known_shape, known_inputs, visible, layout in self._known:
            if known_shape == shape and known_inputs is inputs and visible.is_that_of(call):
                return layout
        return None

    def add(self, call: AttentionCall, inputs: StackInputs, kind: str, layout: CallLayout) -> None:
        """Keep the layout of a call that says nothing about its text by itself."""
        if call.real is None:
            entry = _shape(call, kind), inputs, _Visible.of(call.rule.visible), layout
            self._known = [*self._known[1 - _MOST :], entry]


def _shape(call: AttentionCall, kind: str) -> tuple[Any, ...]:
    q, k = call.q, call.k
    return kind, q.shape[0], q.shape[2], k.shape[0], k.shape[2], k.device, call.real is None


@dataclass(frozen=True)
class _Visible:
    """The mask of a call, to be compared with those of others."""

    mask: Mask | None
    tensor: Bool[Tensor, "#B #H #T #S"] | None = None
    version: int | None = None  # None: the tensor is a copy

    @classmethod
    def of(cls, mask: Mask | None) -> "_Visible":
        if not isinstance(mask, Dense):
            return cls(mask)
        tensor = mask.visible
        if tensor.is_inference():  # changes of it leave no trace
            return cls(mask, tensor.clone())
        return cls(mask, tensor, version_of(tensor))

    def is_that_of(self, call: AttentionCall) -> bool:
        """Whether a call certainly has the same mask."""
        mask = call.rule.visible
        if self.tensor is None:
            return mask is self.mask is None or (isinstance(mask, Window) and mask == self.mask)
        if not isinstance(mask, Dense) or mask.visible.shape != self.tensor.shape:
            return False
        other = mask.visible
        if self.version is not None:
            if version_of(self.tensor) != self.version:
                return False
            if _is_same_memory(self.tensor, other):
                return True
        return torch.equal(self.tensor, other)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device
