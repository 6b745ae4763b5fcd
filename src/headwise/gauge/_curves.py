"""Take heads out of a model in some order, and see what it loses."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from headwise.curves import Curves
from headwise.gauge._batches import Given, read_given
from headwise.gauge._loss import Inputs, Loss, find_loss
from headwise.gauge._run import Run
from headwise.gauge._still import held_still
from headwise.heads import Head, HeadsLike, resolve_heads
from headwise.models import find_attentions
from headwise.scores import removable

Tell = Callable[[int, int], None]


def prune_curves(
    model: nn.Module,
    batches: Given,
    orders: Mapping[str, Sequence[HeadsLike]],
    *,
    reference: Given | None = None,
    loss: Loss | str | Callable[[Any, Inputs], torch.Tensor] | None = None,
    tokenizer: Any = None,
    points: Iterable[int] | None = None,
    on_step: Tell | None = None,
) -> Curves:
    """What a model loses on some texts as its heads go in some orders, least important first.

    The last head of each layer in an order stays.

    Args:
        batches: Texts or batches that the orders were not made from.
        orders: By name one order of heads, or several, as random ones: `scores.order()`,
            `random_orders(scores.heads)`.
        reference: Texts or batches over which the mean is taken that a head gives after it is
            gone. None: it gives nothing.
        loss: As for `importance`.
        points: After how many heads to look. None is each ninth of all heads.
        on_step: Told after each point how many are done, of how many.
    Returns:
        The loss of each text at each point that all orders reach, from no head gone on.
    Raises:
        HeadError: an order names a head that does not exist, or one twice.
    """
    read = read_given(batches, model, tokenizer)
    known = None if reference is None else read_given(reference, model, tokenizer)
    with held_still(model), torch.no_grad():
        found = find_loss(loss, model, read[0])
        run = Run(model, find_attentions(model, read[0]), found, read, known)
        going = {
            name: [removable(resolve_heads(order, run.heads)) for order in some]
            for name, some in orders.items()
        }
        most = min(len(order) for some in going.values() for order in some)
        removed = _points(points, most, len(run.heads))
        steps = _Steps(sum(map(len, going.values())) * len(removed), on_step)
        per_text = {
            name: np.stack([_curve(run, order, removed, steps) for order in some])
            for name, some in going.items()
        }
    return Curves(np.array(removed), len(run.heads), per_text, found.name)


def _points(wanted: Iterable[int] | None, most: int, heads: int) -> list[int]:
    points = range(0, most + 1, max(1, heads // 9)) if wanted is None else wanted
    return sorted({0, *(point for point in points if 0 <= point <= most)})


class _Steps:
    """Counts what is done and tells it."""

    def __init__(self, total: int, tell: Tell | None) -> None:
        self._done, self._total, self._tell = 0, total, tell

    def done(self) -> None:
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._total)


def _curve(
    run: Run, order: Sequence[Head], removed: Sequence[int], steps: _Steps
) -> Float64[np.ndarray, "K M"]:
    rows = [run.heads.index(head) for head in order]
    device = next(run.model.parameters()).device
    found = []
    for number in removed:
        gates = torch.ones(len(run.heads), device=device)
        gates[rows[:number]] = 0
        mean = run.reference is not None
        losses = [run.losses(at, gates, mean) for at in range(len(run.batches))]
        found.append(torch.cat(losses).double().cpu().numpy())
        steps.done()
    return np.stack(found)
