"""The position of each query and key in its own text, on whichever side the padding is."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.capture import AttentionCall, Text
from headwise.errors import UnsupportedError
from headwise.masks.parts import keys_alone
from headwise.masks.tiles import Tile

_ROWS = 256  # rows of a mask that are evaluated together
NONE = -1  # the index of a key that does not exist


@dataclass(frozen=True)
class TextLayout:
    """The columns of each text of a batch; several texts may be packed into one row.

    Positions count within a text, without padding. `index` maps positions to columns: in row
    `row[m]`, the columns of text `m` are the `length[m]` entries from `start[m]` on, in order.
    Where `is_whole`, each row is one text without padding, whose positions are columns.
    """

    text: Int[Tensor, "B n"]  # the number of the text in each column
    position: Int[Tensor, "B n"]  # the position of each column in its text
    index: Int[Tensor, "B n"]
    row: Int[Tensor, " M"]
    start: Int[Tensor, " M"]
    length: Int[Tensor, " M"]
    is_whole: bool


@dataclass(frozen=True)
class Positions:
    """The text that each query and key belongs to, and their positions in it.

    Attributes:
        query_text: The number of the text that each query belongs to, and, among those of the
            keys, of the text that it may attend to.
        query_columns: Where the queries are among the keys; None in cross-attention.
        columns: Where the tokens of the pass are in their texts, cached and evicted columns
            included; None as well.
        evicted: The number of tokens of each row that the cache has evicted, before all keys.
    """

    query_real: Bool[Tensor, "B T"]
    key_real: Bool[Tensor, "B S"]
    query_position: Int[Tensor, "B T"]
    query_text: Int[Tensor, "B T"]
    keys: TextLayout
    query_columns: range | None
    columns: range | None
    evicted: Int[Tensor, "B 1"]

    @cached_property
    def n_texts(self) -> int:
        """The number of texts, of the queries as of the keys."""
        return len(self.keys.row)

    @property
    def is_cross(self) -> bool:
        """Whether the keys belong to another text than the queries."""
        return self.query_columns is None

    @property
    def are_columns(self) -> bool:
        """Whether positions are columns, and the queries are the last ones of the keys."""
        columns, n_keys = self.query_columns, self.key_real.shape[1]
        return self.keys.is_whole and columns is not None and columns.stop == n_keys

    def index_of(self, position: Int[Tensor, "B T n"]) -> Int[Tensor, "B T n"]:
        """The column of the key at each position; NONE if the text has no such position."""
        if self.keys.is_whole:
            exists = (position >= 0) & (position < self.keys.index.shape[1])
            return position.masked_fill(~exists, NONE)
        text = self.query_text.unsqueeze(-1)
        exists = (position >= 0) & (position < self.keys.length[text])
        last = max(0, self.keys.index.shape[1] - 1)
        column = (self.keys.start[text] + position).clamp(0, last)
        found = self.keys.index.gather(1, column.flatten(1)).view_as(position)
        return found.masked_fill(~exists, NONE)


def positions_within(call: AttentionCall, text: Text) -> Positions:
    """Positions in self-attention; cached keys come before the queries.

    A prefix that the model or its wrapper puts before the text is part of the text.
    """
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    is_partial = text.real is not None and (
        text.real.shape[1] < T or not _describes(text.real, call)
    )
    if is_partial:
        text = replace(text, real=None, positions=None)  # describes only part of these tokens
    if text.real is None and T < S:
        total, real = _cached(call, text)
    else:
        device = call.k.device
        real = _said(call, is_partial) if text.real is None else _fit(text.real, B, S, device)
        # A preallocated cache is longer than the text, and the queries are the end of the text.
        total = S if text.real is None else min(S, text.real.shape[1])
    if total < T:
        raise UnsupportedError(
            f"observe: {type(call.module).__name__} attends with {T} queries to {S} keys, of "
            f"which its last query sees only the first {total}: the positions of its queries "
            f"among the keys are unknown. Leave the layer out with layers=."
        )
    queries = slice(total - T, total)
    keys = _text_layout(real, _packed(call, text))
    n_read = max(T, text.tokens or 0)  # more than the queries where a layer computes the last alone
    if text.real is not None:
        end = text.real.shape[1]
    else:  # with tokens that the cache has evicted
        end = total if text.cached is None else int(text.cached) + n_read
    return Positions(
        query_real=real[:, queries],
        key_real=real,
        query_position=keys.position[:, queries],
        query_text=keys.text[:, queries],
        keys=keys,
        query_columns=range(total - T, total),
        columns=range(end - n_read, end),
        evicted=_evicted(text, total, end, S).to(real.device).expand(B, 1),
    )


def _evicted(text: Text, total: int, end: int, S: int) -> Int[Tensor, "#B 1"]:
    """The number of tokens that a cache of limited length has evicted."""
    if text.real is not None:
        return text.real[:, :-S].sum(-1, keepdim=True)
    if text.positions is not None and text.positions.shape[1] < S:  # with keys of a cache
        last = text.positions[:, -1:]
        return (last + 1 - total).clamp(min=0)
    return torch.tensor([[max(0, end - total)]])


def positions_across(call: AttentionCall, queries: Text, keys: Text) -> Positions:
    """Positions in cross-attention: queries of one text, keys of another."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if keys.real is None or not _describes(keys.real, call):
        real = _said(call, keys.real is not None)
    else:
        real = _fit(keys.real, B, S, call.k.device)
    mask = None if queries.real is None else queries.real[:, -T:]
    query_real = _fit(None if mask is None or mask.shape[1] < T else mask, B, T, call.q.device)
    layout = _text_layout(query_real, None)
    return Positions(
        query_real=query_real,
        key_real=real,
        query_position=layout.position,
        query_text=layout.text,
        keys=_text_layout(real, None),
        query_columns=None,
        columns=None,
        evicted=torch.zeros_like(layout.row)[:, None],
    )


