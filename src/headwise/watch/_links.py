"""Which heads link two words of a text."""

import re
from typing import Any

import pandas as pd
import torch
from torch import nn

from headwise._display import did_you_mean
from headwise._evaluation import in_evaluation
from headwise.corpora import refuse_path
from headwise.errors import ArgumentError
from headwise.models import check_model, device_of
from headwise.models.texts import check_reads_text, pad, token_offsets, tokenizer_of
from headwise.watch._observe import observe
from headwise.watch._request import Request
from headwise.watch._spans import Stretch, stretch_tokens

Word = str | Stretch


@torch.no_grad()
def links(model: nn.Module, tokenizer: Any, text: str, source: Word, target: Word) -> pd.DataFrame:
    """Which heads link two words of a text: how much of its attention one word gives to the other.

    The weights of a word of several tokens are summed over the tokens that attended to, and
    averaged over those that attend. A head links the two only if the other tokens give the target
    less: one that sends every token there says nothing of the pair, however large its weight.

    Args:
        model: An encoder or a decoder that `observe` takes.
        tokenizer: Its tokenizer, a fast one. None uses that of a `SentenceTransformer`.
        text: The text.
        source: The word that attends, as it stands in the text, or its characters `(start, end)`.
        target: The word that is attended to.
    Returns:
        A row for each head, by `weight` − `others`, the largest first: `name`, `stack`, `layer`,
        `head`; `weight`, from 0 to 1; `uniform`, the weight under uniform attention; and
        `others`, the mean weight that all other tokens of the text, special ones too, give to
        the target: those that may attend to it, and NaN without one. A head that may not attend
        from one word to the other is left out.
    Raises:
        ArgumentError: a word does not occur in the text, occurs more than once, or has no token;
            or no head may attend from one to the other, as from a word to a later one in a
            decoder.
        UnsupportedError: the model cannot be watched exactly, or reads more than one text.
    """
    wrapper, model = model, check_model("links", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "links")
    check_reads_text("links", model)
    refuse_path("links", "text", text)
    [tokens] = token_offsets(tokenizer, [text])
    spans = [_span(text, word) for word in (source, target)]
    query, key = (stretch_tokens("links", text, tokens, span) for span in spans)
    around = [(0, query[0]), (query[1], len(tokens.ids))]
    others = [(start, end) for start, end in around if start < end]
    request = Request(statistics=(), spans=("weight",))
    # A watch averages over one set of queries: the word's, and those of the rest.
    with observe(model, request) as watch, observe(model, request) as rest, in_evaluation(model):
        watch.spans(weight=[key], queries=[query])
        rest.spans(weight=[key], queries=[others])
        model(**vars(pad([tokens.ids], device_of(model))))
    frame = watch.table().frame(detail=True)
    frame = frame.rename(columns={"weight.even": "uniform"})
    frame = frame[["name", "stack", "layer", "head", "weight", "uniform"]]
    frame["others"] = rest.table().frame()["weight"]
    frame = frame.dropna(subset=["weight"])
    if frame.empty:
        raise ArgumentError(
            f"links: no head may attend from {text[slice(*spans[0])]!r} to "
            f"{text[slice(*spans[1])]!r}: a decoder attends to earlier words alone. Exchange them."
        )
    # Not by the weight alone: its largest are often heads that send every token to the target.
    above = frame["weight"] - frame["others"].fillna(0)
    return frame.loc[above.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)


def _span(text: str, word: Word) -> Stretch:
    """The characters of a word.

    Raises:
        ArgumentError: it does not occur, or more than once.
    """
    if not isinstance(word, str):
        return word
    whole = rf"(?<!\w){re.escape(word)}(?!\w)"
    found = [match.span() for match in re.finditer(whole, text)] if word.strip() else []
    if len(found) != 1:
        places = ", ".join(map(str, found[:8]))
        near = did_you_mean(word, re.findall(r"\w+", text))
        where = f"occurs at {places}." if found else f"is no word of the text.{near}"
        raise ArgumentError(
            f"links: {word!r} {where} Give a word that occurs once, or its characters (start, end)."
        )
    return found[0]


def word_tokens(tokenizer: Any, text: str, *words: Word) -> list[Stretch]:
    """The tokens of each word, as `links` takes them."""
    [tokens] = token_offsets(tokenizer, [text])
    return [stretch_tokens("links", text, tokens, _span(text, word)) for word in words]
