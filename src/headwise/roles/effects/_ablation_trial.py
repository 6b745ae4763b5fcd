"""Mean-ablation of heads: its effect on behaviours, head by head and for the heads of a role."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress
from headwise.errors import ArgumentError, ShapeError
from headwise.models.ownership import (
    by_attention,
    check_edits_reach,
    find_attentions,
    heads_of,
    mean_heads,
    replace_heads,
)
from headwise.roles.effects._behaviour import Behaviour, BehaviourBatch
from headwise.roles.effects._effects import Effect, Effects, Group
from headwise.roles.testing import FEWEST_TEXTS, step_down
from headwise.tables import Head, ratio_interval

_MOST = 8  # heads of one role that are ablated together: the first ones
# A head is redundant if ablating it costs less than this share of ablating all of them.
_REDUNDANT = 0.25
_TIMES_ALONE = 2.0  # a group must cost at least this multiple of what its heads cost alone
_SHARE_OF_ALL = 0.1  # a group must cost at least this share of ablating every head

Losses = Float64[np.ndarray, " M"]


def ablate_each(
    model: nn.Module,
    behaviours: Sequence[Behaviour],
    heads: Sequence[Head],
    strongest: Callable[[str], Sequence[Head]],
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Effects:
    """Measure the effect of each head on each behaviour, and find groups of redundant heads.

    Args:
        strongest: Maps a role to its heads, the strongest first.
        on_progress: Called after each head with the number of heads done and of all.
    Raises:
        ArgumentError: there is no behaviour, two have one name, or a loss is not finite.
    """
    names = [behaviour.name for behaviour in behaviours]
    if len(set(names)) < len(names) or not names:
        raise ArgumentError(
            f"effects: behaviours are named {', '.join(names) or 'nothing'}. Give at least one, "
            f"and each a name of its own."
        )
    trials = [AblationTrial(model, behaviour) for behaviour in behaviours]
    alone = _each_alone(trials, heads, seed, on_progress)
    groups = [
        group
        for trial in trials
        for group in find_groups(
            trial, {role: strongest(role) for role in trial.behaviour.roles}, seed=seed
        )
    ]
    return Effects(
        alone=tuple(alone),
        groups=tuple(groups),
        says={behaviour.name: behaviour.says for behaviour in behaviours},
        roles={behaviour.name: tuple(behaviour.roles) for behaviour in behaviours},
        labels={behaviour.name: dict(behaviour.labels) for behaviour in behaviours},
    )


class AblationTrial:
    """A model evaluated on one behaviour, intact and with ablated heads, on the same texts."""

    def __init__(self, model: nn.Module, behaviour: Behaviour) -> None:
        self._model, self.behaviour = model, behaviour
        inputs = [batch.inputs for batch in behaviour.batches]
        self._attentions = find_attentions(model, inputs[0], needs_projections=False)
        self._means = mean_heads(model, self._attentions, inputs)
        self._cache: dict[frozenset[Head], Losses] = {}
        check_edits_reach(model, self._attentions, inputs[0])
        self.heads = tuple(heads_of(self._attentions))
        self.intact = self._losses(frozenset(), behaviour.batches)
        self._intact_control = self._losses(frozenset(), behaviour.control)
        if len(self._intact_control) not in (0, len(self.intact)):
            raise ArgumentError(
                f"effects: {behaviour.name!r} has {len(self.intact)} texts and "
                f"{len(self._intact_control)} of its control. Give as many of both."
            )

    def growth(self, heads: Sequence[Head]) -> Losses:
        """By how much the loss of each text grows when these heads are ablated."""
        ablated = frozenset(heads)
        if ablated not in self._cache:
            self._cache[ablated] = self._losses(ablated, self.behaviour.batches) - self.intact
        return self._cache[ablated]

    def control_growth(self, heads: Sequence[Head]) -> Losses:
        """By how much the loss of each text of the control grows; empty without a control."""
        losses = self._losses(frozenset(heads), self.behaviour.control)
        return losses - self._intact_control

    @torch.no_grad()
    def _losses(self, heads: frozenset[Head], batches: Sequence[BehaviourBatch]) -> Losses:
        if not batches:
            return np.zeros(0)
        chosen = by_attention(sorted(heads), self._attentions)
        with (
            in_evaluation(self._model),
            replace_heads(self._model, self._attentions, chosen, lambda name, _: self._means[name]),
        ):
            parts = [batch.loss(self._model(**batch.inputs)) for batch in batches]
        for part in parts:
            if part.ndim != 1:
                raise ShapeError(
                    f"effects: {self.behaviour.name!r} gives a loss of shape {tuple(part.shape)}. "
                    f"Give one number for each text."
                )
        losses = torch.cat(parts).double().cpu().numpy()
        bad = ~np.isfinite(losses)
        if bad.any():
            raise ArgumentError(
                f"effects: {self.behaviour.name!r} is not finite on {bad.sum()} of {len(bad)} "
                f"texts. Leave them out."
            )
        return losses


def _each_alone(
    trials: Sequence[AblationTrial], heads: Sequence[Head], seed: int, on_progress: Progress | None
) -> list[Effect]:
    """The effects of every head on one behaviour after the other, tested as one family."""
    growths: list[Float64[np.ndarray, "M N"]] = []
    for trial in trials:
        columns = []
        for head in heads:
            columns.append(trial.growth([head]))
            if on_progress is not None:
                on_progress(len(growths) * len(heads) + len(columns), len(trials) * len(heads))
        growths.append(np.stack(columns, axis=1) if columns else np.zeros((len(trial.intact), 0)))
    tested = [growth if len(growth) >= FEWEST_TEXTS else growth[:, :0] for growth in growths]
    effects = []
    for trial, growth, p in zip(trials, growths, step_down(tested, seed=seed), strict=True):
        adjusted = p if p.size else np.full(len(heads), np.nan)
        effects += [
            _effect([head], trial, growth[:, column], seed, float(adjusted[column]))
            for column, head in enumerate(heads)
        ]
    return effects


def find_groups(
    trial: AblationTrial, sharing: Mapping[str, Sequence[Head]], *, seed: int = 0
) -> list[Group]:
    """Find the heads of each role that a behaviour can lose one by one, but not all together.

    The search starts from the first eight heads at most, leaves out those that cannot be lost
    alone, and then drops, least first, each head that adds nothing to the others. The cost of
    the group that remains exceeds the sum of the costs of its heads alone, with a bootstrap
    interval over texts that excludes 0; it is at least twice that sum, and at least a tenth of
    the cost of ablating every head.

    Args:
        sharing: The heads of each role, the strongest first.
    """
    groups: dict[frozenset[Head], Group] = {}
    for role, heads in sharing.items():
        members = _members(trial, list(heads[:_MOST]), seed)
        if len(members) < 2:
            continue
        together = trial.growth(members)
        alone = np.sum([trial.growth([head]) for head in members], axis=0)
        all_heads = float(trial.growth(trial.heads).mean())
        cost = max(_TIMES_ALONE * float(np.mean(alone)), _SHARE_OF_ALL * all_heads)
        if _interval(together - alone, seed)[0] > 0 and together.mean() >= cost:
            effect = _effect(members, trial, together, seed)
            groups.setdefault(frozenset(members), Group(role, effect, float(np.mean(alone))))
    return list(groups.values())


def _members(trial: AblationTrial, heads: list[Head], seed: int) -> list[Head]:
    """The heads that can be lost alone, without those that add nothing to the others."""
    if len(heads) < 2:
        return heads
    most = _REDUNDANT * trial.growth(heads).mean()
    members = [head for head in heads if trial.growth([head]).mean() < most]
    while len(members) > 1:
        added = [
            trial.growth(members) - trial.growth([head for head in members if head != dropped])
            for dropped in members
        ]
        least = int(np.argmin([growth.mean() for growth in added]))
        if _interval(added[least], seed)[0] > 0:
            break
        del members[least]
    return sorted(members)


def _effect(
    heads: Sequence[Head], trial: AblationTrial, growth: Losses, seed: int, p: float = float("nan")
) -> Effect:
    names = tuple(str(head) for head in heads)
    ends, control = _interval(growth, seed), trial.control_growth(heads)
    effect = Effect(names, trial.behaviour.name, float(growth.mean()), *ends, len(growth), p)
    if not len(control):
        return effect
    excess = _interval(growth - control, seed)[0]
    return replace(effect, control=float(control.mean()), excess_low=excess)


def _interval(growth: Losses, seed: int) -> tuple[float, float]:
    low, high = ratio_interval(growth[:, None], np.ones((len(growth), 1)), seed=seed)
    return float(low[0]), float(high[0])
