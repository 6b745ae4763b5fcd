"""Statistical evidence for roles: intervals, baselines and one family of tests, over texts.

NumPy alone: no model is needed, and every law can be tested by simulation. The sampling unit is
the text, because the tokens of one text depend on each other: texts are resampled, and texts are
split into halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int64

from headwise.roles.relations import Role
from headwise.roles.testing._significance import step_down
from headwise.tables import ratio_interval

PerText = Float[np.ndarray, "M N"]
Column = Float[np.ndarray, " N"]

FEWEST_TEXTS, FEWEST_INSTANCES = 30, 20
LEVEL = 0.05  # of the adjusted p
_PROMISING = 0.5  # of the bars, on the selection half


@dataclass(frozen=True)
class Family:
    """Sums of `M` texts for `N` hypotheses: that a head has a role, for every role and head.

    Attributes:
        value: The sum of the score over the queries of a text.
        count: The number of those queries.
        nulls: For each null (a baseline that involves no knowledge), its sums over the same
            queries; NaN where it does not apply.
        roles: The roles. The columns of the first role come first, one for each head.
        null_names: For each null, its name for each role: `offset -1`, say.
        measures: Further columns of the table: `chosen_half`, `mass` and `value`; and
            `chosen_baseline`, what the strongest null scores on the selection half. `plant` adds
            `planted_effect` and `smallest`.
    """

    value: PerText
    count: PerText
    nulls: Mapping[str, PerText]
    roles: tuple[Role, ...] = ()
    null_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    measures: dict[str, Column] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The result of testing each hypothesis on held-out texts; NaN where there is no data.

    Attributes:
        effect: The score per query.
        low: The lower end of its interval (95 %, bootstrap over texts).
        high: The upper end.
        rates: What each null scores per query.
        null: The strongest null, as a row of `rates`; −1 where none applies.
        baseline: What the strongest null scores.
        lift: The share of the remaining range, `(effect − baseline) / (1 − baseline)`.
        n: The number of queries.
        texts: The number of texts with at least one query.
        p: Adjusted for the whole family; NaN for too few queries or texts, and 1 where the
            selection half shows too little for a test.
    """

    effect: Column
    low: Column
    high: Column
    rates: Float[np.ndarray, "K N"]
    null: Int64[np.ndarray, " N"]
    baseline: Column
    lift: Column
    n: Column
    texts: Column
    p: Column


