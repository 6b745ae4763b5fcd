"""Readings as families of questions: held-out sums of every head and role, beside every null."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

from headwise.roles._evidence import Scored, best_of
from headwise.roles._measure import GridScores, Measured
from headwise.roles._score import OFFSETS, rule_names
from headwise.roles._table import NULLS
from headwise.roles.relations import Grid, Role

_SAYS = {
    "chance": "chance",
    "permuted": "a head with permuted weights",
    "control": "the same positions without repetition",
}
# Which nulls apply besides chance and permuted weights. An offset is no null for an offset.
_MORE = {
    "offset": (),
    "sink": (),
    "class": ("offset",),
    "structure": ("offset", "class"),
    "probe": ("offset", "control"),
}


@dataclass(frozen=True)
class Family:
    """Questions about the same texts: roles and, within each, heads.

    Attributes:
        scored: The sums of the held-out texts; a column for each role and head, in that order.
        chosen_half: The effect on the other half.
        says: What each null is for each role: `offset -1`, say.
    """

    roles: tuple[Role, ...]
    scored: Scored
    chosen_half: Float[np.ndarray, " _"]
    says: dict[str, list[str]]


def make_family(
    seen: Measured,
    nulls: Sequence[Measured],
    control: Measured | None,
    of_text: Int64[np.ndarray, " P"],
    chosen: Bool[np.ndarray, " M"],
    tags: Sequence[str],
) -> Family:
    """Hold every head against every null, on the texts that nothing is chosen on.

    Args:
        nulls: The same reading by models with permuted weights.
        control: The same heads where the relation means nothing.
        of_text: The text that each item is a piece of.
        chosen: The texts on which rules and null heads are chosen.
        tags: The classes of words that rules went by.
    """
    parts = []
    for grid, scores in seen.grids.items():
        own = _by_text(_fitting(scores, seen.causal), of_text, len(chosen))
        theirs = [_by_text(one.grids[grid], of_text, len(chosen)) for one in nulls]
        without = None
        if control is not None:
            without = _by_text(control.grids[grid], of_text, len(chosen))
        parts.append(_Against(grid, own, theirs, without, chosen, tags).family())
    return _beside(parts)


def _fitting(scores: GridScores, causal: bool) -> GridScores:
    """Without the roles that make no sense for a model that looks ahead."""
    keep = np.array([causal or not role.ahead for role in scores.roles], dtype=np.float32)
    head = keep[:, None]
    return GridScores(
        scores.roles,
        value=scores.value * head,
        count=scores.count * head,
        even=scores.even * head,
        rule_value=scores.rule_value * head,
        rule_count=scores.rule_count * keep,
    )


def _by_text(scores: GridScores, of_text: Int64[np.ndarray, " P"], texts: int) -> GridScores:
    """The sums of whole texts from those of their pieces."""

    def added(pieces: np.ndarray) -> np.ndarray:
        whole = np.zeros((texts, *pieces.shape[1:]), pieces.dtype)
        np.add.at(whole, of_text, pieces)
        return whole

    return GridScores(
        scores.roles,
        value=added(scores.value),
        count=added(scores.count),
        even=added(scores.even),
        rule_value=added(scores.rule_value),
        rule_count=added(scores.rule_count),
    )


@dataclass(frozen=True)
class _Against:
    """The heads of one grid and all that they are held against."""

    grid: Grid
    own: GridScores
    nulls: Sequence[GridScores]
    control: GridScores | None
    chosen: Bool[np.ndarray, " M"]
    tags: Sequence[str]

    def family(self) -> Family:
        held = ~self.chosen
        own = self.own
        names = rule_names(self.grid, self.tags)
        kinds = {"offset": slice(0, len(OFFSETS)), "class": slice(len(OFFSETS), None)}
        says = {name: [_SAYS.get(name, "")] * len(own.roles) for name in NULLS}
        sums = {name: np.full(own.value[held].shape, np.nan, np.float32) for name in NULLS}
        sums["chance"] = own.even[held]
        for name, those in kinds.items():
            if names[those]:
                best, rates = self._best(own.rule_value[..., those], own.rule_count)
                sums[name] = rates[..., None] * own.count[held]
                says[name] = [names[those][at] for at in best]
        if self.nulls:
            # Heads of one model share the queries of a role but for windows; the first tells.
            value = np.concatenate([one.value for one in self.nulls], axis=-1)
            _, rates = self._best(value, self.nulls[0].count[..., 0])
            sums["permuted"] = rates[..., None] * own.count[held]
        if self.control is not None:
            sums["control"] = self.control.value[held]
        for at, role in enumerate(own.roles):
            for name in set(sums) - {"chance", "permuted", *_MORE[role.kind]}:
                sums[name][:, at] = np.nan
        return Family(
            own.roles,
            Scored(
                _flat(own.value[held]),
                _flat(own.count[held]),
                {name: _flat(one) for name, one in sums.items()},
            ),
            chosen_half=_rate(*(self._total(sums) for sums in (own.value, own.count))),
            says=says,
        )

    def _total(self, sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, " C"]:
        return sums[self.chosen].sum(0, dtype=np.float64).ravel()

    def _best(
        self, value: Float[np.ndarray, "M R K"], count: Float[np.ndarray, "M R"]
    ) -> tuple[Int64[np.ndarray, " R"], Float[np.ndarray, "held R"]]:
        """Which candidate is best on the one half, and its rates in the texts of the other."""
        best = best_of(value[self.chosen], count[self.chosen])
        found = np.take_along_axis(value[~self.chosen], best[None, :, None], axis=-1)[..., 0]
        return best, np.nan_to_num(_rate(found, count[~self.chosen]))


def _beside(parts: Sequence[Family]) -> Family:
    """The questions of several grids about the same texts."""
    names = parts[0].scored.nulls
    return Family(
        tuple(role for part in parts for role in part.roles),
        Scored(
            np.concatenate([part.scored.value for part in parts], axis=1),
            np.concatenate([part.scored.count for part in parts], axis=1),
            {
                name: np.concatenate([part.scored.nulls[name] for part in parts], axis=1)
                for name in names
            },
        ),
        chosen_half=np.concatenate([part.chosen_half for part in parts]),
        says={name: [said for part in parts for said in part.says[name]] for name in names},
    )


def _flat(sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, "M C"]:
    return sums.reshape(len(sums), -1)


def _rate(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
