"""Tokenized texts: the tokens of each word, from the character offsets of the tokenizer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwise._packages import is_tokenizer_of_rust
from headwise.corpora import AnnotatedText, Corpus, Span, list_corpus
from headwise.errors import InputError
from headwise.models import TokenOffsets, token_classes, token_offsets, untruncated

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
    plain = {text: text == AnnotatedText(text.text) for text in texts}
    annotated = {text.text for text, is_plain in plain.items() if not is_plain}
    distinct = [
        text for text, is_plain in plain.items() if not (is_plain and text.text in annotated)
    ]
    return len(texts), distinct


def tokenize(tokenizer: Any, texts: Sequence[AnnotatedText], limit: int) -> Tokenized:
    """Tokenize texts; a text longer than `limit` tokens is cut between sentences.

    Args:
        tokenizer: A fast tokenizer of transformers, or one of the library tokenizers.
    Raises:
        UnsupportedError: the tokenizer does not report character offsets.
        InputError: a single word has more tokens than the limit.
    """
    tokenizer = untruncated(tokenizer)
    encoder = _Encoder(tokenizer, limit)
    encodings = token_offsets(tokenizer, [text.text for text in texts])
    pieces: list[TokenText] = []
    cut = within = 0
    for text, encoded in zip(texts, encodings, strict=True):
        if len(encoded.ids) <= limit:
            pieces.append(encoder.piece(text, encoded, 0))
            continue
        cut += 1
        text_pieces, cut_sentence = encoder.cut(text)
        within += cut_sentence
        pieces += text_pieces
    kept = tuple(piece for piece in pieces if not all(piece.special))
    return Tokenized(kept, cut - within, within, _share(kept, encoder.unknown))


def _share(pieces: Sequence[TokenText], token: int | None) -> float:
    """The share of a token among those that are not special."""
    tokens = [
        piece_token
        for piece in pieces
        for piece_token, special in zip(piece.ids, piece.special, strict=True)
        if not special
    ]
    return tokens.count(-1 if token is None else token) / max(1, len(tokens))


class _Encoder:
    """One interface to fast tokenizers of transformers and of the library tokenizers."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        rust = is_tokenizer_of_rust(tokenizer)
        self._tokenizer, self._limit = tokenizer, limit
        unknown = getattr(tokenizer.model if rust else tokenizer, "unk_token", None)
        id_of = tokenizer.token_to_id if rust else tokenizer.convert_tokens_to_ids
        self.unknown = None if unknown is None else id_of(unknown)
        classes = token_classes(tokenizer)
        nothing: tuple[frozenset[int], str] = (frozenset(), "")
        name_of = tokenizer.id_to_token if rust else tokenizer.convert_ids_to_tokens
        self._special = {token: name_of(token) for token in classes.get("special", nothing)[0]}
        self._punctuation = classes.get("punctuation", nothing)[0]

    def piece(self, text: AnnotatedText, encoded: TokenOffsets, start: int) -> TokenText:
        """The piece of a text that begins at the character `start`."""
        spans = tuple((start + first, start + last) for first, last in encoded.spans)
        # The unknown token stands for a word, so it is not special; a special token that the
        # text writes out is.
        special = tuple(
            bool(added) or self._special.get(token) == text.text[slice(*span)].strip()
            for token, added, span in zip(encoded.ids, encoded.added, spans, strict=True)
        )
        return TokenText(
            text,
            ids=tuple(encoded.ids),
            spans=spans,
            special=special,
            punctuation=tuple(token in self._punctuation for token in encoded.ids),
        )

    def cut(self, text: AnnotatedText) -> tuple[list[TokenText], bool]:
        """The pieces of a long text, and whether a sentence was cut."""
        pieces: list[TokenText] = []
        start, cut_sentence = 0, False
        while start < len(text.text):
            end, encoded = self._longest(text.text, start, _ends(text.text, start, _SENTENCE_END))
            if encoded is None:
                cut_sentence = True
                end, encoded = self._longest(text.text, start, _ends(text.text, start, _WHITE))
            if encoded is None:
                word = text.text[start:end][:30]
                raise InputError(
                    f"tokenize: {word!r} has more tokens than a text may have "
                    f"({self._limit}). Leave it out."
                )
            pieces.append(self.piece(text, encoded, start))
            start = end
        return pieces, cut_sentence

    def _longest(self, text: str, start: int, ends: list[int]) -> tuple[int, TokenOffsets | None]:
        """The last of these ends up to which the text fits; None if it fits up to none."""
        best: tuple[int, TokenOffsets | None] = (ends[0], None)
        for end in ends:
            encoded = token_offsets(self._tokenizer, [text[start:end]])[0]
            if len(encoded.ids) > self._limit:
                break
            best = end, encoded
        return best


def _ends(text: str, start: int, pattern: re.Pattern[str]) -> list[int]:
    """The ends that a piece from `start` may have; white space belongs to the text before it."""
    ends = (match.end() for match in pattern.finditer(text, start))
    return [end for end in ends if text[start:end].strip()] + [len(text)]
