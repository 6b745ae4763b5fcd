"""Where each query and key stands in its own text, whatever side the padding is on."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.masks.tiles import Tile
from headwise.models import AttentionCall, Text

_ROWS = 256  # of a mask, looked at together
NONE = -1  # the index of a key that does not exist


@dataclass(frozen=True)
class TextLayout:
    """Where the texts of a batch lie among its columns; several may be packed into one row.

    Positions count within a text, padding left out. `index` leads from texts to columns: in its
    row, text `m` has the entries from `start[m]` on, `length[m]` of them, in order.
    """

    number: Int[Tensor, "B n"]  # of the text in each column
    at: Int[Tensor, "B n"]  # its position in that text
    index: Int[Tensor, "B n"]
    row: Int[Tensor, " M"]
    start: Int[Tensor, " M"]
    length: Int[Tensor, " M"]


@dataclass(frozen=True)
class Positions:
    """Which text each query and key belongs to, and where they stand in it.

    Attributes:
        asks: The number of the text that each query belongs to.
        looks: The number of the text, among those of the keys, that it may look at.
        own_index: Of each query among the keys; None across texts.
        begins: How many columns of the text came before these queries, cached.
        ends: How many there are with these.
        forgotten: How many tokens came before all keys, and are in the cache no more.
    """

    query_real: Bool[Tensor, "B T"]
    key_real: Bool[Tensor, "B S"]
    query_at: Int[Tensor, "B T"]
    asks: Int[Tensor, "B T"]
    looks: Int[Tensor, "B T"]
    keys: TextLayout
    n_texts: int
    own_index: Int[Tensor, " T"] | None
    begins: int
    ends: int
    forgotten: Int[Tensor, "#B 1"] | None = None

    @property
    def gone(self) -> int:
        """How many columns of the text are in the cache no more."""
        return 0 if self.own_index is None else self.ends - 1 - int(self.own_index[-1])

    @property
    def across(self) -> bool:
        """Whether the keys belong to another text than the queries."""
        return self.own_index is None

    def index_of(self, position: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """The keys at these positions; NONE where the text has no such position."""
        exists = (position >= 0) & (position < self.keys.length[self.looks])
        last = max(0, self.keys.index.shape[1] - 1)
        column = (self.keys.start[self.looks] + position).clamp(0, last)
        return self.keys.index.gather(1, column).masked_fill(~exists, NONE)

    def by_text(self, values: Float[Tensor, "K B H T"]) -> Float[Tensor, "K M H"]:
        """Sums over the queries of each text."""
        K, B, H, T = values.shape
        if self.n_texts == B:  # a text a row
            return values.sum(-1)
        rows = values.permute(1, 3, 0, 2).reshape(B * T, K, H)
        sums = rows.new_zeros(self.n_texts, K, H).index_add_(0, self.asks.flatten(), rows)
        return sums.transpose(0, 1)


def positions_within(call: AttentionCall, text: Text) -> Positions:
    """Queries and keys of the same text; cached keys come before the queries.

    A prefix that the model or its wrapper puts before the text is part of the text.
    """
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if text.real is not None and (text.real.shape[1] < T or not _describes(text.real, call)):
        text = replace(text, real=None, positions=None)  # of a part of these tokens alone
    if text.real is None and T < S:
        total, real = _cached(call, text)
    else:
        real = _seen(call) if text.real is None else _fit(text.real, B, S, call.k.device)
        # A preallocated cache is longer than the text: the queries end where the text does.
        total = S if text.real is None else min(S, text.real.shape[1])
    if total < T:
        raise UnsupportedError(
            f"observe: {type(call.module).__name__} attends with {T} queries to {S} keys, of "
            f"which its last query sees only the first {total}: where the queries stand among "
            f"the keys is unknown. Leave the layer out with layers=."
        )
    own = torch.arange(total - T, total, device=call.k.device)
    keys = _lay_out(real, _packed(call, text))
    ends = _length(text, total, T)
    asks = keys.number[:, own]
    return Positions(
        query_real=real[:, own],
        key_real=real,
        query_at=keys.at[:, own],
        asks=asks,
        looks=asks,
        keys=keys,
        n_texts=len(keys.row),
        own_index=own,
        begins=ends - T,
        ends=ends,
        forgotten=_forgotten(text, total, ends, S),
    )


def _length(text: Text, total: int, T: int) -> int:
    """How long the text is by now; a cache that forgets is shorter."""
    if text.real is not None:
        return text.real.shape[1]
    return total if text.cached is None else int(text.cached) + T


def _forgotten(text: Text, total: int, ends: int, S: int) -> Int[Tensor, "#B 1"] | None:
    """A cache that forgets holds the latest tokens of a longer text."""
    if text.real is not None:
        return text.real[:, :-S].sum(-1, keepdim=True)
    if text.positions is not None and text.positions.shape[1] < S:  # with keys of a cache
        last = text.positions[:, -1:]
        return (last + 1 - total).clamp(min=0)
    return torch.tensor([[ends - total]]) if ends > total else None


def positions_across(call: AttentionCall, queries: Text, keys: Text) -> Positions:
    """Queries of one text, keys of another."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if keys.real is None or not _describes(keys.real, call):
        real = _seen(call)
    else:
        real = _fit(keys.real, B, S, call.k.device)
    asks = None if queries.real is None else queries.real[:, -T:]
    asking = _fit(None if asks is None or asks.shape[1] < T else asks, B, T, call.q.device)
    asked = _lay_out(asking, None)
    return Positions(
        query_real=asking,
        key_real=real,
        query_at=asked.at,
        asks=asked.number,
        looks=asked.number,
        keys=_lay_out(real, None),
        n_texts=B,
        own_index=None,
        begins=0,
        ends=T,
    )


