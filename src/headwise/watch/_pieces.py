"""Passes of a model over texts of which nothing is wanted but attention."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import torch
from torch import nn

from headwise._progress import Progress
from headwise.models import device_of
from headwise.models.texts import Piece, inputs_of, text_alone, without_logits
from headwise.tables import HeadTable, sum_of_hashes
from headwise.watch._observe import observe
from headwise.watch._request import Request

# Texts in one batch.
BATCH_SIZE = 16


def watch_pieces(
    caller: str,
    model: nn.Module,
    pieces: Sequence[Piece],
    request: Request,
    on_progress: Progress | None,
    size: int = BATCH_SIZE,
) -> HeadTable:
    """The statistics of every head over all pieces, `size` of them at a time."""
    with observe(model, request) as watch:
        run_pieces(caller, model, pieces, on_progress, size)
        table = watch.table()
    hashes = (int(sha256(repr(piece).encode()).hexdigest(), 16) for piece in pieces)
    return replace(table, texts={"texts": len(pieces), "sha256": sum_of_hashes(hashes)})


@torch.no_grad()
def run_pieces(
    caller: str,
    model: nn.Module,
    pieces: Sequence[Piece],
    on_progress: Progress | None = None,
    size: int = BATCH_SIZE,
) -> None:
    """Run the model on all pieces, those of similar length together, `size` at a time."""
    done = 0
    for batch in inputs_of(pieces, size, device_of(model)):
        with text_alone(caller, model):
            model(**batch, **without_logits(model))
        done += len(batch["input_ids"])
        if on_progress is not None:
            on_progress(done, len(pieces))
