"""Which heads link two words of a text."""

import re
from typing import Any

import pandas as pd
import torch
from torch import nn

from headwise._evaluation import in_evaluation
from headwise.corpora import refuse_path
from headwise.errors import ArgumentError
from headwise.models import check_model, device_of
from headwise.models.texts import check_reads_text, pad, token_offsets, tokenizer_of
from headwise.watch._observe import observe
from headwise.watch._request import Request
from headwise.watch.layout import Stretch, stretch_tokens

Word = str | Stretch


@torch.no_grad()
def links(model: nn.Module, tokenizer: Any, text: str, source: Word, target: Word) -> pd.DataFrame:
    """Which heads link two words of a text: how much of its attention one word gives to the other.

    The weights of a word of several tokens are summed over the tokens that attended to, and
    averaged over those that attend.

    Args:
        model: An encoder or a decoder that `observe` takes.
        tokenizer: Its tokenizer, a fast one. None uses that of a `SentenceTransformer`.
        text: The text.
        source: The word that attends, as it stands in the text, or its characters `(start, end)`.
        target: The word that is attended to.
    Returns:
        A row for each head, the strongest first: `name`, `stack`, `layer`, `head`; `weight`, from
        0 to 1; and `uniform`, the weight under uniform attention. A head that may not attend
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
    request = Request(statistics=(), spans=("weight",))
    with observe(model, request) as watch, in_evaluation(model):
        watch.spans(weight=[key], queries=[query])
        model(**vars(pad([tokens.ids], device_of(model))))
    frame = watch.table().frame(detail=True)
    frame = frame.rename(columns={"weight.even": "uniform"})
    frame = frame[["name", "stack", "layer", "head", "weight", "uniform"]].dropna()
    if frame.empty:
        raise ArgumentError(
            f"links: no head may attend from {text[slice(*spans[0])]!r} to "
            f"{text[slice(*spans[1])]!r}: a decoder attends to earlier words alone. Exchange them."
        )
    return frame.sort_values("weight", ascending=False, kind="stable", ignore_index=True)


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
        where = f"occurs at {places}" if found else "is no word of the text"
        raise ArgumentError(
            f"links: {word!r} {where}. Give a word that occurs once, or its characters "
            f"(start, end)."
        )
    return found[0]


def word_tokens(tokenizer: Any, text: str, *words: Word) -> list[Stretch]:
    """The tokens of each word, as `links` takes them."""
    [tokens] = token_offsets(tokenizer, [text])
    return [stretch_tokens("links", text, tokens, _span(text, word)) for word in words]
