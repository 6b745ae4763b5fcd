"""The mass of every head on every stretch of examples, and what heads and sets of heads decide.

A head decides for the stretch that gets the most of its attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress
from headwise.errors import UnsupportedError
from headwise.models import device_of
from headwise.models.texts import (
    Batch,
    pad,
    text_alone,
)
from headwise.roles.evaluation import TIE
from headwise.roles.task._examples import TokenExample
from headwise.tables import Head
from headwise.watch import Request, observe

_TOKENS = 4096  # in one batch
_CANDIDATES = 64  # heads that a set is chosen from
_RANDOM_SETS = 200

PerHead = Float[np.ndarray, "M N"]


@dataclass(frozen=True)
class Masses:
    """The attention that each of `N` heads gives to each of up to `K` stretches of `M` examples.

    Attributes:
        mass: The mean over the queries of an example of their mass on a stretch.
        exists: Whether an example has so many stretches.
        right: Whether a stretch is a right one.
    """

    heads: tuple[Head, ...]
    mass: Float[np.ndarray, "M K N"]
    exists: Bool[np.ndarray, "M K"]
    right: Bool[np.ndarray, "M K"]

    def hits(self, mass: Float[np.ndarray, "M K N"] | None = None) -> PerHead:
        """1 where the stretch with the largest mass is a right one; stretches that tie share it."""
        shown = self._shown(self.mass if mass is None else mass)
        top = shown >= shown.max(1, keepdims=True) * (1 - TIE)
        right: PerHead = (top & self.right[..., None]).sum(1) / top.sum(1)
        return right

    def margins(self, mass: Float[np.ndarray, "M K N"] | None = None) -> PerHead:
        """The largest mass on a right stretch less the largest on a wrong one: the contrast."""
        shown = self._shown(self.mass if mass is None else mass)
        right = np.where(self.right[..., None], shown, -np.inf).max(1)
        margins: PerHead = right - np.where(self.right[..., None], -np.inf, shown).max(1)
        return margins

    def of_set(self, heads: Sequence[int]) -> Float[np.ndarray, "M K 1"]:
        """The mean mass of some heads."""
        mean: Float[np.ndarray, "M K 1"] = self.mass[..., list(heads)].mean(-1, keepdims=True)
        return mean

    def best_head(self, selection: Bool[np.ndarray, " M"]) -> int:
        """The head that decides best on some examples."""
        return int(self.hits()[selection].mean(0).argmax())

    def best_set(self, selection: Bool[np.ndarray, " M"], most: int) -> list[int]:
        """A set whose mean mass decides best on some examples, grown one head at a time.

        A head joins if the set then decides more examples correctly; among equal heads, the one
        that leaves the largest mean margin.
        """
        chosen_from = self._only(selection)
        order = np.argsort(-chosen_from.margins().mean(0), kind="stable")[:_CANDIDATES]
        chosen: list[int] = []
        best = -1.0
        total = np.zeros((*chosen_from.mass.shape[:2], 1))
        while len(chosen) < most:
            sums = total + chosen_from.mass[..., order]
            accuracy = chosen_from.hits(sums).mean(0)
            margin = chosen_from.margins(sums).mean(0)
            taken = np.isin(order, chosen)
            accuracy[taken] = -np.inf
            head = np.lexsort((-margin, -accuracy))[0]
            if accuracy[head] <= best:
                break
            best = float(accuracy[head])
            chosen.append(int(order[head]))
            total = sums[..., [head]]
        return chosen

    def random_sets(self, size: int, seed: int) -> Float[np.ndarray, " M"]:
        """How often random sets of this size decide correctly, in each example."""
        rng = np.random.default_rng(seed)
        size = min(size, len(self.heads))
        sets = [rng.permutation(len(self.heads))[:size] for _ in range(_RANDOM_SETS)]
        hits = [self.hits(self.of_set(heads.tolist()))[:, 0] for heads in sets]
        mean: Float[np.ndarray, " M"] = np.mean(hits, axis=0)
        return mean

    def _shown(self, mass: Float[np.ndarray, "M K N"]) -> Float[np.ndarray, "M K N"]:
        return np.where(self.exists[..., None], mass, -np.inf)

    def _only(self, examples: Bool[np.ndarray, " M"]) -> "Masses":
        return Masses(self.heads, self.mass[examples], self.exists[examples], self.right[examples])


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
            f"find_heads: {type(model).__name__} attends to {len(total)} texts, but "
            f"{len(examples)} were given, or some queries attend to nothing. Give a model whose "
            f"heads attend within one text."
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


def chance(examples: Sequence[TokenExample]) -> Float[np.ndarray, " M"]:
    """The share of right stretches among the candidates of each example."""
    return np.array([example.n_right / len(example.stretches) for example in examples])


POSITIONS = ("the first", "the last", "the nearest to the query", "the longest")


def positional_hits(examples: Sequence[TokenExample]) -> Float[np.ndarray, "M 4"]:
    """Whether each rule of position or length picks a right stretch; ties share it."""
    return np.array([_positional(example) for example in examples])


def _positional(example: TokenExample) -> list[float]:
    starts = np.array([start for start, _ in example.stretches])
    ends = np.array([end for _, end in example.stretches])
    query = min(start for start, _ in example.query)
    distance = np.where(ends <= query, query - ends, np.abs(starts - query))
    hits = []
    for score in (-starts, starts, -distance, ends - starts):
        top = score == score.max()
        hits.append(float(top[: example.n_right].sum() / top.sum()))
    return hits
