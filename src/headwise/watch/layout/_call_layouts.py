"""What calls on the same text share: positions, columns, requests and eligible rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwise._torch_private import version_of
from headwise.kernels import RowRequest
from headwise.masks import Mask, Window
from headwise.masks.parts import Dense
from headwise.models import AttentionCall, Site, StackInputs, Text
from headwise.watch._request import Request
from headwise.watch.layout._pairs import Columns, Pairs
from headwise.watch.layout._positions import Positions, positions_across, positions_within
from headwise.watch.layout._spans import SpanMembers, Spans

# Layers may alternate between several masks, and between self- and cross-attention.
_MOST = 8


# The rows for which a statistic is defined and its value under even weights; None: every real
# row, and no such value.
Rule = tuple[Bool[Tensor, "B H T"] | None, Float[Tensor, "B H T"] | None]


def stacked(
    values: Sequence[Shaped[Tensor, "B H T"]], like: Shaped[Tensor, "B H T"]
) -> Shaped[Tensor, "K B H T"]:
    """The values of all statistics together; a request may have none."""
    return torch.stack(list(values)) if values else like.new_empty((0, *like.shape))


@dataclass(frozen=True)
class EligibleRows:
    """The rows that count for each of `K` statistics, and what follows from masks alone.

    Attributes:
        bits: All ones for rows that count, and zeros for the others.
        floor: 0 for rows that count, and minus infinity for the others.
        count: The number of rows of each of `M` texts.
        even: The sums under even attention; NaN where that has no meaning.
        undefined: Whether no row of a head counts.
    """

    bits: Int[Tensor, "K B H T"]
    floor: Float[Tensor, "K B H T"]
    count: Float[Tensor, "K M H"]
    even: Float[Tensor, "K M H"]
    undefined: Bool[Tensor, "K H"]

    @classmethod
    def of(
        cls, rules: Sequence[Rule], real: Bool[Tensor, "B H T"], positions: Positions
    ) -> "EligibleRows":
        """The rows that are real and eligible by the rule of each statistic."""
        rows = stacked([real if rule is None else rule for rule, _ in rules], real) & real
        nowhere = torch.full(real.shape, torch.nan, device=real.device)
        values = stacked([nowhere if even is None else even for _, even in rules], nowhere)
        even = positions.sums(torch.where(rows, values, 0.0))
        no_even = torch.tensor(
            [even is None for _, even in rules], dtype=torch.bool, device=real.device
        )
        count = positions.sums(rows)
        return cls(
            bits=-rows.to(torch.int32),
            floor=torch.where(rows, 0.0, -torch.inf),
            count=count,
            even=even.masked_fill(no_even[:, None, None], torch.nan),
            undefined=count.sum(1) == 0,
        )

    def sums_of(
        self, values: Float[Tensor, "K n B H T"], positions: Positions
    ) -> tuple[Float[Tensor, "3 K n M H"], Float[Tensor, "K n H"]]:
        """The sums of `n` calls on the same `M` texts, and the largest values.

        Args:
            values: Overwritten, since new memory costs more than all the sums.
        Returns:
            The number of rows, the sums over them and the sums under even attention, by text; and
            the maximum of each statistic, NaN where no row counts.
        """
        # As bits, since filling by a mask takes longer than all the rest.
        as_bits = torch.int64 if values.dtype == torch.float64 else torch.int32
        values.view(as_bits).bitwise_and_(self.bits[:, None])
        sums = positions.sums(values)
        count, even = (x[:, None].expand_as(sums) for x in (self.count, self.even))
        highest = values.add_(self.floor[:, None]).amax((2, 4)).double()
        undefined = self.undefined[:, None]
        return torch.stack([count, sums, even]), highest.masked_fill(undefined, torch.nan)


@dataclass
class CallLayout:
    """Where the queries and keys of a call lie in their texts, and what follows from that alone.

    Attributes:
        key_text: The text of the keys.
        columns: The keys of each query under every offset, relation and set of pairs.
        is_shared: Whether later calls may share it, so that kernels may prepare for them.
        spans: Which keys and queries belong to named stretches, if the request has any.
        requests: What kernels compute for such a call, by whether it includes the heads.
        eligible: The rows that count, by the number of heads and whether there is a sink.
    """

    key_text: Text
    positions: Positions
    columns: Columns
    spans: SpanMembers | None = None
    is_shared: bool = False
    requests: dict[bool, RowRequest] = field(default_factory=dict)
    eligible: dict[tuple[int, bool], EligibleRows] = field(default_factory=dict)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The most keys of a query, for every name."""
        return {name: keys.shape[-1] for name, keys in self.columns.items()}