def _lay_out(real: Bool[Tensor, "B n"], packed: Int[Tensor, "B n"] | None) -> TextLayout:
    """A text is a row, or what has one number in its row."""
    B, n = real.shape
    rows = torch.arange(B, device=real.device)
    lengths = real.sum(-1)
    if packed is None:
        return TextLayout(
            number=rows[:, None].expand(B, n),
            at=(real.cumsum(-1) - 1).clamp(min=0),
            index=torch.argsort((~real).to(torch.int8), dim=1, stable=True),
            row=rows,
            start=torch.zeros_like(rows),
            length=lengths,
        )
    marks = torch.stack([rows[:, None].expand(B, n), packed.to(real.device).expand(B, n)], -1)
    texts, inverse = _in_order(marks[real])
    number = torch.zeros_like(marks[..., 0]).masked_scatter_(real, inverse)
    length = torch.bincount(inverse, minlength=len(texts))
    before = lengths.cumsum(0) - lengths  # real columns in earlier rows
    start = length.cumsum(0) - length - before[texts[:, 0]]
    index = torch.argsort(number.masked_fill(~real, len(texts)), dim=1, stable=True)
    order = torch.arange(n, device=real.device).expand(B, n)
    at = torch.zeros_like(number).scatter_(1, index, order) - start[number]
    return TextLayout(number, at.clamp(min=0), index, texts[:, 0], start, length)


def _in_order(marks: Int[Tensor, "n m"]) -> tuple[Int[Tensor, "M m"], Int[Tensor, " n"]]:
    """The different marks in the order in which they come first, and which of them each is."""
    different, which = torch.unique(marks, dim=0, return_inverse=True)
    count = torch.arange(len(marks), device=marks.device)
    earliest = torch.full_like(different[:, 0], len(marks))
    order = earliest.scatter_reduce_(0, which, count, "amin").argsort()
    return different[order], order.argsort()[which]


def _packed(call: AttentionCall, text: Text) -> Int[Tensor, "#B n"] | None:
    """A number for each text that shares a row with others; None where none does.

    A mask of documents says so, or positions that do not go on, as Hugging Face reads them:
    without a mask of padding, and only if the model itself keeps such texts apart.
    """
    told = None if call.rule.visible is None else call.rule.visible.texts()
    if told is not None:
        return told
    T, S = call.q.shape[2], call.k.shape[2]
    if text.real is not None or text.positions is None or not text.positions.shape[1] == T == S:
        return None
    ends = text.positions.to(call.k.device).diff(dim=1) != 1
    if not bool(ends.any()):
        return None
    numbers = torch.nn.functional.pad(ends.cumsum(1), (1, 0))
    return numbers if _kept_apart(call, numbers) else None


