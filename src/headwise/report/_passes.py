"""The forward passes of a study, over texts or, for an encoder-decoder, pairs of texts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress
from headwise.corpora import list_pairs, list_texts
from headwise.errors import ArgumentError
from headwise.models.texts import Piece, as_pieces, iter_pieces, reads_two_texts
from headwise.tables import HeadTable, TextSums, Totals
from headwise.watch import BATCH_SIZE, Request, watch_pieces

Pair = tuple[str, str | None]


def pairs_for(caller: str, model: nn.Module, texts: Any, targets: Any = None) -> list[Pair]:
    """Each text, paired with its target for an encoder-decoder.

    Raises:
        ArgumentError: there are targets for a model that reads one text, or an item is not a text.
        InputError: the texts hold no token.
    """
    if reads_two_texts(model):
        return [*list_pairs(caller, texts, targets)]
    if targets is not None:
        raise ArgumentError(
            f"{caller}: targets are for an encoder-decoder, and {type(model).__name__} reads one "
            f"text. Leave them out."
        )
    return [(text, None) for text in list_texts(caller, texts)]


def sizes_of(
    pairs: Sequence[Pair], pieces: Sequence[Piece], own_targets: bool
) -> dict[str, str | int]:
    """How many texts and tokens there are; a text that was split counts once.

    Args:
        own_targets: Whether each text is its own target.
    """
    sizes: dict[str, str | int] = {"texts": len(pairs)}
    if len(pieces) > len(pairs):
        sizes["pieces of texts"] = len(pieces)
    sizes["tokens"] = sum(len(piece.source) for piece in pieces)
    sizes["longest piece"] = max(len(piece.source) for piece in pieces)
    if pieces[0].decoder:
        sizes["targets"] = "the texts themselves" if own_targets else "separate texts"
        sizes["tokens of targets"] = sum(len(piece.decoder) for piece in pieces)
    return sizes


def observe_texts(
    caller: str,
    model: nn.Module,
    tokenizer: Any,
    pairs: Sequence[Pair],
    request: Request,
    max_tokens: int | None,
    on_progress: Progress | None,
    size: int = BATCH_SIZE,
) -> tuple[HeadTable, list[Piece]]:
    """The statistics of every head on some texts, by whole text, and the pieces of these.

    Raises:
        ArgumentError: the size of a batch is no number of texts.
    """
    if size < 1:
        raise ArgumentError(f"{caller}: batch_size={size}. Give 1 or more texts.")
    pieces = as_pieces(tokenizer, pairs, model, max_tokens)
    with in_evaluation(model):
        table = watch_pieces(caller, model, pieces, request, on_progress, size)
    if request.per_text and len(pieces) > len(pairs):
        per_text = (iter_pieces(tokenizer, [pair], model, max_tokens) for pair in pairs)
        table = by_whole_text(table, [number for number, each in enumerate(per_text) for _ in each])
    return table, pieces


def by_whole_text(table: HeadTable, owners: Sequence[int]) -> HeadTable:
    """The table with the sums of pieces added up by text: pieces of a text are not independent.

    Args:
        owners: The number of the text that each piece is from, rising.
    """
    if len(set(owners)) == len(owners):
        return table
    first = np.unique(owners, return_index=True)[1]

    def whole(totals: Totals) -> Totals:
        assert totals.per_text is not None
        parts = (np.add.reduceat(part, first, axis=0) for part in totals.per_text.parts)
        return replace(totals, per_text=TextSums(*parts))

    totals = {name: whole(totals) for name, totals in table.totals.items()}
    return replace(table, totals=totals)
