"""Named stretches of each text: which keys belong to them, and which queries count for them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise._display import counted
from headwise.capture import Site, Text
from headwise.corpora import one_text
from headwise.errors import ArgumentError, UnsupportedError
from headwise.kernels import RowStatistics
from headwise.models.texts import TokenOffsets, token_offsets
from headwise.tables import HeadLike
from headwise.watch._pass import Pass
from headwise.watch._positions import Positions
from headwise.watch._recorded import find_head
from headwise.watch._request import Request

Stretch = tuple[int, int]  # a half-open range of positions
LAST, GENERATED = "last", "generated"


@dataclass(frozen=True)
class TextSpans:
    """The stretches of each text, in tokens.

    Attributes:
        stretches: For each name, the stretches of every text.
        queries: The queries of every text: stretches, `last` or `generated`; None for all.
        ids: The tokens of every text, if its stretches were given in characters.
    """

    stretches: dict[str, list[list[Stretch]]]
    queries: list[list[Stretch] | str] | None = None
    ids: list[Sequence[int]] | None = None

    @classmethod
    def of(
        cls, stretches: dict[str, Any], queries: Any, texts: Sequence[str] | None, tokenizer: Any
    ) -> "TextSpans":
        """Read the arguments of `Watch.spans`."""
        by_name = {name: _per_text(name, given) for name, given in stretches.items()}
        of_queries = None
        if queries is not None:
            n_texts = len(next(iter(by_name.values())))
            given = [queries] * n_texts if isinstance(queries, str) else queries
            of_queries = _per_text("queries", given, (LAST, GENERATED))
            _check_count("queries", of_queries, n_texts, "for {}")
        if texts is None and tokenizer is None:
            return cls(by_name, of_queries)
        if texts is None or tokenizer is None or isinstance(texts, str):
            raise ArgumentError(
                f"Watch.spans: texts={texts!r:.40} and tokenizer={tokenizer!r:.40}. Give a list "
                f"of texts and their tokenizer, so that positions count characters, or neither."
            )
        texts = [one_text("Watch.spans", text, f"texts[{n}]") for n, text in enumerate(texts)]
        encoded = token_offsets(tokenizer, texts)
        by_name = {name: _in_tokens(name, given, texts, encoded) for name, given in by_name.items()}
        if of_queries is not None:
            of_queries = _in_tokens("queries", of_queries, texts, encoded)
        return cls(by_name, of_queries, [tokens.ids for tokens in encoded])


@dataclass(frozen=True)
class SpanMembers:
    """Which keys belong to each of `C` spans, and which queries count."""

    keys: Bool[Tensor, "B S C"]
    queries: Bool[Tensor, "B T"]


@dataclass(frozen=True)
class _Current:
    """The stretches of the current texts, and how far these were read.

    Attributes:
        first_pass: The number of the pass that begins the texts, or goes on with them.
        begun: The first pass of each stack on these texts.
        ends: How far each stack has read them.
        kept: Of each site, pass by pass, the masses of its queries on each span, [B, H, T, C].
    """

    spans: TextSpans
    first_pass: int
    begun: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    kept: dict[Site, list[tuple[Positions, SpanMembers, Tensor]]] = field(default_factory=dict)


class Spans:
    """The stretches of the current texts, which last while a cache continues these texts.

    In an encoder-decoder the stretches lie in the source and the queries in the target.
    """

    def __init__(self, request: Request, stacks: Collection[str]) -> None:
        self._names, self._keeps = request.spans, request.per_query
        self._two_texts = {"encoder", "decoder"} <= set(stacks)
        self._current: _Current | None = None

    def set(self, forward_pass: int, spans: TextSpans) -> None:
        """Set the stretches of the texts that begin, or go on, in a forward pass."""
        if set(spans.stretches) != set(self._names):
            raise ArgumentError(
                f"Watch.spans: {', '.join(sorted(spans.stretches)) or 'nothing'} given, but the "
                f"request has spans={self._names}. Give the stretches of each of them."
            )
        self._current = _Current(spans, forward_pass)

    def members(
        self, site: Site, positions: Positions, key_text: Text, text: Text, pass_: Pass
    ) -> SpanMembers | None:
        """The keys of each span and the queries that count in a call; None without spans.

        Args:
            key_text: The text of the keys.
            text: The text of the queries.
        """
        if not self._names:
            return None
        if not self._applies(site, text):
            none = positions.key_real.new_zeros(*positions.key_real.shape, len(self._names))
            return SpanMembers(none, torch.zeros_like(positions.query_real))
        current = self._current_of(site, positions, pass_)
        spans, queries, keys = current.spans, positions.query_real, positions.keys
        _check_lengths(spans, positions)
        if spans.ids is not None and pass_.number == current.first_pass and not positions.is_cross:
            _check_ids(spans.ids, positions, key_text)
        first_pass = current.begun.get(site.stack, pass_.number)
        pass_.add(partial(current.begun.setdefault, site.stack, first_pass))
        if spans.queries is not None:
            of_target = self._two_texts and not site.cross
            is_first = pass_.number == first_pass
            named = _query_members(spans.queries, positions, text, is_first)
            queries = torch.zeros_like(queries) if of_target else queries & named
        position = keys.position + positions.evicted
        by_name = [_members(spans.stretches[name], keys.text, position) for name in self._names]
        return SpanMembers(torch.stack(by_name, -1) & positions.key_real[..., None], queries)

    def _applies(self, site: Site, text: Text) -> bool:
        """Whether the keys of a site belong to the text that stretches are of."""
        if self._two_texts:
            return site.stack == "encoder" or site.cross
        # A tower of images beside one of text knows no tokens.
        return not site.cross and (site.stack == "" or text.tokens is not None)

    def _current_of(self, site: Site, positions: Positions, pass_: Pass) -> _Current:
        """The stretches of the texts of a call."""
        current = self._current
        if current is None or not (
            pass_.number <= current.first_pass
            or self._continues(positions, current.ends.get(site.stack))
        ):
            raise ArgumentError(
                f"observe: no spans were given for the texts of forward pass {pass_.number}. Call "
                f"watch.spans({self._names[0]}=[...]) before it."
            )
        if positions.columns is not None:
            pass_.add(partial(current.ends.__setitem__, site.stack, positions.columns.stop))
        return current

    def _continues(self, positions: Positions, end: int | None) -> bool:
        """Whether a pass after the first one, which has read up to `end`, goes on from there."""
        columns = positions.columns
        if columns is None:
            return True
        if end is None:
            return self._two_texts or columns.start > 0
        return 0 < end <= columns.start or (end == columns.stop and columns.start > 0)

    def keep(
        self,
        site: Site,
        positions: Positions,
        members: SpanMembers | None,
        rows: RowStatistics,
        pass_: Pass,
    ) -> None:
        """Keep the mass of each query on each span, NaN where it sees none of its keys."""
        current = self._current
        if not (current and members) or rows.class_mass is None or rows.class_keys is None:
            return
        C = len(self._names)
        seen = rows.class_keys[..., -C:] > 0
        mass = rows.class_mass[..., -C:].masked_fill(~seen, torch.nan)
        pass_.add(lambda: current.kept.setdefault(site, []).append((positions, members, mass)))

    def per_query(self, name: str, head: HeadLike) -> list[Float[Tensor, " n"]]:
        """The mass of each counted query of each text on a span, pass after pass."""
        if not self._keeps or name not in self._names:
            raise ArgumentError(
                f"Watch.per_query: {name!r} with spans={self._names} and per_query={self._keeps}. "
                f"Observe with Request(spans=({name!r},), per_query=True)."
            )
        kept = self._current.kept if self._current else {}
        site, row = find_head(head, kept)
        passes, column = kept[site], self._names.index(name)
        parts: list[list[Tensor]] = [[] for _ in range(passes[0][0].n_texts)]
        for positions, members, mass in passes:
            for text, masses in enumerate(parts):
                is_of_text = members.queries & (positions.query_text == text)
                masses.append(mass[:, row, :, column][is_of_text])
        return [torch.cat(masses) for masses in parts]


def _check_lengths(spans: TextSpans, positions: Positions) -> None:
    """Refuse stretches that do not fit the texts."""
    lengths = positions.keys.length + positions.evicted[positions.keys.row, 0]
    for name, by_text in spans.stretches.items():
        _check_count(name, by_text, positions.n_texts, "where the model reads {}")
        pairs = zip(by_text, lengths.tolist(), strict=True)
        beyond = [(s, n) for stretches, n in pairs for s in stretches if s[1] > n]
        if beyond:
            stretch, length = beyond[0]
            raise ArgumentError(
                f"Watch.spans: {name!r} has {stretch} in a text of {length} tokens. Give "
                f"positions from 0 to {length}."
            )


def _members(
    stretches: Sequence[Sequence[Stretch]], text: Int[Tensor, "B n"], position: Int[Tensor, "B n"]
) -> Bool[Tensor, "B n"]:
    """Whether each position of a text, both by their numbers, belongs to a stretch of this text."""
    last = max((end for of_text in stretches for _, end in of_text), default=0)  # in none
    table = np.zeros((len(stretches), last + 1), dtype=bool)
    for row, of_text in zip(table, stretches, strict=True):
        for start, end in of_text:
            row[start:end] = True
    return torch.from_numpy(table).to(text.device)[text, position.clamp(max=last)]


def _query_members(
    queries: Sequence[list[Stretch] | str], positions: Positions, text: Text, is_first: bool
) -> Bool[Tensor, "B T"]:
    """Which queries of a pass are named."""
    named = [[] if isinstance(of_text, str) else of_text for of_text in queries]
    position = positions.query_position + _offset(positions, text)
    result = _members(named, positions.query_text, position)
    for word, members in ((LAST, _last(positions)), (GENERATED, not is_first)):
        has_word = torch.tensor([given == word for given in queries], device=result.device)
        result = result | (has_word[positions.query_text] & members)
    return result


def _offset(positions: Positions, text: Text) -> Tensor:
    """How far the positions of queries lie from the beginning of their texts.

    In cross-attention, positions count from the first query of the pass.
    """
    if not positions.is_cross:
        return positions.evicted
    T = positions.query_position.shape[1]
    if text.real is not None and text.real.shape[1] >= T:
        return text.real[:, : text.real.shape[1] - T].sum(-1, keepdim=True)
    return torch.as_tensor(text.cached or 0, device=positions.query_position.device)


def _last(positions: Positions) -> Bool[Tensor, "B T"]:
    """The last query of each text in a pass."""
    number, real = positions.query_text, positions.query_real
    at = positions.query_position.masked_fill(~real, -1)
    last = torch.full((positions.n_texts,), -1, dtype=at.dtype, device=at.device)
    last = last.scatter_reduce(0, number.flatten(), at.flatten(), "amax")
    return real & (at == last[number])


def _check_ids(ids: Sequence[Sequence[int]], positions: Positions, text: Text) -> None:
    """Refuse characters of texts whose tokens are not those that the model reads."""
    keys = positions.keys
    if text.ids is None or text.ids.shape[1] != keys.index.shape[1]:
        raise UnsupportedError(
            "Watch.spans: positions in characters need whole texts as input_ids. Give positions "
            "in tokens, without texts."
        )
    for number, expected in enumerate(ids):
        start, length = int(keys.start[number]), int(keys.length[number])
        row = keys.row[number]
        columns = keys.index[row, start : start + length]
        read = text.ids[row].to(columns.device)[columns].tolist()
        if read != list(expected):
            raise ArgumentError(
                f"Watch.spans: text {number} has {len(expected)} tokens by the tokenizer, and the "
                f"model reads {length}, of which some differ. Give the texts that it reads."
            )


def _per_text(name: str, given: Any, words: Collection[str] = ()) -> list[Any]:
    """The stretches of each text, of which each is a pair, a list of pairs, or one of the words."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not len(given):
        raise ArgumentError(
            f"Watch.spans: {name}={given!r}. Give a list with (start, end), or a list of them, "
            f"for each text."
        )
    return [
        text if text in words else read_stretches(f"Watch.spans: {name!r}", text) for text in given
    ]


