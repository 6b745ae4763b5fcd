"""The rows of the table of roles: the evidence of every test, its outcome, and labels.

A pattern of attention is labeled as a behavior only if the head has that effect.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from headwise._display import counted
from headwise.roles._effects import Effects
from headwise.roles.evidence import FEWEST_TEXTS, LEVEL, NULLS, POWER, RULE, Hypotheses, has_role
from headwise.roles.relations import NEXT_NAME, PREFIX_MATCHING, SAME
from headwise.roles.scores import RULES
from headwise.tables import Head, address_columns, rate

# What each rule among the candidates of a choice scores, by its name.
RULE_COLUMNS = {rule: f"{RULE}{rule}" for rule in RULES}
# Columns that are known only after the tests, or for some roles alone.
FURTHER = (
    *("stability", "short", "long", "copying", "copying.low", "copying.high"),
    *RULE_COLUMNS.values(),
)
FOUND, NOT_FOUND = "found", "not found"
# What counts as independent, and so how much there is of it: a text, or a group of texts.
TEXT, GROUP = "held-out text", "held-out group"
UNDECIDED = "not tested: no held-out text has both a right and a wrong candidate for it"
_CONTROL_SHARE = 0.1  # of the effect, the most that ablation may cost on the control
# The behavior that a pattern is named after, and the sign of the copying score that shows it.
BY_COPYING = {
    PREFIX_MATCHING.name: ("induction", 1.0),
    SAME.name: ("duplicate suppression", -1.0),
    NEXT_NAME: ("name moving", 1.0),
}
# No relation may take the name of a behavior: attention alone does not show one.
BEHAVIOR_LABELS = tuple(label for label, _ in BY_COPYING.values())
_THIRDS = 3  # of the texts, by their length


def length_measures(
    family: Hypotheses, lengths: Float[np.ndarray, " M"]
) -> dict[str, Float[np.ndarray, "R N"]]:
    """The attention on each sink in the shortest and in the longest third of the texts, `short` and
    `long`; NaN for other roles.

    Args:
        lengths: The tokens of each held-out text.
    """
    sinks = np.array([role.kind == "sink" for role in family.roles], dtype=bool)[:, None]
    order = np.argsort(lengths, kind="stable")
    third = len(order) // _THIRDS
    measures = {}
    for name, texts in (("short", order[:third]), ("long", order[len(order) - third :])):
        value, count = (x[texts].sum(0, dtype=np.float64) for x in (family.value, family.count))
        measures[name] = np.where(sinks, rate(value, count), np.nan)
    return measures


def tested_rows(
    heads: Sequence[Head], family: Hypotheses, tested: pd.DataFrame, unit: str
) -> pd.DataFrame:
    """A row per role and head, without the planted head that each role of the family has last.

    A role counts as not tested, in every head, if the planted head was not found, or if no effect
    is large enough to be found reliably. A smallest effect is left out where a larger one, or the
    planted head, was not found: it is an estimate, which the test contradicts.
    """
    R, N = len(family.roles), len(heads)
    rows = evidence_rows([*heads, Head("", 0, 0)], family, tested, unit)
    rows = rows.assign(split="held-out")[
        [
            *("name", "stack", "layer", "head", "role", "found", "outcome", "effect", "null"),
            *("baseline", "lift", "ci_low", "ci_high", "mass", "value", "n", "texts", "p_adj"),
            *("split", "chosen_half", *(name for name in FURTHER if name in family.measures)),
            *(f"null.{name}" for name in NULLS),
        ]
    ]
    rows["smallest"] = family.measures["smallest"].ravel()
    planted = rows.iloc[N :: N + 1]
    rows["control"] = np.repeat(planted["effect"].to_numpy(), N + 1)
    effects = family.measures["planted_effect"][:, N].tolist()
    reasons = [
        _out_of_reach(row, effect)
        for row, effect in zip(planted.to_dict("records"), effects, strict=True)
    ]
    reason = np.repeat(reasons, N + 1)
    unshown = (reason != "") & rows["p_adj"].notna().to_numpy()
    rows.loc[unshown, "found"] = False
    rows.loc[unshown, "outcome"] = reason[unshown]
    rows.loc[unshown, "p_adj"] = np.nan
    missed = (rows["outcome"] == NOT_FOUND) & (rows["effect"] >= rows["smallest"])
    rows["smallest"] = rows["smallest"].mask(missed | (reason != ""))
    kept = np.arange(R * (N + 1)) % (N + 1) < N
    return rows[kept].reset_index(drop=True)


def _out_of_reach(planted: Mapping[Any, Any], effect: float) -> str:
    """Why the test of a role could show nothing; empty if it could."""
    null = f"{planted['null']} scores {planted['baseline']:.2f}"
    if not effect <= 1:
        return f"not tested: {null}, too near 1 for a label"
    if not planted["found"]:
        return f"not tested: a planted head with {effect:.2f} was not found ({null})"
    if np.isnan(planted["smallest"]):
        return f"not tested: no score is labeled with a probability of {POWER:.0%} ({null})"
    return ""


def evidence_rows(
    heads: Sequence[Head], family: Hypotheses, tested: pd.DataFrame, unit: str
) -> pd.DataFrame:
    """The tests with the address of each head, its outcome, and all measures."""
    addresses = pd.concat([pd.DataFrame(address_columns(heads))] * len(family.roles))
    rows = tested.assign(
        **{str(name): column.to_numpy() for name, column in addresses.items()},
        role=family.for_each([role.name for role in family.roles]),
        found=has_role(family, tested),
        **{name: of_head.ravel() for name, of_head in family.measures.items()},
    )
    chooses = family.for_each([role.score == "choice" for role in family.roles])
    outcomes = zip(rows.to_dict("records"), chooses, strict=True)
    rows["outcome"] = [_outcome(row, bool(choice), unit) for row, choice in outcomes]
    return rows


def labels_of_rows(rows: pd.DataFrame, effects: Effects | None = None) -> list[str]:
    """The label of each row: "" unless found, its role, or the behavior that was shown as well.

    A behavior is shown by the copying score, if its whole interval has the right sign, or by
    ablation: it costs the behavior significantly and specifically. An effect is specific if it
    exceeds that on the behavior's control, and the control loses at most a tenth of it. For
    heads that back each other up, the effect of their group counts.
    """
    shown = {} if effects is None else _shown_by_ablation(effects)
    return [_label(row, shown) if row["found"] else "" for row in rows.to_dict("records")]


def _label(row: Mapping[Any, Any], shown: Mapping[tuple[str, str], str]) -> str:
    role = str(row["role"])
    if (row["name"], role) in shown:
        return shown[row["name"], role]
    label, sign = BY_COPYING.get(role, ("", 0.0))
    ends = [sign * row.get(f"copying.{end}", np.nan) for end in ("low", "high")]
    return label if label and min(ends) > 0 else role


def _shown_by_ablation(effects: Effects) -> dict[tuple[str, str], str]:
    """The label of each head and role whose behavior depends on the head, and specifically."""
    tried = [(effect, effect.p < LEVEL) for effect in effects.alone]
    tried += [(group.together, True) for group in effects.groups]
    shown: dict[tuple[str, str], str] = {}
    for effect, significant in tried:
        specific = effect.excess_low > 0 and effect.control <= _CONTROL_SHARE * effect.effect
        if significant and effect.low > 0 and specific:
            for role, label in effects.labels.get(effect.behavior, {}).items():
                shown |= dict.fromkeys(((name, role) for name in effect.heads), label)
    return shown


def _outcome(row: Mapping[Any, Any], choice: bool, unit: str) -> str:
    if row["p_adj"] != row["p_adj"]:
        return untested(int(row["texts"]), choice, unit)
    return FOUND if row["found"] else NOT_FOUND


def untested(texts: int, choice: bool, unit: str) -> str:
    """Why a role was not tested: how many held-out texts have a query for it.

    A text counts only if it has a query, so enough texts imply enough queries.

    Args:
        choice: Whether the role is a choice among candidates.
        unit: What counts as a text: `TEXT` or `GROUP`.
    """
    if not texts:
        return UNDECIDED if choice else "not tested: no held-out text has a query for it"
    return f"not tested: {counted(texts, unit)}, {FEWEST_TEXTS} needed"
