"""Tokenized texts: the tokens of each word, from the character offsets of the tokenizer."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwise._extras import is_tokenizer_of_rust, untruncated
from headwise.corpora import AnnotatedText, Corpus, Span, list_corpus
from headwise.errors import InputError
from headwise.models.texts import TokenOffsets, token_classes, token_offsets

# A sentence ends with one of these marks and closing quotes before white space, or with a line.
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"'’”»)\]]*\s+|\n+")
_WHITE = re.compile(r"\s+")


@dataclass(frozen=True)
class TokenText:
    """A tokenized text, or a piece of one that fits into the model's context.

    Attributes:
        text: The whole text with its annotations.
        ids: The tokens.
        spans: The characters of each token in the text; empty for tokens without any.
        special: Whether each token is special: added by the tokenizer, or written out.
        punctuation: Whether each token is punctuation alone.
    """

    text: AnnotatedText
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    special: tuple[bool, ...]
    punctuation: tuple[bool, ...]

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The characters of each token, without white space; empty for tokens without any."""
        return tuple(self.text.text[start:end].strip() for start, end in self.spans)

    @cached_property
    def words(self) -> list[list[int]]:
        """The tokens of each word; none for a word of another piece.

        A token belongs to every word with which it shares a character other than white space.
        """
        return [self.tokens_in(span) for span in self.text.words]

    def tokens_in(self, span: Span) -> list[int]:
        """The tokens that share a character other than white space with a span."""
        tokens = TokenOffsets(self.ids, self.spans, self.special)
        return tokens.tokens_in(self.text.text, span)


@dataclass(frozen=True)
class Tokenized:
    """The pieces of a corpus, and how many of its texts were cut.

    Attributes:
        pieces: Every text, or its pieces.
        cut_at_sentences: Texts longer than the limit, cut between sentences.
        cut_within: Texts with a sentence longer than the limit, cut between words.
        unknown: The share of unknown tokens among those that are not special; high in a
            language that the tokenizer does not cover.
    """

    pieces: tuple[TokenText, ...]
    cut_at_sentences: int
    cut_within: int
    unknown: float


def texts_of(who: str, corpus: Corpus) -> tuple[int, list[AnnotatedText]]:
    """The number of texts in a corpus, and the distinct ones.

    Of a text that is present both with and without annotations, the annotated one is kept.

    Raises:
        ArgumentError: something in it is not a text.
        InputError: none of its texts has more than white space.
    """
    texts = list_corpus(who, corpus)
    distinct = dict.fromkeys(texts)
    annotated = {text.text for text in distinct if text != AnnotatedText(text.text)}
    kept = [
        text for text in distinct if text.text not in annotated or text != AnnotatedText(text.text)
    ]
    return len(texts), kept


def tokenize(tokenizer: Any, texts: Sequence[AnnotatedText], limit: int) -> Tokenized:
    """Tokenize texts; a text longer than `limit` tokens is cut between sentences.

    Args:
        tokenizer: A fast tokenizer of transformers, or one of the library tokenizers.
    Raises:
        UnsupportedError: the tokenizer does not report character offsets.
        InputError: a single word has more tokens than the limit.
    """
    tokenizer = untruncated(tokenizer)
    encodings = token_offsets(tokenizer, [text.text for text in texts])
    classes = {name: tokens for name, (tokens, _) in token_classes(tokenizer).items()}
    special = _names(tokenizer, classes.get("special", frozenset()))
    punctuation = classes.get("punctuation", frozenset())
    pieces: list[TokenText] = []
    cut = within = 0
    for text, encoded in zip(texts, encodings, strict=True):
        parts = [(0, encoded)]
        if len(encoded.ids) > limit:
            parts, cut_sentence = _cut(tokenizer, text.text, limit)
            cut += 1
            within += cut_sentence
        pieces += [_piece(text, start, part, special, punctuation) for start, part in parts]
    kept = tuple(piece for piece in pieces if not all(piece.special))
    return Tokenized(kept, cut - within, within, _share_of_unknown(tokenizer, kept))


def _share_of_unknown(tokenizer: Any, pieces: Sequence[TokenText]) -> float:
    """The share of unknown tokens among those that are not special."""
    rust = is_tokenizer_of_rust(tokenizer)
    name = getattr(tokenizer.model if rust else tokenizer, "unk_token", None)
    id_of = tokenizer.token_to_id if rust else tokenizer.convert_tokens_to_ids
    unknown = -1 if name is None else id_of(name)
    tokens = [
        token
        for piece in pieces
        for token, special in zip(piece.ids, piece.special, strict=True)
        if not special
    ]
    return tokens.count(unknown) / max(1, len(tokens))


def _names(tokenizer: Any, tokens: Collection[int]) -> dict[int, str]:
    """How each of these tokens is written."""
    rust = is_tokenizer_of_rust(tokenizer)
    name_of = tokenizer.id_to_token if rust else tokenizer.convert_ids_to_tokens
    return {token: name_of(token) for token in tokens}


def _piece(
    text: AnnotatedText,
    start: int,
    encoded: TokenOffsets,
    special_names: Mapping[int, str],
    punctuation: Collection[int],
) -> TokenText:
    """The piece of a text that begins at the character `start`."""
    spans = tuple((start + first, start + last) for first, last in encoded.spans)
    # The unknown token stands for a word, so it is not special; a special token that the
    # text writes out is.
    special = tuple(
        bool(added) or special_names.get(token) == text.text[slice(*span)].strip()
        for token, added, span in zip(encoded.ids, encoded.special, spans, strict=True)
    )
    return TokenText(
        text,
        ids=tuple(encoded.ids),
        spans=spans,
        special=special,
        punctuation=tuple(token in punctuation for token in encoded.ids),
    )


def _cut(tokenizer: Any, text: str, limit: int) -> tuple[list[tuple[int, TokenOffsets]], bool]:
    """The pieces of a long text, each with its first character, and whether a sentence was cut."""
    parts: list[tuple[int, TokenOffsets]] = []
    start, cut_sentence = 0, False
    while start < len(text):
        end, encoded = _longest(tokenizer, text, start, _SENTENCE_END, limit)
        if encoded is None:
            cut_sentence = True
            end, encoded = _longest(tokenizer, text, start, _WHITE, limit)
        if encoded is None:
            word = text[start:end][:30]
            raise InputError(
                f"tokenize: {word!r} has more tokens than a text may have ({limit}). Leave it out."
            )
        parts.append((start, encoded))
        start = end
    return parts, cut_sentence


def _longest(
    tokenizer: Any, text: str, start: int, ending: re.Pattern[str], limit: int
) -> tuple[int, TokenOffsets | None]:
    """The last end up to which the text fits into the limit; None if it fits up to none."""
    # White space belongs to the text before it.
    found = (match.end() for match in ending.finditer(text, start))
    ends = [end for end in found if text[start:end].strip()] + [len(text)]
    best: tuple[int, TokenOffsets | None] = (ends[0], None)
    for end in ends:
        encoded = token_offsets(tokenizer, [text[start:end]])[0]
        if len(encoded.ids) > limit:
            break
        best = end, encoded
    return best
