"""What calls on the same text share: where their queries and keys lie, and what follows from it."""

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import version_of
from headwise.capture import AttentionCall, GraphCall, Site, StackInputs, Text
from headwise.errors import UnsupportedError
from headwise.kernels import AttentionRule, RowRequest
from headwise.masks import Mask, Window
from headwise.masks.parts import Dense
from headwise.watch._pairs import Columns, Pairs
from headwise.watch._pass import Pass
from headwise.watch._positions import Positions, positions_across, positions_within
from headwise.watch._recorded import Covered
from headwise.watch._request import Request
from headwise.watch._spans import SpanMembers, Spans

# Layers may alternate between several masks, and between self- and cross-attention.
_MOST = 8
# The numbers of a mask up to which it is copied, to be compared with those of later passes.
_COPIED = 1 << 22
# The booleans from which on they are compared eight at a time: in a seventh of the time for 2^17.
_LARGE = 1 << 12


@dataclass(frozen=True, eq=False)
class CallLayout:
    """Where the queries and keys of a call lie in their texts, and what follows from that alone.

    Attributes:
        request: The statistics of the watch.
        key_text: The text of the keys.
        columns: The keys of each query under every offset, relation and set of pairs.
        spans: Which keys and queries belong to named stretches, if the request has any.
        visible: The mask of the calls.
        may_wait: Whether the mask stays as it is, and is one for all heads.
        groups: The calls that wait to be computed together, by what else they have in common.
        eligible: The rows that count, by the number of heads and whether there is a sink. To find
            them takes 2 ms for 2 texts of 512 tokens and 12 heads, where the kernel takes 9.
    """

    request: Request
    key_text: Text
    positions: Positions
    columns: Columns
    spans: SpanMembers | None
    visible: Mask | None
    may_wait: bool
    eligible: dict[tuple[int, bool], Any] = field(default_factory=dict)
    groups: dict[Hashable, "Group"] = field(default_factory=dict)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The most keys of a query, for every name."""
        return {name: keys.shape[-1] for name, keys in self.columns.items()}

    @cached_property
    def row_request(self) -> RowRequest:
        """What the kernel must compute for each row, as far as its values do not matter.

        To find it takes 0.1 ms.
        """
        request, positions = self.request, self.positions
        members = [self._class_members()] if request.classes else []
        members += [self.spans.keys.float()] if self.spans else []
        return RowRequest(
            entropy="entropy" in request.statistics,
            # Between positions of two texts there is none.
            distance="distance" in request.statistics and not positions.is_cross,
            participation="participation" in request.statistics,
            received=positions.query_real if request.received else None,
            keys=torch.cat([*self.columns.values()], dim=-1) if self.columns else None,
            classes=torch.cat(members, dim=-1) if members else None,
            top=bool(request.top),
            query_at=None if positions.are_columns else positions.query_position,
            key_at=None if positions.are_columns else positions.keys.position,
        )

    def _class_members(self) -> Float[Tensor, "B S C"]:
        """Which keys belong to each class of tokens."""
        classes, ids, real = self.request.classes, self.key_text.ids, self.positions.key_real
        if ids is None or ids.shape[1] != real.shape[1]:
            raise UnsupportedError(
                f"observe: the classes {', '.join(classes)} need whole texts: of each key its id "
                f"in input_ids, and of {real.shape[1]} keys "
                f"{'none' if ids is None else ids.shape[1]} have one. The others are of a cache, "
                f"or learned, as by prompt tuning. Request no classes here: hw.Request()."
            )
        of_classes = [
            torch.isin(ids, torch.tensor(sorted(tokens), device=ids.device))
            for tokens in classes.values()
        ]
        return (torch.stack(of_classes, dim=-1) & real[..., None]).float()


class Waiting(NamedTuple):
    """A call that waits: copies of its queries and keys, and where its sums go."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    site: Site
    first_text: int
    of_pass: Pass