def _kept_apart(call: AttentionCall, numbers: Int[Tensor, "#B n"]) -> bool:
    """Whether the first query of the last text of each row sees that text alone."""
    B, T = call.q.shape[0], call.q.shape[2]
    own = numbers == numbers[:, -1:]
    for row, start in enumerate((T - own.sum(1)).tolist()):
        tile = Tile(T, T, range(start, start + 1), range(T), call.k.device)
        visible = call.rule.visible_in(tile)
        if visible is None:
            return bool(own.all())
        mine = visible.expand(B, -1, -1, -1)[row] if len(numbers) > 1 else visible
        if bool((mine & ~own[row]).any()):
            return False
    return True


def _fit(real: Bool[Tensor, "B n"] | None, B: int, S: int, device: torch.device) -> Tensor:
    """Which of `S` keys are real: the latest of the text, or all and then keys not written yet."""
    if real is None:
        return torch.ones(B, S, dtype=torch.bool, device=device)
    if real.shape[0] != B:
        raise UnsupportedError(
            f"observe: an attention mask for {real.shape[0]} texts in a call with {B}. "
            f"Watch the model with one row of the mask for each text."
        )
    real = real.to(device)[:, -S:]
    return torch.nn.functional.pad(real, (0, S - real.shape[1]), value=False)


def _describes(real: Bool[Tensor, "B n"], call: AttentionCall) -> bool:
    """Whether a mask is about the keys of a call: no query attends to what it calls padding.

    A mask of the text alone says nothing of the tokens that a model puts beside it. A cache that
    is longer than the mask ends with keys that are not written yet; one that forgets is shorter.
    """
    B, S = call.q.shape[0], call.k.shape[2]
    fit = _fit(real, B, S, call.k.device)
    return real.shape[1] == S or not bool((_seen(call) & ~fit).any())


def _seen(call: AttentionCall) -> Bool[Tensor, "B S"]:
    """A key that no query may attend to is padding, whoever did not say so."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    seen = torch.zeros(B, S, dtype=torch.bool, device=call.k.device)
    for last in range(T, 0, -_ROWS):  # from the end: one row of a causal mask sees every key
        rows = range(max(0, last - _ROWS), last)
        for block in (range(last - 1, last), rows):
            visible = call.rule.visible_in(Tile(T, S, block, range(S), call.k.device))
            seen |= torch.ones_like(seen) if visible is None else visible.any(1).any(1)
            if bool(seen.all()):
                return seen
    return seen


def _cached(call: AttentionCall, text: Text) -> tuple[int, Bool[Tensor, "B S"]]:
    """Where the text ends in a cache, and which keys are of it, when no mask tells."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    last = Tile(T, S, range(T - 1, T), range(S), call.k.device)
    visible = call.rule.visible_in(last)
    at = torch.arange(S, device=call.k.device)
    # The last query is the last token, and the last key that it sees is its own.
    sees = at >= 0 if visible is None else visible.any(1)[:, 0]
    seen = at[sees.expand(B, S).any(0)]
    total = int(seen.max()) + 1 if len(seen) else 0
    start = at.new_zeros(B, 1)
    if text.positions is not None:  # what stands before position 0 is padding
        start = total - 1 - text.positions[:, -1:].to(at.device).expand(B, 1)
    # A prefix that has no position of its own is seen all the same.
    return total, ((at >= start) | sees) & (at < total)


def offset_keys(places: Positions, name: str) -> Int[Tensor, "B T 1"]:
    """The one key of each query that `first`, `self`, `previous` or `next` means."""
    at = places.query_at
    if name == "first":
        first = torch.zeros_like(at)
        first = first if places.forgotten is None else first - places.forgotten.to(at.device)
        return places.index_of(first).unsqueeze(-1)
    if places.across:  # the neighbor in another text is nobody
        return torch.full_like(at, NONE).unsqueeze(-1)
    step = {"self": 0, "previous": -1, "next": 1}[name]
    keys = places.index_of(at + step)
    return keys.masked_fill(~places.query_real, NONE).unsqueeze(-1)
