"""From scores to a family of hypotheses: held-out sums of every head, role and null."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64

from headwise.roles.evaluation import (
    OFFSETS,
    RULES,
    DetailedScores,
    RoleScores,
    fit_tag_rules,
    heuristic_names,
)
from headwise.roles.relations import EVEN, Role
from headwise.roles.testing._evidence import Family, best_of
from headwise.roles.testing._trials import Split, Trial

NULLS = (
    *("chance", "offset", "class", "set", "by class", "candidate"),
    *("permuted", "random", "shuffled", "control"),
)
RULE = "rule."  # prefix of the measures of single rules among candidates
_NULL_NAMES = {
    "chance": "chance",
    "permuted": "a head with permuted weights",
    "random": "a head that learned nothing",
    "shuffled": "the same words in another order",
    "control": "the same positions without repetition",
}
_NULL_MODELS = ("permuted", "random")
_CLASSES = ("class", "set", "by class")
# Which nulls apply to each kind of role. An offset cannot be a null for an offset, nor a
# head for evenness, since small weights make attention even: its limit is used in place of chance.
_APPLICABLE = {
    "offset": ("chance", *_NULL_MODELS),
    "sink": ("chance", *_NULL_MODELS),
    "class": ("chance", "offset", *_NULL_MODELS),
    "breadth": ("chance",),
    "structure": ("chance", "offset", *_CLASSES, "candidate", "shuffled", *_NULL_MODELS),
    "probe": ("chance", "offset", "control", *_NULL_MODELS),
}


@dataclass(frozen=True)
class Baseline:
    """The best of some heuristics or null heads on each role, for each head to be compared.

    Attributes:
        selection_rate: Its score per query on the selection half.
        rates: Its score per query in each held-out text.
    """

    selection_rate: Float[np.ndarray, "R #N"]
    rates: Float[np.ndarray, "held R #N"]

    @classmethod
    def strongest(cls, baselines: Sequence["Baseline"]) -> "Baseline":
        """For each role and head, the baseline that scores best on the selection half."""
        selection = np.stack([baseline.selection_rate for baseline in baselines])
        rates = np.stack([baseline.rates for baseline in baselines])
        best = selection.argmax(0)[None]
        return cls(
            np.take_along_axis(selection, best, 0)[0],
            np.take_along_axis(rates, best[:, None], 0)[0],
        )


# A null, its name for each role, and what it scores.
NamedBaseline = tuple[str, list[str], Baseline]


def null_head_baseline(scores: RoleScores, split: Split) -> Baseline:
    """The best heads of a null model: each head is compared with those of as many queries.

    A layer with a sliding window has fewer eligible queries, and easier ones.
    """
    group = np.unique(scores.count.sum(0), axis=1, return_inverse=True)[1].ravel()
    members = [np.flatnonzero(group == number) for number in range(group.max() + 1)]
    best = [
        _best_on_selection(split, scores.value[..., heads], scores.count[..., heads[:1]])[1]
        for heads in members
    ]
    if len(best) == 1:
        return best[0]
    return Baseline(
        np.concatenate([best[number].selection_rate for number in group], axis=-1),
        np.concatenate([best[number].rates for number in group], axis=-1),
    )


def make_family(
    trial: Trial,
    scores: DetailedScores,
    *,
    contrast: RoleScores | None,
    null_heads: Mapping[str, Baseline],
) -> Family:
    """Compare every head with every null, on the held-out texts.

    Args:
        contrast: The scores of the same heads on the trial's contrast.
        null_heads: The best heads of null models, by the name of the null.
    """
    roles, split = trial.evaluator.roles, trial.split
    applies = np.array([scores.causal or not role.ahead for role in roles], dtype=np.float32)
    applies = applies[:, None]
    (selection_value, value), (selection_count, count) = (
        split.halves(sums * applies) for sums in (scores.value, scores.count)
    )
    # NaN until a null fills them in: sums on the held-out half, rates on the selection half.
    held = {name: np.full(value.shape, np.nan, np.float32) for name in NULLS}
    chosen = {name: np.full((1, *value.shape[1:]), np.nan) for name in NULLS}
    even, held["chance"] = split.halves(_chance(roles, scores) * applies)
    chosen["chance"][:] = _rate(even.sum(0), selection_count.sum(0))
    heuristics = [*_fixed_baselines(trial, scores), *_tag_baselines(trial, scores)]
    fitted = {null: baseline for null, _, baseline in heuristics} | dict(null_heads)
    for null, baseline in fitted.items():
        held[null] = baseline.rates * count
        chosen[null][:] = baseline.selection_rate
    if contrast is not None:
        name = trial.contrast_null
        held[name], chosen[name][:] = _contrast_sums(trial, contrast, count)
    null_names = _default_names(roles) | {null: names for null, names, _ in heuristics}
    held, chosen = (_where_applicable(nulls, roles) for nulls in (held, chosen))
    measures = {
        "chosen_half": _rate(_total(selection_value), _total(selection_count)),
        "chosen_baseline": _largest(list(chosen.values())),
    }
    measures |= _mass_measures(roles, scores, split, _total(count))
    measures |= _rule_measures(trial, scores, count)
    return Family(_flat(value), _flat(count), held, roles, null_names, measures)


def _default_names(roles: Sequence[Role]) -> dict[str, list[str]]:
    """The name of each null for each role, before any is fitted."""
    names = {name: [_NULL_NAMES.get(name, "")] * len(roles) for name in NULLS}
    limit = f"the limit of {EVEN}"
    return names | {"chance": [limit if role.kind == "breadth" else "chance" for role in roles]}


def _largest(rates: Sequence[Float[np.ndarray, "1 C"]]) -> Float[np.ndarray, " C"]:
    """The largest of some rates of each hypothesis; NaN where none is known."""
    largest = np.nan_to_num(np.concatenate(rates), nan=-np.inf).max(0)
    return np.where(np.isfinite(largest), largest, np.nan)


def _fixed_baselines(trial: Trial, scores: DetailedScores) -> Iterator[NamedBaseline]:
    """The offset, and the rule among candidates, that is best on the selection half."""
    names = [heuristic_names(role.grid) for role in trial.evaluator.roles]
    for null, columns in (
        ("offset", slice(len(OFFSETS))),
        ("candidate", slice(len(OFFSETS), None)),
    ):
        sums = scores.heuristics[..., columns]
        if sums.size:
            best, baseline = _best_on_selection(trial.split, sums, scores.heuristic_count)
            chosen = [
                "".join(role_names[columns][index : index + 1])
                for role_names, index in zip(names, best, strict=True)
            ]
            yield null, chosen, baseline


def _tag_baselines(trial: Trial, scores: DetailedScores) -> Iterator[NamedBaseline]:
    """The rules of parts of speech that are best on the selection half, on the other half."""
    rows, split, roles = scores.tag_rows, trial.split, trial.evaluator.roles
    if rows is None:
        return
    selected = split.selection[split.text_of_item[rows.item]]
    rules = fit_tag_rules(rows, selected, trial.evaluator.tags, len(roles))
    for null, rule in rules.items():
        sums = np.zeros(scores.heuristic_count.shape, np.float32)
        np.add.at(sums[..., 0], (rows.item, rows.role), rule.value)
        yield null, rule.names, _best_on_selection(split, sums, scores.heuristic_count)[1]


def _chance(roles: Sequence[Role], scores: DetailedScores) -> Float[np.ndarray, "P R N"]:
    """What even attention scores; for evenness itself, the limit above which it is diffuse."""
    breadth = np.array([role.kind == "breadth" for role in roles])[:, None]
    return np.where(breadth, np.float32(EVEN) * scores.count, scores.chance)


def _best_on_selection(
    split: Split, value: Float[np.ndarray, "P R K"], count: Float[np.ndarray, "P R 1"]
) -> tuple[Int64[np.ndarray, " R"], Baseline]:
    """Which of `K` candidates is best on the selection half, and its rates on the other."""
    (selection_value, held_value), (selection_count, held_count) = (
        split.halves(value),
        split.halves(count),
    )
    best = best_of(selection_value, selection_count[..., 0])
    index = best[None, :, None]
    rates = _rate(np.take_along_axis(held_value, index, -1), held_count)
    selected = np.take_along_axis(selection_value, index, -1).sum(0)
    selection_rate = _rate(selected, selection_count.sum(0))
    return best, Baseline(np.nan_to_num(selection_rate, nan=-1.0), np.nan_to_num(rates))


def _contrast_sums(
    trial: Trial, contrast: RoleScores, count: Float[np.ndarray, "held R N"]
) -> tuple[Float[np.ndarray, "held R N"], Float[np.ndarray, "R N"]]:
    """The contrast's rates times the queries, and its rates on the selection half.

    A text without a query has the overall rate.
    """
    assert trial.contrast is not None
    (selection_value, value), (selection_queries, queries) = (
        trial.split.halves(sums) for sums in (contrast.value, contrast.count)
    )
    mean = _rate(value.sum(0), queries.sum(0))
    rates = np.where(queries > 0, _rate(value, queries), mean)
    sums, selection = np.full_like(count, np.nan), np.full(count.shape[1:], np.nan)
    columns = [trial.evaluator.roles.index(role) for role in trial.contrast.roles]
    sums[:, columns] = np.nan_to_num(rates) * count[:, columns]
    selection[columns] = _rate(selection_value.sum(0), selection_queries.sum(0))
    return sums, selection


def _mass_measures(
    roles: Sequence[Role], scores: DetailedScores, split: Split, count: Float[np.ndarray, " C"]
) -> dict[str, Float[np.ndarray, " C"]]:
    """Mass and value-weighted mass per query, for roles with a relation."""
    relational = np.array([role.kind != "breadth" for role in roles])[:, None]
    shown = np.broadcast_to(relational, scores.value.shape[1:]).ravel()
    measures = {}
    for name, sums in (("mass", scores.mass), ("value", scores.value_mass)):
        held = _total(split.halves(sums)[1])
        measures[name] = np.where(shown, _rate(held, count), np.nan)
    return measures


def _rule_measures(
    trial: Trial, scores: DetailedScores, count: Float[np.ndarray, "held R N"]
) -> dict[str, Float[np.ndarray, " C"]]:
    """What each rule among candidates scores on the queries of each head; none without choices."""
    roles, heads = trial.evaluator.roles, count.shape[-1]
    chooses = np.repeat([role.score == "choice" for role in roles], heads)
    if not chooses.any():
        return {}
    value, queries = (
        trial.split.halves(sums)[1] for sums in (scores.heuristics, scores.heuristic_count)
    )
    rates = np.nan_to_num(_rate(value[..., len(OFFSETS) :], queries))
    return {
        f"{RULE}{name}": np.where(
            chooses, _rate(_total(rates[..., [column]] * count), _total(count)), np.nan
        )
        for column, name in enumerate(RULES)
    }


def _where_applicable(
    nulls: Mapping[str, Float[np.ndarray, "held R N"]], roles: Sequence[Role]
) -> dict[str, Float[np.ndarray, "held C"]]:
    """Put NaN where a null does not apply: mentions have no class, and others no candidates."""
    for name, sums in nulls.items():
        for column, role in enumerate(roles):
            elsewhere = _CLASSES if role.grid == "mention" else ("candidate",)
            if name not in _APPLICABLE[role.kind] or name in elsewhere:
                sums[:, column] = np.nan
    return {name: _flat(sums) for name, sums in nulls.items()}


def _flat(sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, "M C"]:
    return sums.reshape(len(sums), -1)


def _total(sums: Float[np.ndarray, "M R N"]) -> Float[np.ndarray, " C"]:
    return sums.sum(0, dtype=np.float64).ravel()


def _rate(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    below = np.broadcast_to(below, above.shape)
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
