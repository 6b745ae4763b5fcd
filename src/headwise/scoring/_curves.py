"""Take heads out of a model in some order, and see what it loses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from headwise.errors import ArgumentError
from headwise.models import check_model, find_attentions, in_evaluation, tokenizer_of
from headwise.scoring._batches import BatchesLike, read_batches
from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import Loss, find_loss
from headwise.scoring._task_score import Inputs
from headwise.tables import Curves, Head, HeadsLike, random_orders, removable, resolve_heads

Tell = Callable[[int, int], None]
Cut = Callable[[Sequence[Head]], nn.Module]

# Orders in the random band.
_RANDOM = 5
# Points lie a fifth apart.
_STEP = 5


def prune_curves(
    model: nn.Module,
    batches: BatchesLike,
    orders: Mapping[str, Sequence[HeadsLike]],
    *,
    reference: BatchesLike | None = None,
    loss: Loss | str | Callable[[Any, Inputs], torch.Tensor] | None = None,
    tokenizer: Any = None,
    points: Iterable[int] | None = None,
    cut: Cut | None = None,
    on_progress: Tell | None = None,
) -> Curves:
    """What a model loses on some texts as its heads go in some orders, least important first.

    The last head of each layer in an order stays. Unless there are several orders of a name, five
    random ones come along as `random`, for an order means little without them.

    Args:
        batches: Texts or batches that the orders were not made from.
        orders: By name one order of heads, or several: `scores.order()`,
            `random_orders(scores.heads)`.
        reference: Texts or batches over which the mean is taken that a head gives after it is
            gone. None: it gives nothing.
        loss: As for `importance`. One with a score, as `label` and that of `paired`, has curves
            of the score too.
        points: After how many heads to look. None is 1, 2, and so on in steps of a fifth.
        cut: What makes the model without some heads, such as one that prunes and recovers it;
            None keeps their gates closed. No random orders come along with it.
        on_step: Told after each point how many are done, of how many.
    Returns:
        The loss of each text at each point that all orders reach, from no head gone on.
    Raises:
        HeadError: an order names a head that does not exist, or one twice.
        ArgumentError: no order is given, or `cut` together with a reference.
    """
    outer, model = model, check_model("prune_curves", model)
    tokenizer = tokenizer_of(outer, tokenizer)
    if not orders or (cut is not None and reference is not None):
        raise ArgumentError(
            f"prune_curves: {len(orders)} orders, {cut=}, a reference: {reference is not None}. "
            f"Give at least one order, and a reference only where gates are closed."
        )
    read = read_batches(batches, model, tokenizer)
    known = None if reference is None else read_batches(reference, model, tokenizer)
    with in_evaluation(outer), torch.no_grad():
        found = find_loss(loss, outer, read[0])
        run = GatedModel(model, find_attentions(model, read[0]), found, read, known)
        going = _going(orders, run.heads, alone=cut is not None)
        most = min(len(order) for some in going.values() for order in some)
        removed = _points(points, most)
        looking = _Looking(run, cut, sum(map(len, going.values())) * len(removed), on_progress)
        looks = {
            name: [[looking.without(order[:number]) for number in removed] for order in some]
            for name, some in going.items()
        }
    score = found.score
    return Curves(
        np.array(removed),
        len(run.heads),
        _arrays(looks, lambda look: look.losses),
        loss=found.name,
        compares=found.compares,
        score="" if score is None else score.name,
        scores={} if score is None else _arrays(looks, lambda look: look.score),
    )


def _going(
    orders: Mapping[str, Sequence[HeadsLike]], heads: Sequence[Head], *, alone: bool
) -> dict[str, list[list[Head]]]:
    """The heads that go in each order, with random orders beside them if they are not alone."""
    if not alone and all(len(some) == 1 for some in orders.values()):
        orders = {**orders, "random": random_orders(heads, _RANDOM)}
    return {
        name: [removable(resolve_heads(order, heads)) for order in some]
        for name, some in orders.items()
    }


def _points(wanted: Iterable[int] | None, most: int) -> list[int]:
    if wanted is None:
        wanted, last = [], 0
        while last < most:
            last += max(1, last // _STEP)
            wanted.append(last)
    return sorted({0, *(point for point in wanted if 0 <= point <= most)})


@dataclass(frozen=True)
class _Look:
    """What is seen at one point: the loss of each text, and the score if there is one."""

    losses: Float64[np.ndarray, " M"]
    score: float


def _arrays(
    looks: Mapping[str, list[list[_Look]]], of: Callable[[_Look], Any]
) -> dict[str, np.ndarray]:
    return {
        name: np.array([[of(look) for look in order] for order in some])
        for name, some in looks.items()
    }


class _Looking:
    """Looks at the model without some heads, once where orders meet, and tells how far it is."""

    def __init__(self, run: GatedModel, cut: Cut | None, total: int, tell: Tell | None) -> None:
        self._run, self._cut = run, cut
        self._done, self._total, self._tell = 0, total, tell
        self._seen: dict[frozenset[Head], _Look] = {}

    def without(self, gone: Sequence[Head]) -> _Look:
        which = frozenset(gone)
        if which not in self._seen:
            self._seen[which] = _look(self._run, gone, self._cut)
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)
        return self._seen[which]


def _look(run: GatedModel, gone: Sequence[Head], cut: Cut | None) -> _Look:
    losses, rows = [], []
    score = run.loss.score
    for at, output in enumerate(_outputs(run, gone, cut)):
        losses.append(run.judge(at, output))
        if score is not None:
            rows.append(score.read(output, run.batches[at]))
    return _Look(
        torch.cat(losses).double().cpu().numpy(),
        float("nan") if score is None else score.of(torch.cat(rows).double().cpu()),
    )


def _outputs(run: GatedModel, gone: Sequence[Head], cut: Cut | None) -> Iterator[Any]:
    """What the model gives for each batch without some heads."""
    if cut is not None:
        with torch.enable_grad():
            small = run.model if not gone else cut(gone)
        with in_evaluation(small), torch.no_grad():
            yield from (small(**batch) for batch in run.batches)
        return
    gates = torch.ones(len(run.heads), device=next(run.model.parameters()).device)
    gates[[run.heads.index(head) for head in gone]] = 0
    for at in range(len(run.batches)):
        yield run.output(at, gates, run.reference is not None)
