"""Which heads link two words of a text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unicodedata import category, name

import pandas as pd
import torch
from torch import nn

from headwise._display import did_you_mean
from headwise._evaluation import in_evaluation
from headwise.corpora import one_text
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model, device_of
from headwise.models.texts import (
    check_fits,
    check_reads_text,
    pad,
    reads_two_texts,
    text_alone,
    token_offsets,
    tokenizer_of,
)
from headwise.watch._observe import observe
from headwise.watch._request import Request
from headwise.watch._spans import Stretch, is_pair, stretch_tokens

Word = str | Stretch
# Scripts that put no space between words, by the beginnings of their characters' Unicode names.
_WITHOUT_SPACES = (
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI"),
)
_JOINERS = "\u200c\u200d"  # belong to the letters around them, as marks do


def links(
    model: nn.Module, text: str, source: Word, target: Word, *, tokenizer: Any = None
) -> pd.DataFrame:
    """Which heads link two words of a text: how much of its attention one word gives to the other.

    The weights of a word of several tokens are summed over the tokens that attended to, and
    averaged over those that attend. A head links the two only if the other tokens give the target
    less: one that sends every token there says nothing of the pair, however large its weight.

    Args:
        model: An encoder or a decoder that `observe` takes.
        text: The text.
        source: The word that attends, as it stands in the text, or its characters `(start, end)`.
            A combining mark belongs to its letter; where a script puts no space between words, any
            whole letters are a word.
        target: The word that is attended to.
        tokenizer: Its tokenizer, a fast one. None uses that of a `SentenceTransformer`.
    Returns:
        A row for each head, by `weight` − `others`, the largest first: `name`, `stack`, `layer`,
        `head`; `weight`, from 0 to 1; `uniform`, the weight under uniform attention; and
        `others`, the mean weight that all other tokens of the text, special ones too, give to
        the target: those that may attend to it, and NaN without one. A head that may not attend
        from one word to the other is left out.
    Raises:
        ArgumentError: the text is no string or longer than the model can read; a word does not
            occur in it, occurs more than once, or has no token; or no head may attend from one to
            the other, as from a word to a later one in a decoder.
        UnsupportedError: the model cannot be watched exactly, or reads more than one text.
    """
    wrapper, model = model, check_model("links", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "links")
    check_reads_text("links", model)
    if reads_two_texts(model):
        raise UnsupportedError(
            f"links: {type(model).__name__} reads two texts. Give a model of one text, or "
            f"hw.look(model, text, tokenizer=tokenizer, target=...) for both."
        )
    ids, query, key = word_tokens(tokenizer, one_text("links", text), source, target)
    check_fits("links", model, tokenizer, len(ids))
    return links_of(model, ids, query, key, (source, target))


@torch.no_grad()
def links_of(
    model: nn.Module, ids: Sequence[int], query: Stretch, key: Stretch, words: tuple[Word, Word]
) -> pd.DataFrame:
    """The table of `links` for the tokens of two words in those of a text."""
    around = [(0, query[0]), (query[1], len(ids))]
    others = [(start, end) for start, end in around if start < end]
    request = Request(statistics=(), spans=("weight",))
    # A watch averages over one set of queries: the word's, and those of the rest.
    with observe(model, request) as watch, observe(model, request) as rest, in_evaluation(model):
        watch.spans(weight=[key], queries=[query])
        rest.spans(weight=[key], queries=[others])
        with text_alone("links", model):
            model(**pad([ids], device_of(model)))
    frame = watch.table().frame(detail=True)
    frame = frame.rename(columns={"weight.uniform": "uniform"})
    frame = frame[["name", "stack", "layer", "head", "weight", "uniform"]]
    frame["others"] = rest.table().frame()["weight"]
    frame = frame.dropna(subset=["weight"])
    if frame.empty:
        raise ArgumentError(
            f"links: no head may attend from {words[0]!r} to {words[1]!r}: a decoder attends to "
            f"earlier words alone. Exchange them."
        )
    # Not by the weight alone: its largest are often heads that send every token to the target.
    above = frame["weight"] - frame["others"].fillna(0)
    return frame.loc[above.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)


def word_tokens(
    tokenizer: Any, text: str, source: Word, target: Word
) -> tuple[Sequence[int], Stretch, Stretch]:
    """The token ids of a text, and the tokens of two words of it, as `links` takes them."""
    [tokens] = token_offsets(tokenizer, [text])
    query, key = (
        stretch_tokens("links", text, tokens, _span(name, text, word))
        for name, word in (("source", source), ("target", target))
    )
    return tokens.ids, query, key


def _span(argument: str, text: str, word: Word) -> Stretch:
    """The characters of a word.

    Raises:
        ArgumentError: it does not occur, or more than once, or is neither a word nor characters.
    """
    if not isinstance(word, str):
        if not is_pair(word) or not 0 <= word[0] < word[1]:
            raise ArgumentError(
                f"links: {argument} is {word!r:.60}. Give a word of the text, or its characters "
                f"(start, end) with 0 <= start < end."
            )
        return int(word[0]), int(word[1])
    starts = [start for start in range(len(text)) if text.startswith(word, start)]
    found = [
        (start, start + len(word))
        for start in starts
        if word.strip() and is_border(text, start) and is_border(text, start + len(word))
    ]
    if len(found) != 1:
        places = ", ".join(map(str, found[:8]))
        near = did_you_mean(word, _words(text))
        where = f"occurs at {places}." if found else f"is no word of the text.{near}"
        raise ArgumentError(
            f"links: {word!r} {where} Give a word that occurs once, or its characters (start, end)."
        )
    return found[0]


def _words(text: str) -> list[str]:
    """The stretches of letters and digits between borders."""
    borders = [place for place in range(len(text) + 1) if is_border(text, place)]
    parts = [text[start:end] for start, end in pairwise(borders)]
    return [part for part in parts if part[0].isalnum()]


def is_border(text: str, place: int) -> bool:
    """Whether a word may begin or end before a character of a text.

    A simple form of Unicode's word boundaries (UAX #29), which leaves words that are written
    without spaces to dictionaries: there every border between letters will do.
    """
    if not 0 < place < len(text):
        return True
    if _extends(text[place]):
        return False
    before = place - 1
    while before and _extends(text[before]):
        before -= 1
    return not (_spells(text[before]) and _spells(text[place]))


def _extends(character: str) -> bool:
    """Whether a character belongs to the one before it, as a combining mark does."""
    return category(character).startswith("M") or character in _JOINERS


def _spells(character: str) -> bool:
    """Whether a character is part of a word in a script that separates words."""
    is_letter = character.isalnum() or character == "_"
    return is_letter and not name(character, "").startswith(_WITHOUT_SPACES)
