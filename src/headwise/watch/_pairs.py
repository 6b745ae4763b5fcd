"""The keys of each query under an offset, a relation, or pairs passed for one forward pass."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from headwise._display import counted, first_line
from headwise.capture import Text
from headwise.errors import ArgumentError, UnsupportedError
from headwise.watch._pass import Pass
from headwise.watch._positions import NONE, Positions
from headwise.watch._request import OFFSETS, Relation, Request

TextPairs = Iterable[tuple[int, int]]
Columns = dict[str, Int[Tensor, "B T m"]]


class Pairs:
    """The keys of each query by name, for the offsets, relations and pairs of a request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        wanted = {*request.names, *request.top, *request.value}
        self._offsets = [name for name in OFFSETS if name in wanted]
        # The number of a forward pass, and the pairs that were given for it.
        self._given: tuple[int, Mapping[str, Sequence[TextPairs]]] = -1, {}

    def set(self, forward_pass: int, pairs: Mapping[str, Sequence[TextPairs]]) -> None:
        """Set the pairs of each text of a forward pass."""
        if set(pairs) != set(self._request.pairs):
            raise ArgumentError(
                f"Watch.pairs: {', '.join(sorted(pairs)) or 'nothing'} given, but the request has "
                f"pairs={self._request.pairs}. Give a list for each of them."
            )
        lists = {name: [list(text) for text in texts] for name, texts in pairs.items()}
        self._given = forward_pass, lists

    def columns(self, positions: Positions, text: Text, pass_: Pass) -> Columns:
        """The columns of each query's keys, by name; NONE fills the rows of shorter lists.

        In cross-attention there are none, because a relation holds within one text.
        """
        columns = _offset_columns(self._offsets, positions)
        names = [*self._request.relations, *self._request.pairs]
        if positions.is_cross:
            no_keys = torch.full_like(positions.query_position, NONE).unsqueeze(-1)
            return columns | dict.fromkeys(names, no_keys)
        if self._request.relations:
            columns |= self._relation_columns(positions, text, pass_)
        return columns | self._pair_columns(positions, pass_.number)

    def _relation_columns(self, positions: Positions, text: Text, pass_: Pass) -> Columns:
        relations = self._request.relations
        if text.ids is None or text.ids.shape[1] != positions.key_real.shape[1]:
            raise UnsupportedError(
                f"observe: the relation {next(iter(relations))!r} needs whole texts as input_ids, "
                f"without a cache. Request it only there."
            )
        ids = text.ids.cpu()[positions.keys.row.cpu()]
        rows = zip(ids.tolist(), _key_columns(positions), strict=True)
        texts = [[row[column] for column in columns] for row, columns in rows]
        columns: Columns = {}
        for name, relation in relations.items():
            keys = [(name, *tokens) for tokens in texts]
            for number, key in enumerate(keys):
                if key not in pass_.shared:  # once for each text of a pass
                    pass_.shared[key] = _pairs_of(name, relation, number, texts[number])
            source = f"the relation {name!r} gives"
            columns[name] = _pairs_as_columns(positions, source, [pass_.shared[k] for k in keys])
        return columns

    def _pair_columns(self, positions: Positions, forward_pass: int) -> Columns:
        given_for, given = self._given
        if self._request.pairs and given_for != forward_pass:
            raise ArgumentError(
                f"observe: no pairs were given for forward pass {forward_pass}. "
                f"Call watch.pairs({self._request.pairs[0]}=[...]) before each."
            )
        for name, pairs in given.items():
            if len(pairs) != positions.n_texts:
                raise ArgumentError(
                    f"Watch.pairs: {name!r} has pairs of {counted(len(pairs), 'text')} where the "
                    f"model reads {positions.n_texts}. Give a list for each text."
                )
        return {
            name: _pairs_as_columns(positions, f"watch.pairs({name}=...) gave", pairs)
            for name, pairs in given.items()
        }


def _pairs_of(
    name: str, relation: Relation, number: int, tokens: Sequence[int]
) -> list[tuple[int, int]]:
    """The pairs that a function of the user gives for a text."""
    try:
        return list(relation(tokens))
    except MemoryError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"observe: the relation {name!r} fails ({type(error).__name__}: {first_line(error)}) "
            f"for text {number} of the pass, of {counted(len(tokens), 'token')}: "
            f"{', '.join(map(str, tokens[:8]))}{', ...' if len(tokens) > 8 else ''}. Correct it."
        ) from error


# The key of an offset: the position of the query, times the first number, plus the second.
_FROM_QUERY = {"first": (0, 0), "self": (1, 0), "previous": (1, -1), "next": (1, 1)}


def _offset_columns(names: Sequence[str], positions: Positions) -> Columns:
    """The columns of the keys that `first`, `self`, `previous` or `next` denote, by name."""
    if not names:
        return {}
    device = positions.query_position.device
    factor, distance = torch.tensor([_FROM_QUERY[name] for name in names], device=device).T
    position = positions.query_position.unsqueeze(-1) * factor + distance
    position -= positions.evicted.unsqueeze(-1) * (1 - factor)
    keys = positions.index_of(position)
    if positions.is_cross:  # a query has no neighbors in another text
        keys = keys.masked_fill(factor == 1, NONE)
    elif not positions.keys.is_whole:  # nor does padding
        keys = keys.masked_fill((factor == 1) & ~positions.query_real.unsqueeze(-1), NONE)
    return {name: keys[..., n : n + 1] for n, name in enumerate(names)}


def _key_columns(positions: Positions) -> list[list[int]]:
    """The columns of each text's keys, in order."""
    keys = positions.keys
    index = keys.index.tolist()
    spans = zip(keys.row.tolist(), keys.start.tolist(), keys.length.tolist(), strict=True)
    return [index[row][start : start + length] for row, start, length in spans]


def _query_columns(positions: Positions) -> dict[tuple[int, int], tuple[int, int]]:
    """The row and column of each query, by the number of its text and its position there."""
    rows, columns = positions.query_real.nonzero(as_tuple=True)
    text, position = positions.query_text[rows, columns], positions.query_position[rows, columns]
    queries = zip(text.tolist(), position.tolist(), strict=True)
    return dict(zip(queries, zip(rows.tolist(), columns.tolist(), strict=True), strict=True))


def _pairs_as_columns(
    positions: Positions, source: str, pairs: Sequence[TextPairs]
) -> Int[Tensor, "B T m"]:
    """Pairs of positions in each text as the columns of each query's keys."""
    keys, queries = _key_columns(positions), _query_columns(positions)
    key_lists: dict[tuple[int, int], list[int]] = {}
    for text, (text_pairs, columns) in enumerate(zip(pairs, keys, strict=True)):
        for query, key in sorted(set(text_pairs)):
            if not (0 <= query < len(columns) and 0 <= key < len(columns)):
                raise ArgumentError(
                    f"observe: {source} ({query}, {key}) for a text of {len(columns)} tokens. "
                    f"Give positions from 0 to {len(columns) - 1}."
                )
            if (text, query) in queries:  # not a query of an earlier pass
                key_lists.setdefault(queries[text, query], []).append(columns[key])
    width = max(map(len, key_lists.values()), default=1)
    result = torch.full((*positions.query_position.shape, width), NONE)
    if key_lists:
        rows, columns_of = torch.tensor(list(key_lists)).T
        padded = [row + [NONE] * (width - len(row)) for row in key_lists.values()]
        result[rows, columns_of] = torch.tensor(padded)
    return result.to(positions.query_position.device)
