"""Two models on the same texts: their tables, with the sums of each whole text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress
from headwise.corpora import list_pairs, list_texts
from headwise.errors import ArgumentError
from headwise.models import (
    check_model,
    without_compiler,
)
from headwise.models.texts import (
    Piece,
    as_pieces,
    check_reads_text,
    context_of,
    reads_two_texts,
    token_classes,
    tokenizer_of,
)
from headwise.report._passes import by_whole_text, watch_pieces
from headwise.tables import HeadTable
from headwise.watch import DEFAULT, Request

Pair = tuple[Any, Any]


def measure_both(
    models: Pair,
    tokenizers: Pair,
    texts: Any,
    request: Request | None,
    max_tokens: int | None,
    on_progress: Progress | None,
) -> tuple[HeadTable, HeadTable]:
    """The tables of two models on the same texts.

    Raises:
        ArgumentError: the models read text in different ways, or into different tokens.
    """
    inner = [check_model("compare", model) for model in models]
    for model in inner:
        check_reads_text("compare", model)
    owners, pieces = _pieces_of_both(models, inner, tokenizers, texts, max_tokens)
    request = _request_for(_tokenizers(models, tokenizers)[0], request)
    tables = []
    for number, model in enumerate(inner):
        progress = _half(on_progress, number)
        with in_evaluation(model):
            table = watch_pieces(model, pieces[number], request, progress)
        tables.append(by_whole_text(table, owners))
    return tables[0], tables[1]


def _pieces_of_both(
    models: Pair, inner: Sequence[nn.Module], tokenizers: Pair, texts: Any, max_tokens: int | None
) -> tuple[list[int], list[list[Piece]]]:
    """For each piece its text, and the pieces of both models; their tokens are the same."""
    pairs = _pairs_for(inner, texts)
    resolved = _tokenizers(models, tokenizers)
    limits = [context_of(*side) for side in zip(inner, resolved, strict=True)]
    limit = min(limits if max_tokens is None else [max_tokens, *limits])
    owners: list[int] = []
    pieces: list[list[Piece]] = [[], []]
    for number, pair in enumerate(pairs):
        sides = [
            as_pieces(tokenizer, [pair], model, limit)
            for model, tokenizer in zip(inner, resolved, strict=True)
        ]
        tokens = [[list(piece.source) for piece in side] for side in sides]
        if tokens[0] != tokens[1]:
            raise ArgumentError(
                f"compare: the tokenizers differ: text {number} ({pair[0][:40]!r}) has "
                f"{sum(map(len, tokens[0]))} tokens before and {sum(map(len, tokens[1]))} after, "
                f"or different ones. Compare models that read the same tokens."
            )
        owners += [number] * len(sides[0])
        for side, new in zip(pieces, sides, strict=True):
            side += new
    return owners, pieces


def _pairs_for(models: Sequence[nn.Module], texts: Any) -> list[tuple[str, str | None]]:
    two = [reads_two_texts(model) for model in models]
    if two[0] != two[1]:
        names = [type(model).__name__ for model in models]
        raise ArgumentError(
            f"compare: only one of {names[0]} and {names[1]} reads two texts. Compare models of "
            f"one kind."
        )
    if two[0]:
        return [*list_pairs("compare", texts)]
    return [(text, None) for text in list_texts("compare", texts)]


def _tokenizers(models: Pair, tokenizers: Pair) -> list[Any]:
    sides = zip(models, tokenizers, strict=True)
    return [
        tokenizer_of(without_compiler(model), tokenizer, "compare") for model, tokenizer in sides
    ]


def _request_for(tokenizer: Any, request: Request | None) -> Request:
    """The request with the sums of each text; None is every statistic that a change can show in."""
    if request is not None:
        return replace(request, per_text=True)
    classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
    return Request((*DEFAULT, "output_norm"), classes=classes, per_text=True)


def _half(on_progress: Progress | None, number: int) -> Progress | None:
    """Progress over both models, which take equally long."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(done + number * total, 2 * total)