@dataclass(frozen=True, eq=False)
class Group:
    """Calls that differ in queries and keys alone, and are computed as one, heads side by side.

    Masks, positions and columns have no axis of heads, or broadcast over it, so that they hold for
    several calls as for one, and grouped heads stay grouped.

    Attributes:
        size: The number of elements of the queries and keys of one call.
        most: The number of elements that may wait on their device.
    """

    rule: AttentionRule
    layout: CallLayout
    size: int
    most: int
    waiting: list[Waiting] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Place:
    """What holds for all calls of a pass that differ in queries, keys and module alone.

    Attributes:
        key: By what it is known in the pass.
        kind: How keys relate to queries: "cross", "within" or "condensed".
        is_plain: Whether queries, keys and a mask are all that their statistics follow from.
        inputs: What the stack reads; as `real`, kept alive because `key` has its identity.
    """

    key: Hashable
    kind: str
    covered: Covered
    rule: AttentionRule
    is_plain: bool
    n_keys: int
    inputs: StackInputs
    real: Tensor | None

    @cached_property
    def is_whole(self) -> bool:
        """Whether the keys are a text without padding, of which a pass reads the last.

        To find it takes 10 us, a tenth of what a decoded token costs a layer.
        """
        text, S = self.inputs.text, self.n_keys
        if text.tokens not in (None, 1) or text.cached not in (None, S - 1):
            return False
        real, positions = text.real, text.positions
        if real is not None and (real.shape[1] != S or not bool(real.all())):
            return False
        return positions is None or (positions.shape[1] == 1 and bool((positions == S - 1).all()))


class CallLayouts:
    """The layouts of the latest calls, reused for calls on the same text or a similar one.

    Within a pass a layout is known by the objects that it follows from, and for a later pass by
    their values: lengths, padding, positions and mask. With relations, classes or spans in the
    request a layout is for one text only.

    Attributes:
        pairs: The pairs of queries and keys of the current texts.
        spans: The named stretches of the current texts.
    """

    def __init__(self, request: Request, stacks: Collection[str]) -> None:
        self.pairs, self.spans = Pairs(request), Spans(request, stacks)
        self._request = request
        self._known: deque[tuple[tuple[Any, ...], tuple[Tensor | None, ...], CallLayout]]
        self._known = deque(maxlen=_MOST)
        self._is_rewritten: Tensor | None = None  # whether `check` refuses

    def place(
        self, site: Site, call: AttentionCall, inputs: StackInputs, kept: Any, pass_: Pass
    ) -> Place:
        """The place of a call, which it shares with calls alike of the same pass."""
        q, k, rule, real = call.q, call.k, call.rule, call.real
        received = None if call.module_call is None else call.module_call.shape
        is_plain = rule.bias is None and rule.sinks is None and type(call) is AttentionCall
        alike = call.alike or (
            q.shape, k.shape, q.dtype, q.device, is_plain, rule.scale, rule.softcap,
            _identity(rule.visible), _identity_of(real),
        )  # fmt: skip
        key = key_of_place(alike, received, site, inputs)
        place: Place | None = pass_.shared.get(key)
        if place is None:
            kind = _kind(site, call, inputs.text.tokens, received, kept)
            covered = _covered(call, inputs.text.tokens, received)
            place = Place(key, kind, covered, rule, is_plain, k.shape[2], inputs, real)
            pass_.shared[key] = place
        return place

    def alike(self, call: GraphCall, pass_: Pass) -> Hashable:
        """The same for calls of graphs that differ in module and numbers alone in a pass.

        Masks are compared by value, since a graph may write to memory again without a trace: on a
        GPU, for which the host would wait, those of the same memory when totals are read.
        """
        key, mask = call.rule_key, call.mask
        is_read = mask is None or _is_read_at_once(mask)
        if key is None or (mask is not None and mask.numel() > _COPIED):
            return object() if is_read else None
        if mask is not None and not is_read:
            key = *key, mask.data_ptr(), mask.shape, mask.stride()
        known: list[tuple[Any, object]] = pass_.shared.setdefault(key, [])
        for of_alike, alike in known:
            if not is_read:
                pass_.add(partial(self._note_rewritten, (of_alike != mask).any()))
            if not is_read or _equal(of_alike, mask):
                return alike
        known.append((None if mask is None else mask.clone(), object()))
        return known[-1][1]

    def _note_rewritten(self, is_rewritten: Tensor) -> None:
        before = self._is_rewritten
        self._is_rewritten = is_rewritten if before is None else before | is_rewritten

    def check(self) -> None:
        """Refuse passes in which a graph has used the memory of one mask for another.

        Raises:
            UnsupportedError: it has, on a device where masks are not read while it runs.
        """
        if self._is_rewritten is not None and bool(self._is_rewritten):
            raise UnsupportedError(
                "observe: a compiled graph has used the memory of one mask for another one, which "
                "is not seen in time on its device. Watch the model uncompiled: "
                "torch.compiler.set_stance('force_eager')."
            )

    def of(self, place: Place, site: Site, call: AttentionCall, pass_: Pass) -> CallLayout:
        """The layout of a call: that of an earlier call where it fits, or a new one."""
        layout: CallLayout | None = pass_.shared.get(place)
        if layout is None:
            layout = pass_.shared[place] = self._by_value(place, site, call, pass_)
        return layout

    def _by_value(self, place: Place, site: Site, call: AttentionCall, pass_: Pass) -> CallLayout:
        q, k, visible = call.q, call.k, call.rule.visible
        text, cross = place.inputs.text, place.inputs.cross_text
        is_rule = visible is None or isinstance(visible, Window)
        mask = visible.visible if isinstance(visible, Dense) else None
        lengths = text.tokens, None if text.cached is None else int(text.cached), cross.tokens
        shape = q.shape[0], q.shape[2], k.shape[0], k.shape[2], k.device
        numbers = (place.kind, *shape, *lengths, visible if is_rule else None)
        tensors = text.real, text.positions, cross.real, call.real, mask
        stays = is_rule or (mask is not None and mask.numel() <= _COPIED)
        may_recur = stays and not self._request.is_of_text
        for known_numbers, known_tensors, layout in self._known if may_recur else ():
            if known_numbers == numbers and all(map(_equal, known_tensors, tensors)):
                return layout
        if stays and mask is not None:  # the model may change its own in place
            mask = mask.clone()
            visible = Dense(mask)
        may_wait = stays and (visible is None or visible.batch[1] == 1)
        of_queries, key_text, positions = _located(call, place.inputs, place.kind)
        columns = self.pairs.columns(positions, of_queries, pass_)
        spans = self.spans.members(site, positions, key_text, text, pass_)
        layout = CallLayout(self._request, key_text, positions, columns, spans, visible, may_wait)
        if may_recur:
            copies = (None if x is None else x.clone() for x in tensors[:-1])
            self._known.appendleft((numbers, (*copies, mask), layout))
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