def halves(texts: int, seed: int | Sequence[int] = 0) -> Bool[np.ndarray, " M"]:
    """Draw the texts of the selection half at random; the others are held out for reporting."""
    selection = np.zeros(texts, dtype=bool)
    selection[np.random.default_rng(seed).permutation(texts)[: texts // 2]] = True
    return selection


def best_of(
    value: Float[np.ndarray, "M R K"], count: Float[np.ndarray, "M R"]
) -> Int64[np.ndarray, " R"]:
    """Which of `K` candidates scores best on each role; `count` holds the queries per text."""
    total = value.sum(0)
    queries = np.broadcast_to(count.sum(0)[:, None], total.shape)
    return np.nan_to_num(_divide(total, queries), nan=-1.0).argmax(-1)


def judge(
    families: Sequence[Family], *, draws: int = 4000, seed: int = 0, intervals: bool = True
) -> list[Verdict]:
    """Test all hypotheses together, so that p is adjusted over all of them.

    A hypothesis is tested if it clears half of its bars on the selection half. Since that half
    has no say in the test, the others need no adjustment: many heads score in a few texts only,
    and their t varies so much that no p could be small with them in the family.

    Args:
        families: The hypotheses of one family share their texts; those of two families do not.
        draws: Bootstrap resamples of the test.
        intervals: Whether to compute the intervals; otherwise they are NaN.
    """
    nulls = [_strongest_null(family) for family in families]
    enough = [_enough_data(family) for family in families]
    tested = [keep & is_promising(family) for family, keep in zip(families, enough, strict=True)]
    gains = [
        (family.value - null_sums)[:, keep]
        for family, (_, _, null_sums), keep in zip(families, nulls, tested, strict=True)
    ]
    worst = [
        _worst_gain(family, gain, keep)
        for family, gain, keep in zip(families, gains, tested, strict=True)
    ]
    adjusted = step_down(gains, worst, draws=draws, seed=seed)
    verdicts = []
    for family, null, known, keep, p_tested in zip(
        families, nulls, enough, tested, adjusted, strict=True
    ):
        p = np.where(known, 1.0, np.nan)
        p[keep] = p_tested
        unknown = np.full(len(keep), np.nan)
        ends = unknown, unknown
        if intervals:
            ends = ratio_interval(family.value, family.count, seed=seed)
        verdicts.append(_verdict(family, null[:2], p, ends))
    return verdicts


def _worst_gain(
    family: Family, gain: Float[np.ndarray, "M _"], keep: Bool[np.ndarray, " N"]
) -> Float[np.ndarray, " _"]:
    """The gain of a text of average size where the null is always right and the head never.

    Evenness is not a share of right queries, so its worst gain is the least observed one.
    """
    count = family.count[:, keep]
    size = _divide(count.sum(0, dtype=np.float64), (count > 0).sum(0).astype(np.float64), 0.0)
    if not family.roles:
        return -size
    heads = len(keep) // len(family.roles)
    breadth = np.repeat([role.kind == "breadth" for role in family.roles], heads)[keep]
    return np.where(breadth, gain.min(0, initial=0.0), -size)


def lift(effect: Column, baseline: Column) -> Column:
    """The share of the range above the baseline that is reached; NaN for a baseline of 1."""
    return _divide(effect - baseline, 1 - baseline)


def _strongest_null(
    family: Family,
) -> tuple[Float[np.ndarray, "K N"], Int64[np.ndarray, " N"], PerText]:
    """The rate of each null, which is the strongest (−1: none), and its sums in each text."""
    n = family.count.sum(0, dtype=np.float64)
    sums = np.stack(list(family.nulls.values()))
    rates = _divide(sums.sum(1, dtype=np.float64), np.broadcast_to(n, (len(sums), len(n))))
    strongest = np.nan_to_num(rates, nan=-1.0).argmax(0)
    columns = np.arange(len(n))
    applies = ~np.isnan(rates[strongest, columns])
    strongest_sums = np.nan_to_num(sums[strongest, :, columns].T)
    return rates, np.where(applies, strongest, -1), strongest_sums


def _enough_data(family: Family) -> Bool[np.ndarray, " N"]:
    texts = (family.count > 0).sum(0)
    return (texts >= FEWEST_TEXTS) & (family.count.sum(0) >= FEWEST_INSTANCES)


def _verdict(
    family: Family,
    null: tuple[Float[np.ndarray, "K N"], Int64[np.ndarray, " N"]],
    p: Column,
    ends: tuple[Column, Column],
) -> Verdict:
    rates, strongest = null
    n = family.count.sum(0, dtype=np.float64)
    effect = _divide(family.value.sum(0, dtype=np.float64), n)
    baseline = np.where(strongest < 0, np.nan, rates[strongest, np.arange(len(n))])
    return Verdict(
        effect=effect,
        low=ends[0],
        high=ends[1],
        rates=rates,
        null=strongest,
        baseline=baseline,
        lift=lift(effect, baseline),
        n=n,
        texts=(family.count > 0).sum(0).astype(np.float64),
        p=p,
    )


def _divide(
    above: Float[np.ndarray, "*shape"], below: Float[np.ndarray, "*shape"], empty: float = np.nan
) -> Float[np.ndarray, "*shape"]:
    out = np.full(above.shape, empty, dtype=np.result_type(above, np.float32))
    return np.divide(above, below, out=out, where=below > 0)


def has_role(family: Family, verdict: Verdict) -> Bool[np.ndarray, " C"]:
    """Which hypotheses of a family are found.

    A role is found if it is significant and clears its bar of lift and of points over the
    strongest null, on the held-out half and on the selection half.
    """
    bar, points = _bars(family)
    found = verdict.p < LEVEL
    for effect in (family.measures["chosen_half"], verdict.effect):
        gain = effect - verdict.baseline
        found &= (lift(effect, verdict.baseline) >= bar) & (gain >= points)
    return found


def is_promising(family: Family) -> Bool[np.ndarray, " C"]:
    """Which hypotheses clear half of their bars on the selection half, or have no query there."""
    if "chosen_baseline" not in family.measures:
        return np.ones(family.value.shape[1], dtype=bool)
    effect, baseline = family.measures["chosen_half"], family.measures["chosen_baseline"]
    bar, points = _bars(family)
    lifted = lift(effect, baseline)
    unpromising = (lifted < _PROMISING * bar) | (effect - baseline < _PROMISING * points)
    return ~unpromising


def why_not(family: Family, verdict: Verdict) -> list[str]:
    """Why each tested hypothesis is not found, in words; "" for the others."""
    found, promising, (bars, _) = has_role(family, verdict), is_promising(family), _bars(family)
    selected = family.measures["chosen_half"]
    screened = lift(selected, family.measures["chosen_baseline"])
    lifts = {"selection": lift(selected, verdict.baseline), "held-out": verdict.lift}
    tests = int((promising & ~np.isnan(verdict.p)).sum())
    reasons = [""] * len(found)
    for column in np.flatnonzero(~found & ~np.isnan(verdict.p)):
        bar, p = bars[column], verdict.p[column]
        below = [
            f"lift {each[column]:.2f} on the {half} half, {bar:g} needed"
            for half, each in lifts.items()
            if each[column] < bar
        ]
        if verdict.baseline[column] >= 1:
            below = ["its strongest baseline is always right"]
        reasons[column] = "; ".join([f"p = {p:.2g} among {tests} tested", *below])
        if not promising[column]:
            reasons[column] = (
                f"lift {screened[column]:.2f} on the selection half, {_PROMISING * bar:g} needed "
                f"for a test"
            )
    return reasons


def _bars(family: Family) -> tuple[Column, Column]:
    """The lift and the points over the strongest null that each hypothesis needs."""
    heads = family.value.shape[1] // max(1, len(family.roles))
    bars = np.array([[role.bar, role.points] for role in family.roles])
    return np.repeat(bars[:, 0], heads), np.repeat(bars[:, 1], heads)
