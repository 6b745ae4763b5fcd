"""Taking heads out: what behaviours lose without each alone, and without those of one role."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float64
from torch import nn

from headwise.errors import ArgumentError, ShapeError
from headwise.models import (
    by_attention,
    find_attentions,
    heads_of,
    in_evaluation,
    mean_heads,
    replace_heads,
)
from headwise.roles._evidence import FEWEST_TEXTS, interval, max_t
from headwise.roles.effects._behaviour import Behaviour
from headwise.roles.effects._effects import Effect, Effects, Group
from headwise.tables import Head

_MOST = 8  # heads of one role that are tried together, the first that are given
# A head is spared alone if that costs less than this share of what all of them cost together.
_SPARED = 0.25
_TWICE = 2.0  # times what its heads cost alone is what a group must cost together
_LEAST = 0.1  # of what the model without any head loses is what a group must cost together

Told = Callable[[int, int], None]
Losses = Float64[np.ndarray, " M"]


def try_without(
    model: nn.Module,
    behaviours: Sequence[Behaviour],
    heads: Sequence[Head],
    strongest: Callable[[str], Sequence[Head]],
    *,
    seed: int = 0,
    on_progress: Told | None = None,
) -> Effects:
    """What each behaviour loses without each head, and without those that back each other up.

    Args:
        strongest: The heads of a role, the strongest first.
        on_pass: Told after each head how many are done, of how many.
    Raises:
        ArgumentError: there is no behaviour, two have one name, or a loss is not finite.
    """
    names = [one.name for one in behaviours]
    if len(set(names)) < len(names) or not names:
        raise ArgumentError(
            f"effects: behaviours are named {', '.join(names) or 'nothing'}. Give at least one, "
            f"and each a name of its own."
        )
    trials = [Trial(model, one) for one in behaviours]
    alone = _each_alone(trials, heads, seed, on_progress)
    groups = [
        group
        for trial in trials
        for group in groups_of(
            trial, {role: strongest(role) for role in trial.behaviour.roles}, seed=seed
        )
    ]
    return Effects(
        alone=tuple(alone),
        groups=tuple(groups),
        says={one.name: one.says for one in behaviours},
        roles={one.name: tuple(one.roles) for one in behaviours},
    )


class Trial:
    """A model on one behaviour, whole and without heads; the same texts each time."""

    def __init__(self, model: nn.Module, behaviour: Behaviour) -> None:
        self._model, self.behaviour = model, behaviour
        inputs = [one.inputs for one in behaviour.questions]
        self._attentions = find_attentions(model, inputs[0])
        self._means = mean_heads(model, self._attentions, inputs)
        self._known: dict[frozenset[Head], Losses] = {}
        self.heads = tuple(heads_of(self._attentions))
        self.whole = self._losses(frozenset())

    def grows(self, heads: Sequence[Head]) -> Losses:
        """What the loss of each text grows by without these heads."""
        asked = frozenset(heads)
        if asked not in self._known:
            self._known[asked] = self._losses(asked) - self.whole
        return self._known[asked]

    @torch.no_grad()
    def _losses(self, heads: frozenset[Head]) -> Losses:
        chosen = by_attention(sorted(heads), self._attentions)
        with (
            in_evaluation(self._model),
            replace_heads(self._model, self._attentions, chosen, lambda one, _: self._means[one]),
        ):
            parts = [one.loss(self._model(**one.inputs)) for one in self.behaviour.questions]
        for part in parts:
            if part.ndim != 1:
                raise ShapeError(
                    f"effects: {self.behaviour.name!r} gives a loss of shape {tuple(part.shape)}. "
                    f"Give one number for each text."
                )
        found = torch.cat(parts).double().cpu().numpy()
        bad = ~np.isfinite(found)
        if bad.any():
            raise ArgumentError(
                f"effects: {self.behaviour.name!r} is not finite on {bad.sum()} of {len(bad)} "
                f"texts. Leave them out."
            )
        return found


def _each_alone(
    trials: Sequence[Trial], heads: Sequence[Head], seed: int, on_progress: Told | None
) -> list[Effect]:
    """The effects of one behaviour after the other; one family of tests."""
    grown: list[Float64[np.ndarray, "M N"]] = []
    for trial in trials:
        columns = []
        for head in heads:
            columns.append(trial.grows([head]))
            if on_progress is not None:
                on_progress(len(grown) * len(heads) + len(columns), len(trials) * len(heads))
        grown.append(np.stack(columns, axis=1) if columns else np.zeros((len(trial.whole), 0)))
    judged = [one if len(one) >= FEWEST_TEXTS else one[:, :0] for one in grown]
    found = []
    for trial, one, p in zip(trials, grown, max_t(judged, seed=seed), strict=True):
        adjusted = p if p.size else np.full(len(heads), np.nan)
        found += [
            _effect([head], trial, one[:, at], seed, float(adjusted[at]))
            for at, head in enumerate(heads)
        ]
    return found


def groups_of(trial: Trial, sharing: Mapping[str, Sequence[Head]], *, seed: int = 0) -> list[Group]:
    """The heads of each role that the behaviour can spare one by one, but not all together.

    Of at most eight heads, the first ones, those that cannot be spared alone are left out, then
    those without which the others cost the same, one at a time from the least: what stays is a
    smallest such group. What it costs lies above the sum of what its heads cost alone, also on
    texts drawn with replacement; it is at least twice that sum, and a tenth of what the model
    loses without any head.

    Args:
        sharing: The heads of each role, the strongest first.
    """
    found: dict[frozenset[Head], Group] = {}
    for role, heads in sharing.items():
        members = _members(trial, list(heads[:_MOST]), seed)
        if len(members) < 2:
            continue
        together = trial.grows(members)
        alone = np.sum([trial.grows([one]) for one in members], axis=0)
        cost = max(_TWICE * float(np.mean(alone)), _LEAST * float(trial.grows(trial.heads).mean()))
        if _interval(together - alone, seed)[0] > 0 and together.mean() >= cost:
            effect = _effect(members, trial, together, seed)
            found.setdefault(frozenset(members), Group(role, effect, float(np.mean(alone))))
    return list(found.values())


def _members(trial: Trial, heads: list[Head], seed: int) -> list[Head]:
    """The heads that can be spared alone, without those that add nothing to the others."""
    if len(heads) < 2:
        return heads
    most = _SPARED * trial.grows(heads).mean()
    left = [head for head in heads if trial.grows([head]).mean() < most]
    while len(left) > 1:
        adds = [
            trial.grows(left) - trial.grows([one for one in left if one != out]) for out in left
        ]
        least = int(np.argmin([one.mean() for one in adds]))
        if _interval(adds[least], seed)[0] > 0:
            break
        del left[least]
    return sorted(left)


def _effect(
    heads: Sequence[Head], trial: Trial, grown: Losses, seed: int, p: float = float("nan")
) -> Effect:
    names = tuple(str(head) for head in heads)
    return Effect(
        names, trial.behaviour.name, float(grown.mean()), *_interval(grown, seed), len(grown), p
    )


def _interval(grown: Losses, seed: int) -> tuple[float, float]:
    ends = interval(grown[:, None], np.ones((len(grown), 1)), seed=seed)
    low, high = (float(one[0]) for one in ends)
    return low, high