def key_of_place(
    alike: Hashable, received: tuple[int, ...] | None, site: Site, inputs: StackInputs
) -> Hashable:
    """By what the place of a call is known, which may wait like an earlier one of the pass."""
    return alike, received, site.cross, id(inputs)


def _kind(
    site: Site,
    call: AttentionCall,
    tokens: int | None,
    received: tuple[int, ...] | None,
    kept: int | Tensor | None,
) -> str:
    """How keys relate to queries: of another text, of the same, or condensed.

    A model that drops or pools tokens leaves their positions unknown.

    Args:
        tokens: The number of tokens that the stack reads.
        received: The shape of the token vectors that the module receives.
        kept: The logits that the pass returns: layers that write no keys may compute the queries
            of these alone.
    """
    if site.cross:
        return "cross"
    T, S = call.q.shape[2], call.k.shape[2]
    if tokens is not None and T < tokens <= S and received is not None and received[1] == T:
        if isinstance(kept, Tensor) and kept.numel() == T:
            raise UnsupportedError(
                f"observe: {site} computes {T} of {tokens} queries, those of "
                f"logits_to_keep={kept.tolist()}. Leave logits_to_keep out, or give a number."
            )
        if kept == T:  # the last ones
            return "within"
    # More keys than queries come from a cache, unless the module received them all.
    condensed = T > S or (T < S and received is not None and received[1] == S)
    return "condensed" if condensed or (tokens is not None and tokens > T) else "within"


def _covered(call: AttentionCall, tokens: int | None, shape: tuple[int, ...] | None) -> Covered:
    B, T = call.q.shape[0], call.q.shape[2]
    if shape is not None and T not in shape and shape[1] > T:
        if shape[0] * shape[1] == B * T:
            return Covered(B * T, B * T, T)
        return Covered(B * T, B * shape[1])
    # Instead of more tokens there may be latents or pooled positions.
    return Covered(B * T, B * max(T, tokens or 0))


def _identity(visible: Mask | None) -> Any:
    """What tells a mask apart within a pass, while it is kept."""
    if visible is None:
        return None
    if isinstance(visible, Window):
        return visible.left, visible.right
    return _identity_of(visible.visible) if isinstance(visible, Dense) else id(visible)


def _identity_of(x: Tensor | None) -> Any:
    """What tells a tensor apart while it is kept: its memory, and how often that was changed."""
    if x is None:
        return None
    if x.is_inference():  # a change leaves no trace
        return object()
    return x.data_ptr(), x.shape, x.stride(), version_of(x)


def _is_read_at_once(mask: Tensor) -> bool:
    return mask.is_cpu


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.dtype == torch.bool and a.numel() > _LARGE and _holds_words(a) and _holds_words(b):
        a, b = a.view(torch.int64), b.view(torch.int64)
    return torch.equal(a, b)


def _holds_words(x: Tensor) -> bool:
    """Whether bytes can be read eight at a time."""
    return x.is_contiguous() and x.shape[-1] % 8 == 0 and x.storage_offset() % 8 == 0
