"""Pairs of a query and a key, given or told by a relation, as the keys of each query."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Text
from headwise.watch._positions import NONE, Positions
from headwise.watch._request import Request

TextPairs = Iterable[tuple[int, int]]
Columns = dict[str, Int[Tensor, "B T m"]]


@dataclass(frozen=True)
class _Known:
    """The answer for the texts of one forward pass, which all layers share."""

    forward_pass: int
    places: Positions
    columns: Columns

    def holds(self, forward_pass: int, places: Positions) -> bool:
        mine, same = self.places, self.forward_pass == forward_pass
        return same and all(
            one.shape == two.shape and torch.equal(one, two)
            for one, two in (
                (mine.query_at, places.query_at),
                (mine.asks, places.asks),
                (mine.query_real, places.query_real),
                (mine.keys.index, places.keys.index),
                (mine.keys.length, places.keys.length),
            )
        )


class Pairs:
    """What a request's relations mean in each text, and the pairs that were given for a pass."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._given: Mapping[str, Sequence[TextPairs]] = {}
        self._given_for = -1
        self._known: _Known | None = None

    def give(self, forward_pass: int, pairs: Mapping[str, Sequence[TextPairs]]) -> None:
        """Take the pairs of each text of a forward pass."""
        if set(pairs) != set(self._request.pairs):
            raise ArgumentError(
                f"Watch.pairs: {', '.join(sorted(pairs)) or 'nothing'} given, where the request "
                f"has pairs={self._request.pairs}. Give a list for each of them."
            )
        self._given, self._given_for = pairs, forward_pass

    def columns(self, places: Positions, text: Text, forward_pass: int) -> Columns:
        """The keys of each query by name, as many columns as a query has keys at most.

        Across texts there are none: a relation is one within a text.
        """
        names = [*self._request.relations, *self._request.pairs]
        if not names:
            return {}
        if places.across:
            nobody = torch.full_like(places.query_at, NONE).unsqueeze(-1)
            return dict.fromkeys(names, nobody)
        if self._known is None or not self._known.holds(forward_pass, places):
            columns = self._from_relations(places, text) | self._from_given(places, forward_pass)
            self._known = _Known(forward_pass, places, columns)
        return self._known.columns

    def _from_relations(self, places: Positions, text: Text) -> Columns:
        relations = self._request.relations
        if not relations:
            return {}
        if text.ids is None or text.ids.shape[1] != places.key_real.shape[1]:
            raise UnsupportedError(
                f"observe: the relation {next(iter(relations))!r} needs whole texts as input_ids, "
                f"without a cache. Ask for it only there."
            )
        ids = text.ids.cpu()[places.keys.row.cpu()]
        rows = zip(ids.tolist(), _key_columns(places), strict=True)
        texts = [[row[column] for column in columns] for row, columns in rows]
        return {
            name: _placed(places, f"the relation {name!r} gives", [relation(t) for t in texts])
            for name, relation in relations.items()
        }

    def _from_given(self, places: Positions, forward_pass: int) -> Columns:
        if self._request.pairs and self._given_for != forward_pass:
            raise ArgumentError(
                f"observe: no pairs were given for forward pass {forward_pass}. "
                f"Call watch.pairs({self._request.pairs[0]}=[...]) before each."
            )
        for name, pairs in self._given.items():
            if len(pairs) != places.n_texts:
                raise ArgumentError(
                    f"Watch.pairs: {name!r} has pairs of {len(pairs)} texts where the model reads "
                    f"{places.n_texts}. Give a list for each text."
                )
        return {
            name: _placed(places, f"watch.pairs({name}=...) gave", pairs)
            for name, pairs in self._given.items()
        }


def _key_columns(places: Positions) -> list[list[int]]:
    """The columns of each text's keys, in order."""
    keys = places.keys
    index = keys.index.tolist()
    spans = zip(keys.row.tolist(), keys.start.tolist(), keys.length.tolist(), strict=True)
    return [index[row][start : start + length] for row, start, length in spans]


def _query_columns(places: Positions) -> dict[tuple[int, int], tuple[int, int]]:
    """Where the query of a text at a position is."""
    rows, columns = places.query_real.nonzero(as_tuple=True)
    number, at = places.asks[rows, columns], places.query_at[rows, columns]
    asked = zip(number.tolist(), at.tolist(), strict=True)
    return dict(zip(asked, zip(rows.tolist(), columns.tolist(), strict=True), strict=True))


def _placed(places: Positions, told: str, pairs: Sequence[TextPairs]) -> Int[Tensor, "B T m"]:
    """Pairs of positions in each text as columns of keys."""
    keys, queries = _key_columns(places), _query_columns(places)
    found: dict[tuple[int, int], list[int]] = {}
    for text, (wanted, columns) in enumerate(zip(pairs, keys, strict=True)):
        for query, key in sorted(set(wanted)):
            if not (0 <= query < len(columns) and 0 <= key < len(columns)):
                raise ArgumentError(
                    f"observe: {told} ({query}, {key}) for a text of {len(columns)} tokens. "
                    f"Give positions from 0 to {len(columns) - 1}."
                )
            if (text, query) in queries:  # not one of an earlier pass
                found.setdefault(queries[text, query], []).append(columns[key])
    width = max(map(len, found.values()), default=1)
    placed = torch.full((*places.query_at.shape, width), NONE)
    if found:
        at = torch.tensor(list(found)).T
        filled = [one + [NONE] * (width - len(one)) for one in found.values()]
        placed[at[0], at[1]] = torch.tensor(filled)
    return placed.to(places.query_at.device)
