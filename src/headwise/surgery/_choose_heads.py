"""`plan`: which heads go, decided from scores by a rule; it needs no model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from headwise._display import counted
from headwise.errors import ArgumentError
from headwise.surgery._plan import Plan
from headwise.surgery.pricing import Costs
from headwise.tables import Head, HeadsLike, Scores, resolve_heads


@dataclass(frozen=True)
class _Unit:
    """Heads that go together: one head, or all that read one key/value head."""

    heads: tuple[Head, ...]

    @property
    def layer(self) -> tuple[str, int]:
        return self.heads[0].stack, self.heads[0].layer


def plan(
    scores: Scores,
    *,
    remove: float | None = None,
    heads: HeadsLike | None = None,
    budget: Mapping[str, float] | None = None,
    costs: Costs | None = None,
    uniform: bool = False,
) -> Plan:
    """Decide which heads go: the least important ones, or those named.

    Of heads that share keys and values all go or none, so that what is left stays in equal
    groups and the cache shrinks; where a whole layer shares them, single heads go. Each layer
    keeps at least one head. Nothing is touched.

    Args:
        remove: The share of all heads that goes, at most.
        heads: The heads that go, whatever their scores: `"L5.H3"`, `(5, 3)`, `{5: [3]}`.
        budget: What the attention may cost afterwards, by a name that `costs` knows:
            `{"parameters": 4e6}`, `{"cache_bytes": 1024}`.
        costs: What each head costs, as `headwise.costs(model)` counts it. A budget needs it;
            with it any plan tells what it saves.
        uniform: Whether all layers lose equally many, so that stock Transformers may load what
            is left. Heads by name that leave other numbers are refused.
    Raises:
        ArgumentError: the scores are none; not exactly one of `remove`, `heads` and `budget` is
            given; none or more can go; the costs are of another model, missing or do not know the
            name; the budget is no number by name; heads by name are not as many in each layer
            under `uniform`.
        HeadError: a head of `heads` does not exist, is named twice or is the last of its layer.

    Example:
        >>> import numpy as np
        >>> four = tuple(Head("", layer, head) for layer in range(2) for head in range(2))
        >>> scores = Scores(four, np.array([0, 1, 0, 1]), np.array([[4.0, 3.0, 1.0, 2.0]]))
        >>> [str(head) for head in plan(scores, remove=0.5).removed]
        ['L0.H1', 'L1.H0']
    """
    if sum(one is not None for one in (remove, heads, budget)) != 1:
        raise ArgumentError(
            f"plan: remove={remove}, heads={heads}, budget={budget}. Give exactly one of them."
        )
    if not isinstance(scores, Scores):
        raise ArgumentError(
            f"plan: the scores are a {type(scores).__name__}. Give what headwise.importance gives."
        )
    _check_costs(costs, scores)
    if heads is not None:
        chosen = resolve_heads(heads, scores.heads)
        why = f"{counted(len(chosen), 'head')} by name"
    else:
        chosen, rule = _least(scores, remove, budget, costs, uniform)
        why = f"{rule}: the least important by {scores.method} of the loss {scores.loss}"
    made = Plan.of(chosen, scores.heads, scores.model, why)
    if uniform and not made.uniform:
        left = ", ".join(str(len(one.keep)) for one in made.layers)
        raise ArgumentError(
            f"plan: uniform=True, and these heads leave {left} in the layers. Name as many of each."
        )
    return made if costs is None else replace(made, costs=_before_and_after(costs, chosen))


def _least(
    scores: Scores,
    remove: float | None,
    budget: Mapping[str, float] | None,
    costs: Costs | None,
    uniform: bool,
) -> tuple[list[Head], str]:
    """The least important heads, and by which rule so many."""
    going: list[Step] = _uniform(scores) if uniform else [(unit,) for unit in _order(scores)]
    if remove is not None:
        chosen = _share(going, remove, len(scores.heads))
        rule = f"at most {remove:.0%} of {len(scores.heads)} heads"
    else:
        known = _checked(budget)
        chosen = _within(going, known, costs)
        rule = f"to {_told(known)}"
    return chosen, rule + (", the same number in each layer" if uniform else "")


def _before_and_after(costs: Costs, removed: Sequence[Head]) -> dict[str, tuple[float, float]]:
    return {name: (costs.after((), name), costs.after(removed, name)) for name in costs.names}


def _checked(budget: Mapping[str, float] | None) -> dict[str, float]:
    known = dict(budget) if isinstance(budget, Mapping) else {}
    if not known or not all(isinstance(most, Real) for most in known.values()):
        raise ArgumentError(
            f"plan: budget={budget!r}. Give numbers by name, such as {{'parameters': 4e6}}."
        )
    return known


Step = tuple[_Unit, ...]


def _order(scores: Scores) -> list[_Unit]:
    """The units in the order in which they may go; the last of each layer stays."""
    groups: dict[tuple[str, int], set[int]] = {}
    for head, kv_head in zip(scores.heads, scores.kv_heads.tolist(), strict=True):
        groups.setdefault((head.stack, head.layer), set()).add(kv_head)
    units: dict[tuple[str, int, int], list[int]] = {}
    for row, (head, kv_head) in enumerate(zip(scores.heads, scores.kv_heads.tolist(), strict=True)):
        layer = head.stack, head.layer
        # Of a single group any head can go: the others stay a group of equals.
        units.setdefault((*layer, kv_head if len(groups[layer]) > 1 else row), []).append(row)
    # A unit is gone when the last of its heads is; what it costs is the mean of theirs.
    ranked = sorted(
        units.values(),
        key=lambda rows: (scores.round[rows].max(), scores.importance[rows].mean()),
    )
    made = [_Unit(tuple(scores.heads[row] for row in rows)) for rows in ranked]
    last = {unit.layer: unit for unit in made}
    return [unit for unit in made if last[unit.layer] != unit]


def _uniform(scores: Scores) -> list[Step]:
    """Steps of one unit of each layer: the least important that is left there."""
    layers: dict[tuple[str, int], list[_Unit]] = {
        (head.stack, head.layer): [] for head in scores.heads
    }
    for unit in _order(scores):
        layers[unit.layer].append(unit)
    return list(zip(*layers.values(), strict=False))


def _share(going: list[Step], remove: Any, heads: int) -> list[Head]:
    if not isinstance(remove, float | int) or not 0 < remove < 1:
        raise ArgumentError(
            f"plan: remove={remove!r}. Give a share between 0 and 1, such as 0.3; heads by name "
            f"are given as heads=."
        )
    chosen: list[Head] = []
    for step in going:
        new = [head for unit in step for head in unit.heads]
        if len(chosen) + len(new) > remove * heads + 1e-9:
            break
        chosen += new
    _check(chosen, going, remove * heads, f"remove={remove} of {heads} heads")
    return chosen


def _check(chosen: list[Head], going: list[Step], wanted: float, told: str) -> None:
    """Refuse what leaves everything, or would leave a layer without heads."""
    sizes = [sum(len(unit.heads) for unit in step) for step in going]
    if not chosen:
        least = sizes[0] if sizes else 0
        raise ArgumentError(
            f"plan: {told} removes none. The least that can go is {counted(least, 'head')}."
        )
    if len(chosen) == sum(sizes) and wanted >= len(chosen) + sizes[-1]:
        raise ArgumentError(
            f"plan: {told} would empty a layer. Remove {counted(len(chosen), 'head')} at most."
        )


def _check_costs(costs: Costs | None, scores: Scores) -> None:
    if costs is None:
        return
    if costs.heads != scores.heads or costs.model != scores.model:
        raise ArgumentError(
            f"plan: the costs are of the model {costs.model!r} with {len(costs.heads)} heads, the "
            f"scores of {scores.model!r} with {len(scores.heads)}. Measure the same model."
        )


def _within(going: list[Step], budget: dict[str, float], costs: Costs | None) -> list[Head]:
    """The fewest heads that must go until every part of the budget is kept."""
    if costs is None:
        raise ArgumentError("plan: a budget without costs. Give costs=headwise.costs(model).")
    chosen: list[Head] = []
    for step in [(), *going]:
        chosen += [head for unit in step for head in unit.heads]
        if all(costs.after(chosen, name) <= most for name, most in budget.items()):
            if not chosen:
                raise ArgumentError(f"plan: {_told(budget)} is kept with all heads. Ask for less.")
            return chosen
    least = ", ".join(f"{name} {costs.after(chosen, name):g}" for name in budget)
    raise ArgumentError(f"plan: {_told(budget)} cannot be reached. The least is {least}.")


def _told(budget: Mapping[str, float]) -> str:
    return ", ".join(f"{most:g} {name}" for name, most in budget.items())
