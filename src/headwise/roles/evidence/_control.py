"""What a test could have shown: a planted head for each role, and the smallest effect it finds.

The positive control is a head that attends to the true pairs of a role, diluted with uniform
attention. It joins the family as one more head, so that it meets the same nulls, tests and bars.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from headwise._extras import require
from headwise.roles._samples import Split
from headwise.roles.evidence._hypotheses import (
    BINARY,
    FEWEST_INSTANCES,
    FEWEST_TEXTS,
    LEVEL,
    Hypotheses,
)
from headwise.roles.relations import Role
from headwise.roles.scores import RoleScores
from headwise.tables import rate

POWER = 0.8  # the probability with which the smallest effect is labeled
_CONTRASTS = ("shuffled", "control")  # without the relation, so planted heads are uniform
_STEPS = 401  # effects that are tried
_INFORMATIVE = (0.05, 0.95)  # effects from which the variation between texts is estimated
_QUANTILE = 0.75  # of that variation over heads
_TINY = 1e-9  # a deviation of 0

PerRole = Float[np.ndarray, " R"]
RolesPerText = Float[np.ndarray, "M R"]


def plant(
    family: Hypotheses, scores: RoleScores, split: Split, *, tests: int, seed: int = 0
) -> Hypotheses:
    """Add a planted head for each role of a family, and compute the smallest effects.

    The lift of the planted head is halfway between the least that the bars of the role allow
    and 1. A score that counts queries is diluted by drawing the queries that follow the
    relation; the others get what uniform attention scores.

    Args:
        scores: Its last head is the planted one, not diluted yet.
        tests: The number of hypotheses that p is adjusted for.
        seed: The seed of the queries that are drawn.
    Returns:
        The family with the planted head of each role after its other heads, and two further
        measures: `planted_effect`, the score that the planted head of each role is expected to
        have, above 1 if none can be high enough; and `smallest`, the smallest effect that a head is
        labeled for with probability `POWER`, NaN where no effect up to 1 is. A head that scores
        higher than the planted one without the relation needs more than it.
    """
    R = len(family.roles)
    known = family.count.sum((0, 2)) > 0  # no head can have some roles
    full, uniform, count = (
        split.halves(part[..., -1] * known) for part in (scores.value, scores.uniform, scores.count)
    )
    selected = count[0].sum(0)
    nulls = _nulls(family, uniform[1], count[1])
    stacked = np.stack(list(nulls.values()))
    rates = _rate(stacked.sum(1), count[1].sum(0))
    strongest = np.nan_to_num(rates, nan=-1.0).argmax(0)
    baseline = rates[strongest, np.arange(R)]
    effect = _above(baseline, (1 + least_lift(family.roles, baseline)) / 2)
    rng = np.random.default_rng([seed, R])
    value, chosen = (
        _diluted(family.roles, full[half], uniform[half], count[half], effect, rng)
        for half in (1, 0)
    )
    null = stacked[strongest, :, np.arange(R)].T
    of_planted = {name: np.full(R, np.nan) for name in family.measures}
    of_planted["chosen_half"] = _rate(chosen.sum(0), selected)
    given = family.roles, _variation(family), selected, tests
    smallest = _smallest_effect(*given, baseline, null, count[1])
    columns = []
    for head in range(family.value.shape[2]):
        null, own = _strongest_null(family, head)
        stricter = own > baseline + _TINY
        needed = smallest
        if stricter.any():
            needed = _smallest_effect(*given, own, null, family.count[..., head])
        columns.append(np.where(stricter, needed, smallest))
    planted = replace(
        family,
        value=_with(family.value, value),
        count=_with(family.count, count[1]),
        nulls={name: _with(sums, nulls[name]) for name, sums in family.nulls.items()},
        measures={name: _with(of, of_planted[name]) for name, of in family.measures.items()},
    )
    planted.measures["planted_effect"] = np.repeat(effect[:, None], planted.value.shape[2], 1)
    planted.measures["smallest"] = np.stack([*columns, smallest], 1)
    return planted


def _strongest_null(family: Hypotheses, head: int) -> tuple[RolesPerText, PerRole]:
    """The sums of a head's own strongest null for each role, and its score."""
    sums = np.stack([of[..., head] for of in family.nulls.values()]).astype(np.float64)
    rates = np.nan_to_num(_rate(sums.sum(1), family.count[..., head].sum(0)), nan=-1.0)
    best = rates.argmax(0)
    own: RolesPerText = np.nan_to_num(np.take_along_axis(sums, best[None, None], 0)[0])
    return own, rates.max(0)


def least_lift(roles: Sequence[Role], baseline: PerRole) -> PerRole:
    """The least lift that the bars of each role allow above a baseline."""
    bar = np.array([role.bar for role in roles])
    needed = rate(np.array([role.points for role in roles]), 1 - baseline, np.inf)
    return np.where(baseline < 1, np.maximum(bar, needed), np.inf)


