"""Annotated texts as tokens: which tokens each word is made of, as the tokenizer says."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from headwise.corpora import AnnotatedText, Corpus, Span, list_corpus
from headwise.errors import InputError, UnsupportedError
from headwise.models import token_classes

# A sentence ends with one of these, and what closes after it, before white space; or with a line.
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"'’”»)\]]*\s+|\n+")
_WHITE = re.compile(r"\s+")


@dataclass(frozen=True)
class TokenText:
    """A text, or a piece of one, as a model reads it.

    Attributes:
        text: What is known of the whole text.
        ids: The tokens.
        spans: The characters of each token in the text; empty for tokens without any.
        special: Whether each token is special: put there by the tokenizer, or no text at all.
        punctuation: Whether each token is punctuation alone.
    """

    text: AnnotatedText
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    special: tuple[bool, ...]
    punctuation: tuple[bool, ...]

    @cached_property
    def words(self) -> list[list[int]]:
        """The tokens of each word; none for a word of another piece.

        A token belongs to every word with which it shares a character that can be seen.
        """
        return [self.tokens_in(span) for span in self.text.words]

    def tokens_in(self, span: Span) -> list[int]:
        """The tokens that share a character that can be seen with a span."""
        first, last = span
        return [
            at
            for at in range(len(self.ids))
            if not self.special[at]
            and (start := max(first, self.spans[at][0])) < (end := min(last, self.spans[at][1]))
            and self.text.text[start:end].strip()
        ]


@dataclass(frozen=True)
class Tokenized:
    """The pieces of a corpus, and how many of its texts had to be cut where.

    Attributes:
        pieces: Every text, or its pieces.
        cut_at_sentences: Texts longer than the model reads, cut between sentences.
        cut_within: Those with a sentence longer than that, cut between words.
        unknown: The share of the tokens of text that stand for whatever the tokenizer does not
            know; high in a language that the model has never read.
    """

    pieces: tuple[TokenText, ...]
    cut_at_sentences: int
    cut_within: int
    unknown: float


def texts_of(who: str, corpus: Corpus) -> tuple[int, list[AnnotatedText]]:
    """How many texts a corpus has, and the distinct ones.

    A text that stands there both bare and annotated is the annotated one.

    Raises:
        ArgumentError: something in it is not a text.
        InputError: none of its texts has more than white space.
    """
    texts = list_corpus(who, corpus)
    bare = {one: one == AnnotatedText(one.text) for one in texts}
    known = {one.text for one, alone in bare.items() if not alone}
    return len(texts), [one for one, alone in bare.items() if not (alone and one.text in known)]


def tokenize(tokenizer: Any, texts: Sequence[AnnotatedText], limit: int) -> Tokenized:
    """Tokenize texts, each cut between sentences where it is longer than `limit` tokens.

    Args:
        tokenizer: A fast tokenizer of transformers, or one of the library tokenizers.
    Raises:
        UnsupportedError: the tokenizer cannot say which characters a token stands for.
        InputError: a single word has more tokens than the limit.
    """
    reader = _Reader(tokenizer, limit)
    pieces: list[TokenText] = []
    cut = within = 0
    for text, whole in zip(texts, reader.read([text.text for text in texts]), strict=True):
        if len(whole.ids) <= limit:
            pieces.append(reader.piece(text, whole, 0))
            continue
        cut += 1
        found, hard = reader.cut(text)
        within += hard
        pieces += found
    kept = tuple(one for one in pieces if not all(one.special))
    return Tokenized(kept, cut - within, within, _share(kept, reader.unknown))


def _share(pieces: Sequence[TokenText], which: int | None) -> float:
    """The share of a token among those that are text."""
    text = [
        one
        for piece in pieces
        for one, special in zip(piece.ids, piece.special, strict=True)
        if not special
    ]
    return text.count(-1 if which is None else which) / max(1, len(text))


@dataclass(frozen=True)
class _Encoded:
    ids: Sequence[int]
    spans: Sequence[Span]
    added: Sequence[int]  # 1 for a token that the tokenizer put there


class _Reader:
    """A tokenizer that says where each token stands, whatever kind it is."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        own = isinstance(tokenizer, Tokenizer)
        if not own and not getattr(tokenizer, "is_fast", False):
            raise UnsupportedError(
                f"tokenize: {type(tokenizer).__name__} cannot say which characters a token stands "
                f"for (a slow tokenizer). Load its fast version (use_fast=True)."
            )
        if own and (tokenizer.truncation or tokenizer.padding):
            tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the given one stays as it is
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._tokenizer, self._own, self._limit = tokenizer, own, limit
        unknown = getattr(tokenizer.model if own else tokenizer, "unk_token", None)
        id_of = tokenizer.token_to_id if own else tokenizer.convert_tokens_to_ids
        self.unknown = None if unknown is None else id_of(unknown)
        classes = token_classes(tokenizer)
        nothing: tuple[frozenset[int], str] = (frozenset(), "")
        name_of = tokenizer.id_to_token if own else tokenizer.convert_ids_to_tokens
        self._special = {one: name_of(one) for one in classes.get("special", nothing)[0]}
        self._punctuation = classes.get("punctuation", nothing)[0]

    def read(self, texts: Sequence[str]) -> list[_Encoded]:
        if not texts:  # which a tokenizer need not know what to do with
            return []
        if self._own:
            found = self._tokenizer.encode_batch(list(texts))
            return [_Encoded(one.ids, one.offsets, one.special_tokens_mask) for one in found]
        said = self._tokenizer(
            list(texts),
            truncation=False,
            padding=False,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,  # texts that are too long are cut below
        )
        columns = (said["input_ids"], said["offset_mapping"], said["special_tokens_mask"])
        return [_Encoded(*parts) for parts in zip(*columns, strict=True)]

    def piece(self, text: AnnotatedText, found: _Encoded, start: int) -> TokenText:
        """A piece of a text that begins at the character `start`."""
        spans = tuple((start + first, start + last) for first, last in found.spans)
        # A word that the tokenizer does not know is text; a special token that is written out
        # is none.
        special = tuple(
            bool(added) or self._special.get(one) == text.text[slice(*span)].strip()
            for one, added, span in zip(found.ids, found.added, spans, strict=True)
        )
        return TokenText(
            text,
            ids=tuple(found.ids),
            spans=spans,
            special=special,
            punctuation=tuple(one in self._punctuation for one in found.ids),
        )

    def cut(self, text: AnnotatedText) -> tuple[list[TokenText], bool]:
        """The pieces of a long text, and whether a sentence had to be cut."""
        pieces: list[TokenText] = []
        start, hard = 0, False
        while start < len(text.text):
            end, found = self._longest(text.text, start, _ends(text.text, start, _SENTENCE_END))
            if found is None:
                hard = True
                end, found = self._longest(text.text, start, _ends(text.text, start, _WHITE))
            if found is None:
                word = text.text[start:end][:30]
                raise InputError(
                    f"tokenize: {word!r} has more tokens than a text may have "
                    f"({self._limit}). Leave it out."
                )
            pieces.append(self.piece(text, found, start))
            start = end
        return pieces, hard

    def _longest(self, text: str, start: int, ends: list[int]) -> tuple[int, _Encoded | None]:
        """The latest of these ends up to which the text fits; None where not even one does."""
        best: tuple[int, _Encoded | None] = (ends[0], None)
        for end in ends:
            found = self.read([text[start:end]])[0]
            if len(found.ids) > self._limit:
                break
            best = end, found
        return best


def _ends(text: str, start: int, pattern: re.Pattern[str]) -> list[int]:
    """Where a piece that begins at `start` may end; white space goes with what stands before."""
    found = (match.end() for match in pattern.finditer(text, start))
    return [end for end in found if text[start:end].strip()] + [len(text)]