def _packed(call: AttentionCall, text: Text) -> Int[Tensor, "#B n"] | None:
    """The number of each column's text in a packed row; None if no row is packed.

    A document mask says so, or `position_ids` that restart, as in Hugging Face models: without a
    padding mask, and only if the model keeps such texts apart.
    """
    documents = None if call.rule.visible is None else call.rule.visible.texts()
    if documents is not None:
        return documents
    S = call.k.shape[2]
    if text.real is not None or text.positions is None or text.positions.shape[1] != S:
        return None
    starts = text.positions.to(call.k.device).diff(dim=1) != 1
    if not bool(starts.any()):
        return None
    numbers = torch.nn.functional.pad(starts.cumsum(1), (1, 0))
    return numbers if _are_separate(call, numbers) else None


def _are_separate(call: AttentionCall, numbers: Int[Tensor, "#B n"]) -> bool:
    """Whether the first query of the last text in each row sees only that text."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    last_text = numbers == numbers[:, -1:]
    # The queries are the last tokens, and may begin within the last text.
    for row, start in enumerate((T - last_text.sum(1)).clamp(min=0).tolist()):
        tile = Tile(T, S, range(start, start + 1), range(S), call.k.device)
        visible = call.rule.visible_in(tile)
        if visible is None:
            return bool(last_text.all())
        seen_keys = visible.expand(B, -1, -1, -1)[row] if len(numbers) > 1 else visible
        if bool((seen_keys & ~last_text[row]).any()):
            return False
    return True


def _fit(real: Bool[Tensor, "B n"] | None, B: int, S: int, device: torch.device) -> Tensor:
    """Which of `S` keys are real: the start of a longer text is cut off, a shorter one padded."""
    if real is None:
        return torch.ones(B, S, dtype=torch.bool, device=device)
    if real.shape[0] != B:
        raise UnsupportedError(
            f"observe: an attention mask for {real.shape[0]} texts in a call with {B}. "
            f"Watch the model with one row of the mask for each text."
        )
    if real.shape[1] == S:
        return real.to(device)
    real = real.to(device)[:, -S:]
    return torch.nn.functional.pad(real, (0, S - real.shape[1]), value=False)


def _describes(real: Bool[Tensor, "B n"], call: AttentionCall) -> bool:
    """Whether a mask describes the keys of a call: no query attends to what it marks as padding.

    A mask of the text does not describe tokens that the model adds. A cache that is longer than
    the mask ends with keys that are not written yet; one that evicts tokens is shorter.
    """
    B, S = call.q.shape[0], call.k.shape[2]
    fit = _fit(real, B, S, call.k.device)
    return real.shape[1] == S or not bool((_visible_to_any(call) & ~fit).any())


def _said(call: AttentionCall, is_partial: bool) -> Bool[Tensor, "B S"]:
    """Which keys are not padding, if no mask of the text describes them.

    A mask of queries and keys seldom says: a sparse one may hide a token from every query. Two do:
    one whose queries all see the same keys, and one whose first keys no query sees, as `generate`
    makes of left padding for a static cache; a causal query sees its own key or earlier ones.

    Args:
        is_partial: Whether there is a mask of the text, which the model has extended. Then padding
            is what no query sees.
    """
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if is_partial:
        return _visible_to_any(call)
    keys = keys_alone(call.rule.visible, T, S, call.k.device)
    if keys is not None:
        return keys.expand(B, S)
    seen = _visible_to_any(call)
    return seen if _rows_equal(call, seen) else seen.cumsum(1) > 0


def _rows_equal(call: AttentionCall, keys: Bool[Tensor, "B S"]) -> bool:
    """Whether every query sees just these keys."""
    T, S = call.q.shape[2], call.k.shape[2]
    for start in range(0, T, _ROWS):
        rows = range(start, min(T, start + _ROWS))
        visible = call.rule.visible_in(Tile(T, S, rows, range(S), call.k.device))
        if visible is not None and bool((visible != keys[:, None, None]).any()):
            return False
    return True


def _visible_to_any(call: AttentionCall) -> Bool[Tensor, "B S"]:
    """Which keys any query may attend to."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    reached = torch.zeros(B, S, dtype=torch.bool, device=call.k.device)
    for last in range(T, 0, -_ROWS):  # from the end: one row of a causal mask sees every key
        rows = range(max(0, last - _ROWS), last)
        for block in (range(last - 1, last), rows):
            visible = call.rule.visible_in(Tile(T, S, block, range(S), call.k.device))
            reached |= torch.ones_like(reached) if visible is None else visible.any(1).any(1)
            if bool(reached.all()):
                return reached
    return reached


