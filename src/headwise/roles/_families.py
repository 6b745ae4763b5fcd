"""Readings as families of questions: held-out sums of every head and role, beside every null."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

from headwise.roles._evidence import Scored, best_of
from headwise.roles._table import NULLS
from headwise.roles.evaluation import OFFSETS, DetailedScores, Reader, RoleScores, rule_names
from headwise.roles.relations import Role

_SAYS = {
    "chance": "chance",
    "permuted": "a head with permuted weights",
    "random": "a head that learned nothing",
    "shuffled": "the same words in another order",
    "control": "the same positions without repetition",
}
_LIKE_IT = ("permuted", "random")
# Which nulls apply. An offset is no null for an offset. For evenness neither even attention is
# one nor weights as they begin, which are mostly so small that all attention is even.
_APPLY = {
    "offset": ("chance", *_LIKE_IT),
    "sink": ("chance", *_LIKE_IT),
    "class": ("chance", "offset", *_LIKE_IT),
    "breadth": ("permuted",),
    "structure": ("chance", "offset", "class", "shuffled", *_LIKE_IT),
    "probe": ("chance", "offset", "control", *_LIKE_IT),
}


@dataclass(frozen=True)
class Family:
    """Questions about the same texts: roles and, within each, heads.

    Attributes:
        scored: The sums of the held-out texts; a column for each role and head, in that order.
        chosen_half: The effect on the other half.
        mass: The attention per query on the held-out texts.
        share: The same with keys weighted by the size of what they would write.
        says: What each null is for each role: `offset -1`, say.
    """

    roles: tuple[Role, ...]
    scored: Scored
    chosen_half: Float[np.ndarray, " _"]
    mass: Float[np.ndarray, " _"]
    share: Float[np.ndarray, " _"]
    says: dict[str, list[str]]


@dataclass(frozen=True)
class Split:
    """Which text each item is a piece of, and on which texts is chosen.

    Attributes:
        of_text: The text of each item.
        chosen: The texts on which rules and null heads are chosen; the others are held out.
    """

    of_text: Int64[np.ndarray, " P"]
    chosen: Bool[np.ndarray, " M"]

    def halves(
        self, pieces: Float[np.ndarray, "P R K"]
    ) -> tuple[Float[np.ndarray, "chosen R K"], Float[np.ndarray, "held R K"]]:
        """The sums of whole texts: of those to choose on, and of those that are held out."""
        whole = np.zeros((len(self.chosen), *pieces.shape[1:]), pieces.dtype)
        np.add.at(whole, self.of_text, pieces)
        return whole[self.chosen], whole[~self.chosen]

    def best(
        self, value: Float[np.ndarray, "P R K"], count: Float[np.ndarray, "P R 1"]
    ) -> tuple[Int64[np.ndarray, " R"], "Baseline"]:
        """Which of `K` is best on the one half, and its rates in the texts of the other."""
        (value, held_value), (count, held_count) = self.halves(value), self.halves(count)
        best = best_of(value, count[..., 0])
        at = best[None, :, None]
        rates = _rate(np.take_along_axis(held_value, at, -1), held_count)
        score = _rate(np.take_along_axis(value, at, -1).sum(0), count.sum(0))
        return best, Baseline(np.nan_to_num(score, nan=-1.0), np.nan_to_num(rates))


@dataclass(frozen=True)
class Baseline:
    """The best of some rules or null heads on each role, for each head that it is held against.

    Attributes:
        chosen: What it scores on the texts that it was chosen on.
        rates: What it scores in each held-out text.
    """

    chosen: Float[np.ndarray, "R #N"]
    rates: Float[np.ndarray, "held R #N"]

    @classmethod
    def strongest(cls, rivals: Sequence["Baseline"]) -> "Baseline":
        """Of each role the one that scored best where it was chosen."""
        chosen = np.stack([one.chosen for one in rivals])
        rates = np.stack([one.rates for one in rivals])
        first = chosen.argmax(0)[None]
        return cls(
            np.take_along_axis(chosen, first, 0)[0],
            np.take_along_axis(rates, first[:, None], 0)[0],
        )


def rival(measured: RoleScores, split: Split) -> Baseline:
    """The best heads of a null model, for each head the best of those that see as much.

    Where a layer sees a window, fewer queries are eligible, and easier ones.
    """
    seen = np.unique(measured.count.sum(0), axis=1, return_inverse=True)[1].ravel()
    alike = [np.flatnonzero(seen == one) for one in range(seen.max() + 1)]
    best = [split.best(measured.value[..., at], measured.count[..., at[:1]])[1] for at in alike]
    return Baseline(
        np.concatenate([best[one].chosen for one in seen], axis=-1),
        np.concatenate([best[one].rates for one in seen], axis=-1),
    )


@dataclass(frozen=True)
class Contrast:
    """The same heads where a relation means nothing, for some of the roles.

    Attributes:
        null: Which null that is.
        roles: Where those roles stand among all.
    """

    null: str
    roles: Sequence[int]
    measured: RoleScores

    def sums(
        self, split: Split, count: Float[np.ndarray, "held R N"]
    ) -> Float[np.ndarray, "held R N"]:
        """What it scores over as many queries; a text without one has the rate of all texts."""
        _, value = split.halves(self.measured.value)
        _, asked = split.halves(self.measured.count)
        mean = _rate(value.sum(0), asked.sum(0))
        rates = np.where(asked > 0, _rate(value, asked), mean)
        sums = np.full_like(count, np.nan)
        sums[:, self.roles] = np.nan_to_num(rates) * count[:, self.roles]
        return sums


def make_family(
    asked: Reader,
    seen: DetailedScores,
    split: Split,
    *,
    rivals: Mapping[str, Baseline],
    contrast: Contrast | None,
) -> Family:
    """Hold every head against every null, on the texts that nothing is chosen on.

    Args:
        asked: What was read; it knows the roles.
        rivals: The best heads of null models, by the name of the null.
    """
    roles = asked.roles
    fits = np.array([seen.causal or not role.ahead for role in roles], dtype=np.float32)[:, None]
    (chosen_value, value), (chosen_count, count) = (
        split.halves(one * fits) for one in (seen.value, seen.count)
    )
    names = [rule_names(role.grid, asked.tags) for role in roles]
    sums = {name: np.full(value.shape, np.nan, np.float32) for name in NULLS}
    says = {name: [_SAYS.get(name, "")] * len(roles) for name in NULLS}
    sums["chance"] = split.halves(seen.even * fits)[1]
    for name, those in (("offset", slice(len(OFFSETS))), ("class", slice(len(OFFSETS), None))):
        if seen.rules[..., those].size:
            which, best = split.best(seen.rules[..., those], seen.rule_count)
            sums[name] = best.rates * count
            says[name] = [
                "".join(own[those][at : at + 1]) for own, at in zip(names, which, strict=True)
            ]
    for name, one in rivals.items():
        sums[name] = one.rates * count
    if contrast is not None:
        sums[contrast.null] = contrast.sums(split, count)
    return Family(
        roles,
        Scored(_flat(value), _flat(count), _applying(sums, roles)),
        chosen_half=_rate(*(_total(one) for one in (chosen_value, chosen_count))),
        says=says,
        **_beside(roles, seen, split, _total(count)),
    )


def _beside(
    roles: Sequence[Role], seen: DetailedScores, split: Split, count: Float[np.ndarray, " C"]
) -> dict[str, Float[np.ndarray, " C"]]:
    """Mass and share per query, of relations."""
    relation = np.array([role.score != "entropy" for role in roles])[:, None]
    found = {}
    for name in ("mass", "share"):
        held = _total(split.halves(getattr(seen, name))[1])
        shown = np.broadcast_to(relation, seen.value.shape[1:]).ravel()
        found[name] = np.where(shown, _rate(held, count), np.nan)
    return found


def _applying(
    sums: Mapping[str, Float[np.ndarray, "held R N"]], roles: Sequence[Role]
) -> dict[str, Float[np.ndarray, "held C"]]:
    """NaN where a null does not apply; mentions have no class."""
    for name, one in sums.items():
        for at, role in enumerate(roles):
            if name not in _APPLY[role.kind] or (name == "class" and role.grid == "mention"):
                one[:, at] = np.nan
    return {name: _flat(one) for name, one in sums.items()}


def _flat(sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, "M C"]:
    return sums.reshape(len(sums), -1)


def _total(sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, " C"]:
    return sums.sum(0, dtype=np.float64).ravel()


def _rate(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    below = np.broadcast_to(below, above.shape)
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