class CallLayouts:
    """The layouts of the latest calls, reused for calls on the same text or a similar one.

    Whether layers of a pass read the same text is known without comparing it. For a later pass
    lengths, padding and positions are compared; with relations, classes or spans in the request a
    layout is for one text only.

    Attributes:
        pairs: The pairs of queries and keys of the current texts.
        spans: The named stretches of the current texts.
    """

    def __init__(self, request: Request, stacks: Collection[str]) -> None:
        self.pairs, self.spans = Pairs(request), Spans(request, stacks)
        self._is_of_text = bool(
            request.classes or request.relations or request.pairs or request.spans
        )
        self._known: list[_Known] = []

    def of(
        self, site: Site, call: AttentionCall, inputs: StackInputs, kind: str, forward_pass: int
    ) -> CallLayout:
        """The layout of a call: that of an earlier call where it fits, or a new one."""
        shape = _shape(call, kind)
        for known in self._known:
            if known.shape == shape and known.fits(call.rule.visible, inputs):
                return known.layout
        text, key_text, positions = _located(call, inputs, kind)
        columns = self.pairs.columns(positions, text, forward_pass)
        spans = self.spans.members(site, positions, key_text, inputs.text, forward_pass)
        layout = CallLayout(key_text, positions, columns, spans)
        if call.real is None:  # or the call says something about its text by itself
            tensors = None
            if not self._is_of_text:
                tensors = [_Snapshot.of(x) for x in _padding_and_positions(inputs)]
            visible = call.rule.visible
            mask = _Snapshot.of(visible.visible if isinstance(visible, Dense) else None)
            layout.is_shared = mask.is_followed
            known = _Known(shape, inputs, tensors, visible, mask, layout)
            self._known = [known, *self._known[: _MOST - 1]]
        return layout


def _located(call: AttentionCall, inputs: StackInputs, kind: str) -> tuple[Text, Text, Positions]:
    """The text of the queries, the text of the keys, and the positions of both."""
    if kind == "cross":
        key_text = inputs.cross_text.filled(Text(real=call.real))
        return inputs.text, key_text, positions_across(call, inputs.text, key_text)
    text = inputs.text.filled(Text(real=call.real)).written()
    if kind == "condensed":
        return text, Text(), positions_across(call, text, Text())
    return text, text, positions_within(call, text)


def _shape(call: AttentionCall, kind: str) -> tuple[Any, ...]:
    q, k = call.q, call.k
    return kind, q.shape[0], q.shape[2], k.shape[0], k.shape[2], k.device, call.real is None


def _lengths(inputs: StackInputs) -> tuple[int | Tensor | None, ...]:
    """The lengths of a text and of the one it attends to."""
    return inputs.text.tokens, inputs.text.cached, inputs.cross_text.tokens


def _padding_and_positions(inputs: StackInputs) -> tuple[Tensor | None, ...]:
    """What determines, with the lengths, the positions in both texts."""
    return inputs.text.real, inputs.text.positions, inputs.cross_text.real


@dataclass
class _Known:
    """A layout, and what identifies the calls that share it.

    Attributes:
        inputs: Those of the latest pass; each pass has its own.
        tensors: The padding and positions of the inputs; None if the layout is for one text only.
        mask: The mask of the call, if it is a tensor.
    """

    shape: tuple[Any, ...]
    inputs: StackInputs
    tensors: "Sequence[_Snapshot] | None"
    visible: Mask | None
    mask: "_Snapshot"
    layout: CallLayout

    def fits(self, visible: Mask | None, inputs: StackInputs) -> bool:
        """Whether a call of this shape certainly has the layout."""
        is_same_pass = inputs is self.inputs
        if not is_same_pass and not self._is_alike(inputs):
            return False
        if isinstance(visible, Dense):
            fits = isinstance(self.visible, Dense) and self.mask.equals(visible.visible)
        elif visible is None or isinstance(visible, Window):
            fits = type(visible) is type(self.visible) and visible == self.visible
        else:  # a rule may read tensors, which do not change within a pass
            fits = is_same_pass and visible is self.visible
        if fits:
            self.inputs = inputs
        return fits

    def _is_alike(self, inputs: StackInputs) -> bool:
        """Whether the inputs of another pass have the same lengths, padding and positions."""
        if self.tensors is None or _lengths(self.inputs) != _lengths(inputs):
            return False
        others = _padding_and_positions(inputs)
        return all(known.equals(x) for known, x in zip(self.tensors, others, strict=True))


@dataclass(frozen=True)
class _Snapshot:
    """A tensor as it was, to be compared with others.

    Attributes:
        version: How often it had been changed in place; None if `tensor` is a copy.
    """

    tensor: Tensor | None
    version: int | None = None

    @classmethod
    def of(cls, tensor: Tensor | None) -> "_Snapshot":
        if tensor is None:
            return cls(None)
        if tensor.is_inference():  # changes of it leave no trace
            return cls(tensor.clone())
        return cls(tensor, version_of(tensor))

    @property
    def is_followed(self) -> bool:
        """Whether a change in place would be noticed."""
        return self.tensor is None or self.version is not None

    def equals(self, other: Tensor | None) -> bool:
        """Whether another tensor certainly holds what this one did."""
        if self.tensor is None or other is None:
            return self.tensor is other
        if self.tensor.shape != other.shape or self.tensor.device != other.device:
            return False
        if self.version is not None:
            if version_of(self.tensor) != self.version:
                return False
            if _is_same_memory(self.tensor, other):
                return True
        return torch.equal(self.tensor, other)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
