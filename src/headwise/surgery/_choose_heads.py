"""`plan`: decide from scores which heads to remove; it needs no model. `plan_curves` does."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._display import counted, type_of
from headwise._progress import Progress, shows_progress
from headwise.errors import ArgumentError
from headwise.scoring import BatchesLike, Inputs, Loss, in_fifths, prune_curves
from headwise.surgery._costs import Costs
from headwise.surgery._plan import Plan
from headwise.tables import Curves, Head, HeadsLike, Scores, resolve_heads

# Heads that are removed together: one, all that read one key/value head, or as many in each layer.
Step = tuple[Head, ...]


def plan(
    scores: Scores,
    *,
    remove: float | None = None,
    heads: HeadsLike | None = None,
    budget: Mapping[str, float] | None = None,
    within: float | None = None,
    costs: Costs | None = None,
    curves: Curves | None = None,
    uniform: bool = False,
) -> Plan:
    """Decide which heads to remove: the least important ones, or those in `heads`.

    Heads that share keys and values are removed together, so that the groups stay equal and the
    cache shrinks; if all heads of a layer share them, single heads are removed. Each layer keeps
    at least one head. No model is needed or changed.

    Args:
        remove: The largest share of all heads to remove.
        heads: The heads to remove, whatever their scores: `"L5.H3"`, `(5, 3)`, `{5: [3]}`.
        budget: The largest costs of the attention afterwards, by their names in `costs`:
            `{"parameters": 4e6}`, `{"cache_bytes": 1024}`.
        within: What may be lost: this share of the full model's loss, or this much of a loss
            that compares with the full model and of a score (`curves.of_score()`). As many heads
            go as the elbow of the curves allows.
        costs: The costs of each head, from `headwise.costs(model)`. A budget requires them; any
            plan with costs reports what it saves.
        curves: The loss of the model under plans of growing size, from `plan_curves`.
        uniform: Whether all layers lose the same number of heads, so that stock Transformers may
            load the pruned model. `heads` that leave different numbers are refused.
    Raises:
        ArgumentError: `scores` are not `Scores`; not exactly one of `remove`, `heads`, `budget`
            and `within` is given; it removes no head, or more than can be removed; the costs are
            missing, of another model or lack the name; the budget is not a number by name; the
            curves are missing or of other plans; under `uniform` `heads` leave different numbers
            in the layers.
        HeadError: a head of `heads` does not exist, is named twice or is the last of its layer.

    Example:
        >>> import numpy as np
        >>> four = tuple(Head("", layer, head) for layer in range(2) for head in range(2))
        >>> scores = Scores(four, np.array([0, 1, 0, 1]), np.array([[4.0, 3.0, 1.0, 2.0]]))
        >>> [str(head) for head in plan(scores, remove=0.5).removed]
        ['L0.H1', 'L1.H0']
    """
    if sum(x is not None for x in (remove, heads, budget, within)) != 1:
        raise ArgumentError(
            f"plan: remove={remove}, heads={heads}, budget={budget}, within={within}. Give exactly "
            f"one of them."
        )
    if (within is None) != (curves is None):
        has = f"within={within} without curves" if curves is None else "curves without within="
        raise ArgumentError(
            f"plan: {has}. Give both: curves=plan_curves(model, texts, scores) and the loss "
            f"that may be lost."
        )
    if not isinstance(scores, Scores):
        raise ArgumentError(
            f"plan: the scores are {type_of(scores)}. Give the result of headwise.importance."
        )
    if costs is not None and (costs.heads != scores.heads or costs.model != scores.model):
        raise ArgumentError(
            f"plan: the costs are of the model {costs.model!r} with {len(costs.heads)} heads, the "
            f"scores of {scores.model!r} with {len(scores.heads)}. Measure the same model."
        )
    if heads is not None:
        chosen = resolve_heads(heads, scores.heads)
        why = f"{counted(len(chosen), 'head')} by name"
    else:
        steps = _steps(scores, uniform)
        if remove is not None:
            chosen = _largest_share(steps, remove, len(scores.heads))
            rule = f"at most {remove:.0%} of {len(scores.heads)} heads"
        elif curves is not None and within is not None:
            chosen, rule = _to_elbow(steps, within, curves, len(scores.heads))
        else:
            chosen, rule = _within_budget(steps, budget, costs)
        rule += ", the same number in each layer" if uniform else ""
        why = f"{rule}: the least important by {scores.method} of the loss {scores.loss}"
    result = Plan.of(chosen, scores.heads, scores.model, why)
    if uniform and not result.uniform:
        counts = ", ".join(str(len(layer.keep)) for layer in result.layers)
        raise ArgumentError(
            f"plan: uniform=True, but these heads leave {counts} in the layers. Name the "
            f"same number of heads in each layer."
        )
    if costs is None:
        return result
    saved = {name: (costs.after((), name), costs.after(chosen, name)) for name in costs.names}
    return replace(result, costs=saved)


def removal_order(scores: Scores, *, uniform: bool = False) -> tuple[list[Head], list[int]]:
    """The heads in the order in which plans of growing shares remove them.

    Where heads share keys and values, whole groups go, so this is not the order of the scores.

    Args:
        uniform: As for `plan`.
    Returns:
        All heads, those that no plan removes last; and the numbers of heads after which a plan can
        end.
    """
    steps = _steps(scores, uniform)
    removed = [head for step in steps for head in step]
    kept = sorted({*scores.heads}.difference(removed))
    return removed + kept, np.cumsum([len(step) for step in steps], dtype=int).tolist()


@shows_progress("Measuring plans")
def plan_curves(
    model: nn.Module,
    texts: BatchesLike,
    scores: Scores,
    *,
    reference: BatchesLike | None = None,
    loss: Loss | str | Callable[[Any, Inputs], torch.Tensor] | None = None,
    tokenizer: Any = None,
    uniform: bool = False,
    random: int = 0,
    on_progress: Progress | None = None,
) -> Curves:
    """Measure the loss of a model under plans of growing size, each about a fifth larger.

    Args:
        texts: Texts or batches. The scores may come from the same, the quality of a pruned
            model from others.
        scores: Those that the plans are made of.
        reference: As for `prune_curves`: texts or batches whose mean output replaces a removed
            head. None replaces it by zeros.
        loss: As for `importance`.
        uniform: As for `plan`.
        random: As for `prune_curves`: how many random orders are added.
        on_progress: Called after each point with the points done and the points in all.
    Returns:
        The curve of the plans under the name of the scores' method, and that of random orders.
    """
    order, ends = removal_order(scores, uniform=uniform)
    return prune_curves(
        model, texts, {scores.method: order}, reference=reference, loss=loss,
        tokenizer=tokenizer, points=in_fifths(ends), random=random, on_progress=on_progress,
    )  # fmt: skip


def _to_elbow(steps: list[Step], within: Any, curves: Curves, heads: int) -> tuple[list[Head], str]:
    """The heads up to the elbow of the first curve, and what they may cost."""
    if not isinstance(within, float | int) or not within > 0:
        raise ArgumentError(
            f"plan: within={within!r} lets nothing go. Give what may be lost, above 0: 0.01."
        )
    ends = [0, *np.cumsum([len(step) for step in steps], dtype=int).tolist()]
    if curves.n_heads != heads or not {*curves.removed.tolist()} <= {*ends}:
        raise ArgumentError(
            f"plan: the curves have points at {curves.removed.tolist()} of {curves.n_heads} heads, "
            f"and plans of these scores end at {ends} of {heads}. Give the curves of "
            f"plan_curves(model, texts, scores), with the same uniform=."
        )
    allowed = curves.allowance(float(within))
    elbow = curves.elbow(next(iter(curves.per_text)), allowed)
    bar = f"the loss {curves.loss} grows by {allowed:.4g}"
    if elbow.heads == 0:
        least = counted(ends[1] if len(ends) > 1 else 0, "head")
        raise ArgumentError(
            f"plan: without the first {least} {bar} or more. Give a larger within=, a share such "
            f"as remove=0.1, or score the heads on more texts."
        )
    chosen = [head for step in steps[: ends.index(elbow.heads)] for head in step]
    return chosen, f"{elbow} of {heads} heads before {bar}"


def _steps(scores: Scores, uniform: bool) -> list[Step]:
    """The steps in the order of their removal; each layer keeps its last."""
    rows = list(zip(scores.heads, scores.kv_heads.tolist(), strict=True))
    groups: dict[tuple[str, int], set[int]] = {}
    for head, kv_head in rows:
        groups.setdefault((head.stack, head.layer), set()).add(kv_head)
    units: dict[tuple[str, int, int], list[int]] = {}
    for row, (head, kv_head) in enumerate(rows):
        layer = head.stack, head.layer
        # In a layer with a single group any head can be removed: the others still form a group.
        units.setdefault((*layer, kv_head if len(groups[layer]) > 1 else row), []).append(row)
    # A unit is removed in the round of its last head; its importance is the mean of its heads.
    ranked = sorted(
        units.values(),
        key=lambda rows: (scores.round[rows].max(), scores.importance[rows].mean()),
    )
    ordered = [tuple(scores.heads[row] for row in rows) for rows in ranked]
    layers: dict[tuple[str, int], list[Step]] = {}
    for unit in ordered:
        layers.setdefault((unit[0].stack, unit[0].layer), []).append(unit)
    if uniform:  # a step removes the least important unit that is left in each layer
        of_layers = zip(*(units[:-1] for units in layers.values()), strict=False)
        return [tuple(head for unit in step for head in unit) for step in of_layers]
    last = [units[-1] for units in layers.values()]
    return [unit for unit in ordered if unit not in last]


def _largest_share(steps: list[Step], remove: Any, heads: int) -> list[Head]:
    """The heads of as many steps as fit into a share; at least one, and never a whole layer."""
    if not isinstance(remove, float | int) or not 0 < remove < 1:
        raise ArgumentError(
            f"plan: remove={remove!r}. Give a share between 0 and 1, such as 0.3; to name "
            f"heads, give heads=."
        )
    request, limit = f"remove={remove} of {heads} heads", remove * heads
    chosen: list[Head] = []
    for step in steps:
        if len(chosen) + len(step) > limit + 1e-9:
            break
        chosen += step
    if not chosen:
        least = counted(len(steps[0]) if steps else 0, "head")
        raise ArgumentError(
            f"plan: {request} removes none. The least that can be removed is {least}."
        )
    if len(chosen) == sum(map(len, steps)) and limit >= len(chosen) + len(steps[-1]):
        most = counted(len(chosen), "head")
        raise ArgumentError(f"plan: {request} would empty a layer. Remove {most} at most.")
    return chosen


def _within_budget(steps: list[Step], budget: Any, costs: Costs | None) -> tuple[list[Head], str]:
    """The fewest heads whose removal satisfies every part of the budget, and the budget."""
    limits = dict(budget) if isinstance(budget, Mapping) else {}
    if not limits or not all(isinstance(limit, Real) for limit in limits.values()):
        raise ArgumentError(
            f"plan: budget={budget!r}. Give numbers by name, such as {{'parameters': 4e6}}."
        )
    if costs is None:
        raise ArgumentError("plan: a budget without costs. Give costs=headwise.costs(model).")
    listed = ", ".join(f"{limit:g} {name}" for name, limit in limits.items())
    chosen: list[Head] = []
    for step in [(), *steps]:
        chosen += step
        if all(costs.after(chosen, name) <= limit for name, limit in limits.items()):
            if not chosen:
                raise ArgumentError(
                    f"plan: all heads together fit into {listed}. Lower the budget."
                )
            return chosen, f"to {listed}"
    least = ", ".join(f"{name} {costs.after(chosen, name):g}" for name in limits)
    raise ArgumentError(f"plan: {listed} cannot be reached. The lowest possible is {least}.")
