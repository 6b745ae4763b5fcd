"""Pruning curves: the loss of a model as its heads are removed in some order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress, shows_progress
from headwise.errors import ArgumentError
from headwise.models import check_model, device_of, without_compiler
from headwise.models.texts import tokenizer_of
from headwise.ownership import find_attentions
from headwise.scoring._batches import BatchesLike, read_batches
from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import Inputs, Loss, find_loss
from headwise.tables import (
    Curves,
    Head,
    HeadsLike,
    is_head,
    random_orders,
    removable,
    resolve_heads,
)

Cut = Callable[[Sequence[Head]], nn.Module]

# Each step between two points removes about a fifth of the heads removed so far.
_STEP = 5


@shows_progress("Drawing curves")
def prune_curves(
    model: nn.Module,
    texts: BatchesLike,
    orders: Mapping[str, Sequence[HeadsLike]],
    *,
    reference: BatchesLike | None = None,
    loss: Loss | str | Callable[[Any, Inputs], torch.Tensor] | None = None,
    tokenizer: Any = None,
    points: Iterable[int] | None = None,
    random: int = 5,
    cut: Cut | None = None,
    on_progress: Progress | None = None,
) -> Curves:
    """Measure the loss of a model on some texts as its heads are removed, least important first.

    The last head of each layer in an order is never removed. Unless some name has several
    orders, random orders are added as `random`, since a curve means little without that baseline.

    Args:
        texts: Texts or batches, other than those that the orders were computed from.
        orders: By name one order of heads, or several: `scores.order()`,
            `random_orders(scores.heads)`.
        reference: Texts or batches; the mean output of a head over them replaces a removed head.
            None replaces it by zeros.
        loss: As for `importance`. A loss with a task score, as `label` and that of `paired`, has
            curves of the score too.
        points: The numbers of removed heads at which to measure. None is 1, 2, and so on, in
            steps of about a fifth.
        random: How many random orders are added; 0 for none.
        cut: Returns the model without some heads, for example pruned and recovered. None closes
            the gates of the heads. With `cut`, no random orders are added.
        on_progress: Called after each point with the points done and the points in all.
    Returns:
        The loss of each text at each point that all orders reach, starting from the full model.
    Raises:
        HeadError: an order names a head that does not exist, or names one twice.
        ArgumentError: there are no orders, or `cut` comes with a reference.
    """
    outer, model = without_compiler(model), check_model("prune_curves", model)
    tokenizer = tokenizer_of(outer, tokenizer)
    if not orders or (cut is not None and reference is not None):
        raise ArgumentError(
            f"prune_curves: {len(orders)} orders, {cut=}, a reference: {reference is not None}. "
            f"Give at least one order, and a reference only without cut=."
        )
    inputs = read_batches(texts, outer, tokenizer)
    reference_inputs = None if reference is None else read_batches(reference, outer, tokenizer)
    with in_evaluation(outer), torch.no_grad():
        resolved_loss = find_loss(loss, outer, inputs[0])
        attentions = find_attentions(model, inputs[0])
        gated = GatedModel(model, attentions, resolved_loss, inputs, reference_inputs)
        removals = _removals(orders, gated.heads, random if cut is None else 0)
        most = min(len(order) for same_name in removals.values() for order in same_name)
        removed = _points(points, most)
        full = _measure(gated, (), cut)  # every curve starts there
        curves: dict[str, list[list[_Point]]] = {name: [] for name in removals}
        done, total = 0, len(removed) * sum(map(len, removals.values()))
        for name, same_name in removals.items():
            for order in same_name:
                curves[name].append([])
                for number in removed:
                    point = _measure(gated, order[:number], cut) if number else full
                    curves[name][-1].append(point)
                    done += 1
                    if on_progress is not None:
                        on_progress(done, total)
    losses, scores = (
        {name: np.array([[point[part] for point in of] for of in curves[name]]) for name in curves}
        for part in (0, 1)
    )
    score = resolved_loss.score
    return Curves(
        np.array(removed),
        len(gated.heads),
        losses,
        loss=resolved_loss.name,
        compares=resolved_loss.compares,
        score="" if score is None else score.name,
        scores={} if score is None else scores,
    )


def _removals(
    orders: Mapping[str, Sequence[HeadsLike]], heads: Sequence[Head], random: int
) -> dict[str, list[list[Head]]]:
    """The heads that each order removes, with random orders added where they are missing."""
    # One order, as `scores.order()` is, has heads where several have orders.
    listed: dict[str, Any] = {
        name: [given] if all(map(is_head, given)) else given for name, given in orders.items()
    }
    if random > 0 and all(len(same_name) == 1 for same_name in listed.values()):
        listed = {**listed, "random": random_orders(heads, random)}
    return {
        name: [removable(resolve_heads(order, heads)) for order in same_name]
        for name, same_name in listed.items()
    }


def _points(points: Iterable[int] | None, most: int) -> list[int]:
    points = in_fifths(range(1, most + 1)) if points is None else points
    return sorted({0, *(point for point in points if 0 <= point <= most)})


def in_fifths(numbers: Iterable[int]) -> list[int]:
    """Some of these rising numbers, each about a fifth above the one before."""
    chosen, last = [], 0
    for number in numbers:
        if number >= last + max(1, last // _STEP):
            chosen.append(last := number)
    return chosen


# The loss of each text without some heads, and the task score (NaN without one).
_Point = tuple[Float64[np.ndarray, " M"], float]


def _measure(gated: GatedModel, removed: Sequence[Head], cut: Cut | None) -> _Point:
    """Measure the model without some heads: cut out, or gated where there is no `cut`."""
    small = gated.model
    if cut is not None and removed:
        with torch.enable_grad():
            small = cut(removed)
    gates = torch.ones(len(gated.heads), device=device_of(gated.model))
    gates[[gated.heads.index(head) for head in removed]] = 0
    losses, rows, score = [], [], gated.loss.score
    with in_evaluation(small):
        for index, batch in enumerate(gated.batches):
            if cut is None:
                output = gated.output(index, gates, gated.reference is not None)
            else:
                output = small(**batch)
            losses.append(gated.losses_of(index, output))
            if score is not None:
                rows.append(score.read(output, batch))
    return (
        torch.cat(losses).double().cpu().numpy(),
        float("nan") if score is None else score.of(torch.cat(rows).double().cpu()),
    )