def _cached(call: AttentionCall, text: Text) -> tuple[int, Bool[Tensor, "B S"]]:
    """The end of the text in a cache, and which keys belong to it, if there is no mask."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    last = Tile(T, S, range(T - 1, T), range(S), call.k.device)
    visible = call.rule.visible_in(last)
    index = torch.arange(S, device=call.k.device)
    # The last query is the last token, and the last key it sees is its own.
    sees = index >= 0 if visible is None else visible.any(1)[:, 0]
    seen_keys = index[sees.expand(B, S).any(0)]
    total = int(seen_keys.max()) + 1 if len(seen_keys) else 0
    if text.cached is not None:  # the last query of a sparse attention may not see its own key
        total = max(total, min(S, int(text.cached) + max(T, text.tokens or 0)))
    start = index.new_zeros(B, 1)
    if text.positions is not None:  # columns before position 0 are padding
        start = total - 1 - text.positions[:, -1:].to(index.device).expand(B, 1)
    # A prefix without positions of its own is visible nevertheless.
    return total, ((index >= start) | sees) & (index < total)


def _text_layout(real: Bool[Tensor, "B n"], packed: Int[Tensor, "B n"] | None) -> TextLayout:
    """The layout of one text per row, or of the texts that `packed` numbers in each row."""
    B, n = real.shape
    rows = torch.arange(B, device=real.device)
    if packed is None:
        is_whole = bool(real.all())
        if is_whole:
            position = index = torch.arange(n, device=real.device).expand(B, n)
        else:
            position = (real.cumsum(-1) - 1).clamp(min=0)
            index = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        return TextLayout(
            text=rows[:, None].expand(B, n),
            position=position,
            index=index,
            row=rows,
            start=torch.zeros_like(rows),
            length=torch.full_like(rows, n) if is_whole else real.sum(-1),
            is_whole=is_whole,
        )
    lengths = real.sum(-1)
    marks = torch.stack([rows[:, None].expand(B, n), packed.to(real.device).expand(B, n)], -1)
    texts, inverse = _in_order(marks[real])
    number = torch.zeros_like(marks[..., 0]).masked_scatter_(real, inverse)
    length = torch.bincount(inverse, minlength=len(texts))
    before = lengths.cumsum(0) - lengths  # real columns in earlier rows
    start = length.cumsum(0) - length - before[texts[:, 0]]
    index = torch.argsort(number.masked_fill(~real, len(texts)), dim=1, stable=True)
    order = torch.arange(n, device=real.device).expand(B, n)
    position = torch.zeros_like(number).scatter_(1, index, order) - start[number]
    return TextLayout(number, position.clamp(min=0), index, texts[:, 0], start, length, False)


def _in_order(marks: Int[Tensor, "n m"]) -> tuple[Int[Tensor, "M m"], Int[Tensor, " n"]]:
    """The distinct marks in order of first occurrence, and the index of each mark among them."""
    distinct, which = torch.unique(marks, dim=0, return_inverse=True)
    count = torch.arange(len(marks), device=marks.device)
    earliest = torch.full_like(distinct[:, 0], len(marks))
    order = earliest.scatter_reduce_(0, which, count, "amin").argsort()
    return distinct[order], order.argsort()[which]
