"""Statistics of every head on the texts of a shard: what `observe` computes."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise._evaluation import in_evaluation
from headwise._memory import halving
from headwise.corpora import AnnotatedText
from headwise.corpora.streams import windows
from headwise.errors import ArgumentError
from headwise.jobs._measurement import Opened, WithoutSurvey, code_of
from headwise.models import (
    Piece,
    check_reads_text,
    device_of,
    inputs_of,
    iter_pieces,
    reads_two_texts,
    text_alone,
)
from headwise.tables import HeadTable
from headwise.watch import Request, observe

# Texts in one batch, and tokens with padding, unless a single text has more.
_BATCH_SIZE, _BATCH_TOKENS = 16, 2**14
# Parts of a request that describe the latest batch, or that are passed for each batch.
_NOT_OF_SHARDS = ("pairs", "spans", "received", "per_query", "maps")


class Statistics(WithoutSurvey):
    """The sums of a request's statistics; tables of shards add up to the table of all.

    Raises:
        ArgumentError: the request takes arguments for each batch, or keeps data of the latest one.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._batch_size = _BATCH_SIZE
        for name in _NOT_OF_SHARDS:
            if value := getattr(request, name):
                raise ArgumentError(
                    f"corpus: the request has {name}={value!r}, which is passed or read batch by "
                    f"batch. Use relations, or watch the model with headwise.observe."
                )

    def describe(self) -> dict[str, Any]:
        """The request; classes and relations by name, with a hash of their content."""
        request = self._request
        classes = {
            name: hashlib.blake2b(repr(sorted(set(ids))).encode(), digest_size=8).hexdigest()
            for name, ids in request.classes.items()
        }
        return {
            "kind": "statistics",
            "names": list(request.names),
            "classes": classes,
            "relations": {name: code_of(pairs) for name, pairs in request.relations.items()},
            "queries": request.queries,
            "per_text": request.per_text,
        }

    def measure(
        self, opened: Opened, texts: Iterable[AnnotatedText], shard: int
    ) -> HeadTable | None:
        """The table of some texts, in memory that does not grow with their number.

        If memory runs out, it starts again with smaller batches, which later shards keep.

        Raises:
            UnsupportedError: the model cannot be watched exactly, or reads more than text.
        """
        model = opened.model
        check_reads_text("corpus", model)

        def watched(size: int) -> HeadTable | None:
            self._batch_size = size
            any_batch = False
            with in_evaluation(model), torch.no_grad(), observe(model, self._request) as watch:
                for batch in _batches(opened, texts, size):
                    with text_alone("corpus", model):
                        model(**batch)
                    any_batch = True
                return watch.table() if any_batch else None

        return halving("corpus", watched, self._batch_size)

    def load(self, path: Path) -> HeadTable:
        """The table of a shard."""
        return HeadTable.load(path)

    def merge(self, results: Iterable[HeadTable], survey: None, model: str) -> HeadTable:
        """The table of all texts."""
        return reduce(add, results)


def _batches(
    opened: Opened, texts: Iterable[AnnotatedText], size: int
) -> Iterator[dict[str, Tensor]]:
    model = opened.model
    own_target = reads_two_texts(model)
    device = device_of(model)
    for window in windows(texts):
        pairs = [(text.text, text.text if own_target else None) for text in window]
        pieces = [*iter_pieces(opened.tokenizer, pairs, model, opened.max_tokens)]
        for group in _groups(sorted(pieces, key=lambda piece: len(piece.source)), size):
            yield from inputs_of(group, len(group), device)


def _groups(pieces: Sequence[Piece], size: int) -> Iterator[list[Piece]]:
    """Pieces of ascending length in groups of at most `size` that fit into one batch."""
    group: list[Piece] = []
    for piece in pieces:
        if len(group) == size or (len(group) + 1) * len(piece.source) > _BATCH_TOKENS:
            if group:
                yield group
            group = []
        group.append(piece)
    if group:
        yield group