def _check_count(name: str, given: Sequence[Any], n_texts: int, whose: str) -> None:
    """Refuse stretches of more texts than there are, or of fewer."""
    if len(given) != n_texts:
        raise ArgumentError(
            f"Watch.spans: {name!r} has stretches of {counted(len(given), 'text')} "
            f"{whose.format(counted(n_texts, 'text'))}. "
            f"Give those of each text."
        )


def read_stretches(caller: str, given: Any) -> list[Stretch]:
    """One stretch or several, as a list.

    Raises:
        ArgumentError: something is not `(start, end)` with 0 <= start < end.
    """
    pairs = [given] if is_pair(given) else given
    are_pairs = isinstance(pairs, Sequence) and all(map(is_pair, pairs))
    if are_pairs and all(0 <= start < end for start, end in pairs):
        return [(int(start), int(end)) for start, end in pairs]
    raise ArgumentError(
        f"{caller} has {given!r}. Give (start, end) with 0 <= start < end, or a list of them."
    )


def is_pair(given: Any) -> bool:
    """Whether something is a pair of whole numbers."""
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    return is_sequence and len(given) == 2 and all(isinstance(part, Integral) for part in given)


def _in_tokens(
    name: str, given: list[Any], texts: Sequence[str], encoded: Sequence[TokenOffsets]
) -> list[Any]:
    """Stretches of characters as stretches of tokens."""
    _check_count(name, given, len(texts), "beside {} of texts=")
    return [
        stretches
        if isinstance(stretches, str)
        else [stretch_tokens(f"Watch.spans: {name!r}", text, tokens, span) for span in stretches]
        for stretches, text, tokens in zip(given, texts, encoded, strict=True)
    ]


def stretch_tokens(caller: str, text: str, tokens: TokenOffsets, span: Stretch) -> Stretch:
    """The tokens of a stretch of characters, from the first to the last.

    Raises:
        ArgumentError: it has no token, or lies outside the text.
    """
    inside = tokens.tokens_in(text, span)
    if span[1] > len(text):
        raise ArgumentError(
            f"{caller} has {span} in a text of {len(text)} characters. Give characters of the text."
        )
    if not inside:
        raise ArgumentError(
            f"{caller} has {span}, {text[slice(*span)][:30]!r}, in a text of {len(text)} "
            f"characters: no token. Give characters of the text other than white space."
        )
    return inside[0], inside[-1] + 1