def _above(baseline: PerRole, lift: PerRole) -> PerRole:
    """The effect with this lift; infinite for an infinite one, even above a baseline of 1."""
    return baseline + lift * np.where(np.isfinite(lift), 1 - baseline, 1.0)


def _diluted(
    roles: Sequence[Role],
    full: RolesPerText,
    uniform: RolesPerText,
    count: RolesPerText,
    effect: PerRole,
    rng: np.random.Generator,
) -> RolesPerText:
    """The sums of a planted head that is diluted to about this effect."""
    of_full, of_uniform = (_rate(sums.sum(0), count.sum(0)) for sums in (full, uniform))
    share = np.divide(
        effect - of_uniform,
        of_full - of_uniform,
        out=np.ones(len(roles)),
        where=of_full > of_uniform,
    )
    share = np.clip(np.nan_to_num(share, nan=1.0), 0.0, 1.0)
    followed = share * count
    binary = [column for column, role in enumerate(roles) if role.score in BINARY]
    queries = count[:, binary].round().astype(int)
    followed[:, binary] = rng.binomial(queries, share[binary])
    part = rate(followed, count, 0.0)
    return part * full + (1 - part) * uniform


def _nulls(
    family: Hypotheses, uniform: RolesPerText, count: RolesPerText
) -> dict[str, RolesPerText]:
    """The sums of the nulls over the queries of the planted head.

    They are those of the head with the most queries. Where a contrast applies, the planted head
    attends uniformly.
    """
    widest = family.count.sum(0).argmax(-1)[None, :, None]
    queries = np.take_along_axis(family.count, widest, -1)[..., 0]
    nulls = {}
    for name, sums in family.nulls.items():
        own = np.take_along_axis(sums, widest, -1)[..., 0]
        if name in _CONTRASTS:
            nulls[name] = np.where(np.isnan(own), np.nan, uniform)
        else:
            nulls[name] = np.where(queries > 0, _rate(own, queries), own) * count
    return nulls


def _smallest_effect(
    roles: Sequence[Role],
    variation: PerRole,
    selection: PerRole,
    tests: int,
    baseline: PerRole,
    null: RolesPerText,
    held: RolesPerText,
) -> PerRole:
    """The smallest effect that is labeled with probability `POWER`, in the normal approximation.

    Texts and nulls are as observed. The score on either half varies with
    `variation · effect · (1 − effect) / queries`. A label needs the bars on both halves, and
    Student's t of the difference above the critical value of a Bonferroni correction, which is
    stricter than the test; the deviation of that t includes that of the null over texts.

    Args:
        variation: How much more scores vary over texts than independent queries would.
        selection: The number of queries on the selection half.
        null: The sums of the strongest null over held-out texts.
        held: The number of queries of the head in held-out texts.
    """
    stats = require("scipy.stats", "hf", "find_roles")
    effect = np.linspace(0, 1, _STEPS)[:, None]  # E 1
    n, texts = held.sum(0), (held > 0).sum(0)
    is_tested = (texts >= FEWEST_TEXTS) & (n >= FEWEST_INSTANCES)
    n, texts = np.maximum(n, 1), np.maximum(texts, 2)
    bar = _above(baseline, least_lift(roles, baseline))
    spread = variation * effect * (1 - effect)
    of_null = np.square(null - baseline * held).sum(0) / n**2
    critical = stats.t.isf(LEVEL / max(1, tests), texts - 1)
    needed = np.maximum(bar, baseline + critical * np.sqrt(spread / n + of_null))
    on_held, on_selection = (
        stats.norm.cdf((effect - least) / (np.sqrt(spread / np.maximum(queries, 1)) + _TINY))
        for least, queries in ((needed, n), (bar, selection))
    )
    enough = (on_held * on_selection >= POWER) & (effect > baseline) & is_tested
    return np.where(enough.any(0), effect[enough.argmax(0), 0], np.nan)


def _variation(family: Hypotheses) -> PerRole:
    """How much more the scores of heads vary over held-out texts than independent queries would.

    A score that counts queries is never taken to vary less than they would.
    """
    value, count = (sums.astype(np.float64) for sums in (family.value, family.count))
    effect = rate(value.sum(0), count.sum(0))
    observed = np.square(value - effect * count).sum(0)
    ratio = rate(observed, count.sum(0) * effect * (1 - effect))
    low, high = _INFORMATIVE
    ratio[~((effect > low) & (effect < high))] = np.nan
    columns = [column[np.isfinite(column)] for column in ratio]
    estimates = [np.quantile(column, _QUANTILE) if len(column) else 1.0 for column in columns]
    least = [1.0 if role.score in BINARY else 0.0 for role in family.roles]
    return np.maximum(estimates, least)


def _with(
    sums: Float[np.ndarray, "*M R N"], planted: Float[np.ndarray, "*M R"]
) -> Float[np.ndarray, "*M R _"]:
    """The sums of all heads, with those of one more head for each role."""
    return np.concatenate([sums, planted[..., None]], -1)


def _rate(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return rate(above.astype(np.float64), below)
