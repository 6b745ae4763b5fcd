"""One pass of a model over examples: the mass of every head on every stretch."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress
from headwise.errors import UnsupportedError
from headwise.models import Batch, device_of, pad, text_alone
from headwise.roles.task._decisions import Masses
from headwise.roles.task._examples import TokenExample
from headwise.watch import Request, observe

_TOKENS = 4096  # in one batch


@torch.no_grad()
def masses_of(
    model: nn.Module, examples: Sequence[TokenExample], on_progress: Progress | None = None
) -> Masses:
    """The mass that each head's queries give to each stretch, under the model's own kernel.

    Raises:
        UnsupportedError: the model cannot be observed exactly, or has no self-attention.
    """
    K = max(len(example.stretches) for example in examples)
    names = tuple(f"stretch {number}" for number in range(K))
    request = Request(statistics=(), spans=names, queries="all", per_text=True)
    order: list[int] = []
    with in_evaluation(model), observe(model, request) as watch:
        for rows in in_batches(examples):
            batch = [examples[row] for row in rows]
            watch.spans(
                **{
                    name: [list(example.stretches[number : number + 1]) for example in batch]
                    for number, name in enumerate(names)
                },
                queries=[list(example.query) for example in batch],
            )
            with text_alone("find_heads", model):
                model(**vars(padded(batch, model)))
            order += rows
            if on_progress is not None:
                on_progress(len(order), len(examples))
    table = watch.table()
    sums = [table.per_text(name) for name in names]
    total = np.stack([part.total for part in sums], 1)
    count = np.stack([part.count for part in sums], 1)
    if len(total) != len(examples) or not (count > 0).all():
        raise UnsupportedError(
            f"find_heads: {type(model).__name__} attends to {len(total)} texts where "
            f"{len(examples)} were given, or not with every query. Give a model whose heads "
            f"attend within one text."
        )
    back = np.argsort(order)
    exists = np.array([[k < len(example.stretches) for k in range(K)] for example in examples])
    right = np.array([[k < example.n_right for k in range(K)] for example in examples])
    return Masses(table.heads, (total / count)[back], exists, right)


def in_batches(examples: Sequence[TokenExample]) -> Iterator[list[int]]:
    """Numbers of examples of about equal length, so that there is little padding."""
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    batch: list[int] = []
    for number in order:
        if batch and (len(batch) + 1) * len(examples[number].ids) > _TOKENS:
            yield batch
            batch = []
        batch.append(number)
    yield batch


def padded(batch: Sequence[TokenExample], model: nn.Module, answers: bool = False) -> Batch:
    """The examples of a batch, in order of length, as inputs of a model.

    Args:
        answers: Whether their answers follow them.
    """
    device = device_of(model)
    ids = [(*example.ids, *example.answer) if answers else example.ids for example in batch]
    return pad(ids, device)
