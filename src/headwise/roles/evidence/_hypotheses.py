"""Hypotheses, that a head has a role, and their test: one family, with p adjusted over all of it.

NumPy alone: no model is needed, and every law can be tested by simulation. The sampling unit is
the text, because the tokens of one text depend on each other: texts are resampled, and texts are
split into halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int64

from headwise.roles.evidence._significance import step_down
from headwise.roles.relations import Role
from headwise.tables import rate, ratio_interval, share_interval

PerText = Float[np.ndarray, "M R N"]
PerHead = Float[np.ndarray, "R N"]
Column = Float[np.ndarray, " N"]  # of a table: a row for each role and head, roles first

FEWEST_TEXTS, FEWEST_INSTANCES = 30, 20
LEVEL = 0.05  # of the adjusted p
BINARY = ("top", "choice")  # scores that count queries
_PROMISING = 0.5  # of the bars, on the selection half


@dataclass(frozen=True)
class Hypotheses:
    """Sums of `M` held-out texts for `R` roles and `N` heads: hypotheses that a head has a role.

    Attributes:
        value: The sum of the score over the queries of a text.
        count: The number of those queries.
        nulls: For each null (a baseline that involves no knowledge), its sums over the same
            queries; NaN where it does not apply.
        null_names: For each null, its name for each role: `offset -1`, say.
        measures: Further columns of the table: `chosen_half`, `mass` and `value`; and
            `chosen_baseline`, what the strongest null scores on the selection half. `plant` adds
            `planted_effect` and `smallest`.
    """

    value: PerText
    count: PerText
    nulls: Mapping[str, PerText]
    roles: tuple[Role, ...]
    null_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measures: dict[str, PerHead] = field(default_factory=dict)

    def for_each(self, values: Sequence[Any]) -> np.ndarray:
        """A value of each role, for each row of a table."""
        return np.repeat(values, self.value.shape[2])

    def only(self, roles: Sequence[int], heads: Sequence[int], *, screened: bool) -> "Hypotheses":
        """The hypotheses of some roles and heads.

        Args:
            screened: Whether they have to be promising to be tested, as where many are searched.
        """

        def of(sums: np.ndarray) -> np.ndarray:
            return sums[..., roles, :][..., heads]

        measures = {name: of(sums) for name, sums in self.measures.items()}
        if not screened:
            measures["chosen_baseline"] = np.full_like(measures["chosen_baseline"], np.nan)
        return Hypotheses(
            value=of(self.value),
            count=of(self.count),
            nulls={null: of(sums) for null, sums in self.nulls.items()},
            roles=tuple(self.roles[role] for role in roles),
            null_names={null: [n[role] for role in roles] for null, n in self.null_names.items()},
            measures=measures,
        )

    @property
    def bars(self) -> tuple[Column, Column]:
        """The lift and the points over the strongest null that each hypothesis needs."""
        return (
            self.for_each([role.bar for role in self.roles]),
            self.for_each([role.points for role in self.roles]),
        )


def of_examples(
    role: str,
    right: Float[np.ndarray, "M C"],
    count: Float[np.ndarray, " M"],
    nulls: Mapping[str, Float[np.ndarray, "M _"]],
    null_names: Mapping[str, str],
    selection: Bool[np.ndarray, " M"],
) -> Hypotheses:
    """The hypotheses that heads, and last a set of them, are right on held-out examples.

    Args:
        right: How often each of them is right in each example; of which `count` are the cases.
        nulls: How often each baseline is; NaN for one that was not evaluated.
    """

    def on_selection(sums: Float[np.ndarray, "M C"]) -> PerHead:
        return sums[None, selection].sum(1) / max(count[selection].sum(), 1.0)

    held = ~selection
    of_nulls = {null: np.broadcast_to(sums, right.shape) for null, sums in nulls.items()}
    return Hypotheses(
        value=right[held, None],
        count=np.broadcast_to(count[held, None, None], right[held, None].shape),
        nulls={null: sums[held, None] for null, sums in of_nulls.items()},
        roles=(Role(role, "", lambda text: ()),),  # for its bars, which are those of all roles
        null_names={null: [name] for null, name in null_names.items()},
        measures={
            "chosen_half": on_selection(right),
            "chosen_baseline": np.fmax.reduce([on_selection(sums) for sums in of_nulls.values()]),
        },
    )


def run_tests(
    families: Sequence[Hypotheses], *, draws: int = 4000, seed: int = 0, intervals: bool = True
) -> list[pd.DataFrame]:
    """Test all hypotheses together, so that p is adjusted over all of them.

    A hypothesis is tested if it clears half of its bars on the selection half. Since that half
    has no say in the test, the others need no adjustment: many heads score in a few texts only,
    and their t varies so much that no p could be small with them in the family.

    Args:
        families: The hypotheses of one share their texts; those of two do not.
        draws: Bootstrap resamples of the test.
        intervals: Whether to compute the intervals; otherwise they are NaN.
    Returns:
        A row for each hypothesis, NaN where there is no data: `effect`, the score per query, with
        the interval (95 %, bootstrap over texts; Wilson's for a share that is the same in all
        texts) from `ci_low` to `ci_high`; `null`, the strongest
        null, "" where none applies, `baseline`, what it scores, and `lift`, the share of the
        remaining range, `(effect − baseline) / (1 − baseline)`; `n` queries in `texts` texts;
        `p_adj`, adjusted over all hypotheses, NaN for too few queries or texts, and 1 where the
        selection half shows too little for a test; and `null.…`, the score of each null.
    """
    rows, gains, worst, tested = [], [], [], []
    for family in families:
        described, null_sums = _describe(family)
        enough = (described["texts"] >= FEWEST_TEXTS) & (described["n"] >= FEWEST_INSTANCES)
        keep = enough.to_numpy() & is_promising(family)
        described["p_adj"] = np.where(enough, 1.0, np.nan)
        low, high = np.full((2, len(keep)), np.nan)
        if intervals:
            value, count = _rows(family.value), _rows(family.count)
            low, high = ratio_interval(value, count, seed=seed)
            # Texts that all agree would leave no width, however few they are.
            flat = (low == high) & family.for_each([role.score in BINARY for role in family.roles])
            same = value[:, flat].astype(np.float64), count[:, flat].astype(np.float64)
            low[flat], high[flat] = share_interval(*same)
        described["ci_low"], described["ci_high"] = low, high
        gain = _rows(family.value - null_sums)[:, keep]
        rows.append(described)
        gains.append(gain)
        worst.append(_worst_gain(family, gain, keep))
        tested.append(keep)
    for described, keep, p in zip(
        rows, tested, step_down(gains, worst, draws=draws, seed=seed), strict=True
    ):
        described.loc[keep, "p_adj"] = p
    return rows


def _rows(sums: PerText) -> Float[np.ndarray, "M C"]:
    """The hypotheses side by side, in the order of the table."""
    return sums.reshape(len(sums), -1)


def _describe(family: Hypotheses) -> tuple[pd.DataFrame, PerText]:
    """The effect of each hypothesis, and the strongest null with its sums in each text."""
    n = family.count.sum(0, dtype=np.float64)
    sums = np.stack(list(family.nulls.values()))
    rates = rate(sums.sum(1, dtype=np.float64), n)
    strongest = np.nan_to_num(rates, nan=-1.0).argmax(0)
    effect = rate(family.value.sum(0, dtype=np.float64), n)
    baseline = np.take_along_axis(rates, strongest[None], 0)[0]
    unnamed = [""] * len(family.roles)
    names = np.array([*(family.null_names.get(null, unnamed) for null in family.nulls), unnamed])
    known = np.where(np.isnan(baseline), -1, strongest)
    table = {
        "effect": effect,
        "null": names[known, np.arange(len(n))[:, None]],
        "baseline": baseline,
        "lift": lift(effect, baseline),
        "n": n,
        "texts": (family.count > 0).sum(0).astype(np.float64),
    }
    table |= {f"null.{name}": of_null for name, of_null in zip(family.nulls, rates, strict=True)}
    null_sums = np.take_along_axis(sums, strongest[None, None], 0)[0]
    described = pd.DataFrame({name: column.ravel() for name, column in table.items()})
    return described, np.nan_to_num(null_sums)


def _worst_gain(
    family: Hypotheses, gain: Float[np.ndarray, "M _"], keep: Bool[np.ndarray, " N"]
) -> Float[np.ndarray, " _"]:
    """The gain of a text of average size where the null is always right and the head never.

    Evenness is not a share of right queries, so its worst gain is the least observed one.
    """
    count = _rows(family.count)[:, keep]
    size = rate(count.sum(0, dtype=np.float64), (count > 0).sum(0), 0.0)
    breadth = family.for_each([role.kind == "breadth" for role in family.roles])[keep]
    return np.where(breadth, gain.min(0, initial=0.0), -size)


def lift(effect: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """The share of the range above the baseline that is reached; NaN for a baseline of 1."""
    return rate(effect - baseline, 1 - baseline)


def best_of(
    value: Float[np.ndarray, "M R K"], count: Float[np.ndarray, "M R"]
) -> Int64[np.ndarray, " R"]:
    """Which of `K` candidates scores best on each role; `count` holds the queries per text."""
    rates = rate(value.sum(0), count.sum(0)[:, None])
    return np.nan_to_num(rates, nan=-1.0).argmax(-1)


def has_role(family: Hypotheses, tested: pd.DataFrame) -> Bool[np.ndarray, " N"]:
    """Which hypotheses are found, from their tests.

    A role is found if it is significant and clears its bar of lift and of points over the
    strongest null, on the held-out half and on the selection half.
    """
    # The selection half took no part in the test, so chance rarely clears the bars on both halves.
    (bar, points), baseline = family.bars, tested["baseline"].to_numpy()
    found = tested["p_adj"].to_numpy() < LEVEL
    for effect in (family.measures["chosen_half"].ravel(), tested["effect"].to_numpy()):
        found &= (lift(effect, baseline) >= bar) & (effect - baseline >= points)
    return found


def is_promising(family: Hypotheses) -> Bool[np.ndarray, " N"]:
    """Which hypotheses clear half of their bars on the selection half, or have no query there."""
    if "chosen_baseline" not in family.measures:
        return np.ones(family.value[0].size, dtype=bool)
    effect, baseline = (
        family.measures[name].ravel() for name in ("chosen_half", "chosen_baseline")
    )
    bar, points = family.bars
    lifted = lift(effect, baseline)
    unpromising = (lifted < _PROMISING * bar) | (effect - baseline < _PROMISING * points)
    return ~unpromising


def why_not(family: Hypotheses, tested: pd.DataFrame) -> list[str]:
    """Why each tested hypothesis is not found, in words; "" for the others."""
    found, promising, (bars, _) = has_role(family, tested), is_promising(family), family.bars
    selected = family.measures["chosen_half"].ravel()
    screened = lift(selected, family.measures["chosen_baseline"].ravel())
    on_selection = lift(selected, tested["baseline"].to_numpy())
    tests = int((promising & tested["p_adj"].notna()).sum())
    reasons = [""] * len(found)
    for column, row in enumerate(tested.to_dict("records")):
        bar, p = bars[column], row["p_adj"]
        if found[column] or np.isnan(p):
            continue
        lifts = {"selection": on_selection[column], "held-out": row["lift"]}
        below = [
            f"lift {reached:.2f} on the {half} half, {bar:g} needed"
            for half, reached in lifts.items()
            if reached < bar
        ]
        if row["baseline"] >= 1:
            below = ["its strongest baseline is always right"]
        reasons[column] = "; ".join([f"p = {p:.2g} among {tests} tested", *below])
        if not promising[column]:
            reasons[column] = (
                f"lift {screened[column]:.2f} on the selection half, {_PROMISING * bar:g} needed "
                f"for a test"
            )
    return reasons
