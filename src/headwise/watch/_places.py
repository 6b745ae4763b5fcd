"""Where each query and key stands in its own text, whatever side the padding is on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedError
from headwise.masks import Tile
from headwise.models import Call, Text
from headwise.watch._request import Relation

_ROWS = 256  # of a mask, looked at together
NONE = -1  # the index of a key that does not exist


@dataclass(frozen=True)
class Places:
    """Positions count within a text, padding left out; indices count columns of the batch.

    `key_index` leads from positions to indices: its first entries are the real keys in order.
    """

    query_real: Bool[Tensor, "B T"]
    key_real: Bool[Tensor, "B S"]
    query_at: Int[Tensor, "B T"]
    key_at: Int[Tensor, "B S"]
    key_index: Int[Tensor, "B S"]
    own_index: Int[Tensor, " T"] | None  # of each query among the keys; None across texts

    @property
    def across(self) -> bool:
        """Whether the keys belong to another text than the queries."""
        return self.own_index is None

    def index_of(self, position: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """The keys at these positions; NONE where the text has no such position."""
        exists = (position >= 0) & (position < self.key_real.sum(-1, keepdim=True))
        last = max(0, self.key_index.shape[1] - 1)
        return self.key_index.gather(1, position.clamp(0, last)).masked_fill(~exists, NONE)


def places_within(call: Call, text: Text) -> Places:
    """Queries and keys of the same text; cached keys come before the queries."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if text.real is None and T < S:
        total, real = _cached(call, text)
    else:
        real = _seen(call) if text.real is None else _fit(text.real, B, S, call.k.device)
        # A preallocated cache is longer than the text: the queries end where the text does.
        total = S if text.real is None else min(S, text.real.shape[1])
    own = torch.arange(total - T, total, device=call.k.device)
    at = (real.cumsum(-1) - 1).clamp(min=0)
    return Places(real[:, own], real, at[:, own], at, _in_order(real), own)


def places_across(call: Call, queries: Text, keys: Text) -> Places:
    """Queries of one text, keys of another."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    real = _seen(call) if keys.real is None else _fit(keys.real, B, S, call.k.device)
    asking = _fit(None if queries.real is None else queries.real[:, -T:], B, T, call.q.device)
    at = (real.cumsum(-1) - 1).clamp(min=0)
    query_at = (asking.cumsum(-1) - 1).clamp(min=0)
    return Places(asking, real, query_at, at, _in_order(real), None)


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


def _seen(call: Call) -> Bool[Tensor, "B S"]:
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


def _cached(call: Call, text: Text) -> tuple[int, Bool[Tensor, "B S"]]:
    """Where the text ends in a cache, and which keys are of it, when no mask tells."""
    B, T, S = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    last = Tile(T, S, range(T - 1, T), range(S), call.k.device)
    visible = call.rule.visible_in(last)
    at = torch.arange(S, device=call.k.device)
    # The last query is the last token, and the last key that it sees is its own.
    seen = at if visible is None else at[visible.any(0).any(0).any(0)]
    total = int(seen.max()) + 1
    start = at.new_zeros(B, 1)
    if text.positions is not None:  # what stands before position 0 is padding
        start = total - 1 - text.positions[:, -1:].to(at.device).expand(B, 1)
    return total, (at >= start) & (at < total)


def _in_order(real: Bool[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    return torch.argsort((~real).to(torch.int8), dim=1, stable=True)


def offset_keys(places: Places, name: str) -> Int[Tensor, "B T 1"]:
    """The one key of each query that `first`, `self`, `previous` or `next` means."""
    at = places.query_at
    if name == "first":
        return places.index_of(torch.zeros_like(at)).unsqueeze(-1)
    if places.across:  # the neighbor in another text is nobody
        return torch.full_like(at, NONE).unsqueeze(-1)
    step = {"self": 0, "previous": -1, "next": 1}[name]
    keys = places.index_of(at + step)
    return keys.masked_fill(~places.query_real, NONE).unsqueeze(-1)


def related_keys(places: Places, relation: Relation, name: str, text: Text) -> Int[Tensor, "B T m"]:
    """The keys of each query under a relation, as many columns as a query has at most."""
    if text.ids is None or places.across or text.ids.shape[1] != places.key_real.shape[1]:
        raise UnsupportedError(
            f"observe: the relation {name!r} needs whole texts as input_ids, without a cache and "
            f"within one text. Ask for it only there."
        )
    found = [
        _keys_of_text(relation, name, ids[real].tolist())
        for ids, real in zip(text.ids.cpu(), places.key_real.cpu(), strict=True)
    ]
    width = max((len(keys) for pairs in found for keys in pairs.values()), default=1)
    columns = torch.full((*places.query_at.shape, width), NONE)
    for row, pairs in enumerate(found):
        index = places.key_index[row].tolist()
        for query, keys in pairs.items():
            columns[row, index[query], : len(keys)] = torch.tensor([index[key] for key in keys])
    return columns.to(places.query_at.device)


def _keys_of_text(relation: Relation, name: str, ids: Sequence[int]) -> Mapping[int, list[int]]:
    pairs: dict[int, list[int]] = {}
    for query, key in sorted(set(relation(ids))):
        if not (0 <= query < len(ids) and 0 <= key < len(ids)):
            raise ArgumentError(
                f"observe: the relation {name!r} gives ({query}, {key}) for a text of "
                f"{len(ids)} tokens. Give positions from 0 to {len(ids) - 1}."
            )
        pairs.setdefault(query, []).append(key)
    return pairs
