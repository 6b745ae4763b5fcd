"""The arguments of `Watch.spans`: stretches of each text, in tokens or in characters."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from headwise.errors import ArgumentError
from headwise.models.texts import TokenOffsets, token_offsets

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
        of_queries = (
            None if queries is None else _queries(queries, len(next(iter(by_name.values()))))
        )
        if texts is None and tokenizer is None:
            return cls(by_name, of_queries)
        if texts is None or tokenizer is None or isinstance(texts, str):
            raise ArgumentError(
                f"Watch.spans: texts={texts!r:.40} and tokenizer={type(tokenizer).__name__}. Give "
                f"a list of texts and their tokenizer, so that positions count characters, or "
                f"neither."
            )
        encoded = token_offsets(tokenizer, texts)
        by_name = {name: _in_tokens(name, given, texts, encoded) for name, given in by_name.items()}
        if of_queries is not None:
            of_queries = _in_tokens("queries", of_queries, texts, encoded)
        return cls(by_name, of_queries, [tokens.ids for tokens in encoded])


def _per_text(name: str, given: Any) -> list[list[Stretch]]:
    """The stretches of each text, of which each is a pair or a list of pairs."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not len(given):
        raise ArgumentError(
            f"Watch.spans: {name}={given!r}. Give a list with (start, end), or a list of them, "
            f"for each text."
        )
    return [read_stretches(f"Watch.spans: {name!r}", text) for text in given]


def _queries(given: Any, n_texts: int) -> list[list[Stretch] | str]:
    """The queries of each text: stretches, `last` or `generated`."""
    if isinstance(given, str):
        given = [given] * n_texts
    if not isinstance(given, Sequence) or len(given) != n_texts:
        raise ArgumentError(
            f"Watch.spans: queries={given!r} for {n_texts} texts. Give 'last', 'generated', or a "
            f"list with (start, end), or a list of them, for each text."
        )
    return [
        text if text in (LAST, GENERATED) else read_stretches("Watch.spans: 'queries'", text)
        for text in given
    ]


def read_stretches(caller: str, given: Any) -> list[Stretch]:
    """One stretch or several, as a list.

    Raises:
        ArgumentError: something is not `(start, end)` with 0 <= start < end.
    """
    pairs = [given] if _is_pair(given) else given
    are_pairs = isinstance(pairs, Sequence) and all(map(_is_pair, pairs))
    if are_pairs and all(0 <= start < end for start, end in pairs):
        return [(int(start), int(end)) for start, end in pairs]
    raise ArgumentError(
        f"{caller} has {given!r}. Give (start, end) with 0 <= start < end, or a list of them."
    )


def _is_pair(given: Any) -> bool:
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    return is_sequence and len(given) == 2 and all(isinstance(part, Integral) for part in given)


def _in_tokens(
    name: str, given: list[Any], texts: Sequence[str], encoded: Sequence[TokenOffsets]
) -> list[Any]:
    """Stretches of characters as stretches of tokens."""
    if len(given) != len(texts):
        raise ArgumentError(
            f"Watch.spans: {name!r} has stretches of {len(given)} texts, where {len(texts)} texts "
            f"are given. Give those of each text."
        )
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
    if not inside or span[1] > len(text):
        raise ArgumentError(
            f"{caller} has {span}, {text[slice(*span)][:30]!r}, in a text of {len(text)} "
            f"characters: no token. Give characters of the text other than white space."
        )
    return inside[0], inside[-1] + 1
