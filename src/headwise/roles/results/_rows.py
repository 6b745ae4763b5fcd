"""The rows of the table of roles: the evidence of every test, its outcome, and labels.

A pattern of attention is labelled as a behaviour only if the head has that effect.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from headwise._display import printable
from headwise.roles.effects import Effects
from headwise.roles.testing import (
    FEWEST_TEXTS,
    LEVEL,
    NULLS,
    POWER,
    Family,
    Verdict,
    has_role,
)
from headwise.tables import Head

# Columns that are known only after the tests.
FURTHER = (
    *("stability", "short", "long", "by_length", "by_length.low", "by_length.high"),
    *("copying", "copying.low", "copying.high"),
)
FOUND, NOT_FOUND = "found", "not found"
# A text counts only if it has a query, so enough texts imply enough queries.
_NEEDED = f"{FEWEST_TEXTS} needed"
_UNDECIDED = "not tested: no held-out text has both a right and a wrong candidate for it"
_UNREACHABLE = "not tested: these texts could not have shown it"
_CONTROL_SHARE = 0.1  # of the effect, the most that ablation may cost on the control
# The behaviour that a pattern is named after, and the sign of the copying score that shows it.
_BY_COPYING = {"prefix matching": ("induction", 1.0), "same token": ("duplicate suppression", -1.0)}
# A role, whether it was tested, the held-out texts with a query for it, and its outcome.
_Row = tuple[str, bool, float, str]
# No relation may take the name of a behaviour: attention alone does not show one.
BEHAVIOUR_LABELS = tuple(label for label, _ in _BY_COPYING.values())


def tested_rows(heads: Sequence[Head], family: Family, verdict: Verdict) -> pd.DataFrame:
    """A row per role and head, without the planted head that each role of the family has last.

    A role counts as not tested, in every head, if the planted head was not found, or if no effect
    is large enough to be found reliably.
    """
    R, N = len(family.roles), len(heads)
    rows = role_rows([*heads, Head("", 0, 0)], family, verdict)
    rows["smallest"] = family.measures["smallest"]
    planted = rows.iloc[N :: N + 1]
    rows["control"] = np.repeat(planted["effect"].to_numpy(), N + 1)
    effects = family.measures["planted_effect"][N :: N + 1].tolist()
    reasons = [
        _out_of_reach(row, effect)
        for row, effect in zip(planted.to_dict("records"), effects, strict=True)
    ]
    reason = np.repeat(reasons, N + 1)
    unshown = (reason != "") & rows["p_adj"].notna().to_numpy()
    rows.loc[unshown, "found"] = False
    rows.loc[unshown, "outcome"] = reason[unshown]
    rows.loc[unshown, "p_adj"] = np.nan
    kept = np.arange(R * (N + 1)) % (N + 1) < N
    return rows[kept].reset_index(drop=True)


def _out_of_reach(planted: Mapping[Any, Any], effect: float) -> str:
    """Why the test of a role could show nothing; empty if it could."""
    null = f"{planted['null']} scores {planted['baseline']:.2f}"
    if not effect <= 1:
        return f"not tested: {null}, and no score is as far above it as a label needs"
    if not planted["found"]:
        return f"not tested: a planted head with {effect:.2f} was not found ({null})"
    if np.isnan(planted["smallest"]):
        return f"not tested: no score is labelled with a probability of {POWER:.0%} ({null})"
    return ""


def role_rows(heads: Sequence[Head], family: Family, verdict: Verdict) -> pd.DataFrame:
    """A row per role and head."""
    R, N = len(family.roles), len(heads)
    found = has_role(family, verdict)
    null_names = np.array([family.null_names[name] for name in NULLS])  # nulls x roles
    null = [
        null_names[row, column // N] if row >= 0 else ""
        for column, row in enumerate(verdict.null.tolist())
    ]
    choice = np.repeat([role.score == "choice" for role in family.roles], N)
    columns: dict[str, Any] = {
        "name": [str(head) for head in heads] * R,
        "stack": [head.stack for head in heads] * R,
        "layer": [head.layer for head in heads] * R,
        "head": [head.head for head in heads] * R,
        "role": np.repeat([role.name for role in family.roles], N),
        "found": found,
        "outcome": outcomes(found, verdict.p, verdict.texts, choice),
        "effect": verdict.effect,
        "null": null,
        "baseline": verdict.baseline,
        "lift": verdict.lift,
        "ci_low": verdict.low,
        "ci_high": verdict.high,
        "mass": family.measures["mass"],
        "value": family.measures["value"],
        "n": verdict.n,
        "texts": verdict.texts,
        "p_adj": verdict.p,
        "split": "held-out",
        "chosen_half": family.measures["chosen_half"],
    }
    columns |= {name: family.measures[name] for name in FURTHER if name in family.measures}
    columns |= {f"null.{name}": rates for name, rates in zip(NULLS, verdict.rates, strict=True)}
    return pd.DataFrame(columns)


def labels_of_rows(rows: pd.DataFrame, effects: Effects | None = None) -> list[str]:
    """The label of each row: "" unless found, its role, or the behaviour that was shown as well.

    A behaviour is shown by the copying score, if its whole interval has the right sign, or by
    ablation: it costs the behaviour significantly and specifically. An effect is specific if it
    exceeds that on the behaviour's control, and the control loses at most a tenth of it. For
    heads that back each other up, the effect of their group counts.
    """
    shown = {} if effects is None else _shown_by_ablation(effects)
    return [_label(row, shown) if row["found"] else "" for row in rows.to_dict("records")]


def _label(row: Mapping[Any, Any], shown: Mapping[tuple[str, str], str]) -> str:
    role = str(row["role"])
    if (row["name"], role) in shown:
        return shown[row["name"], role]
    label, sign = _BY_COPYING.get(role, ("", 0.0))
    ends = [sign * row.get(f"copying.{end}", np.nan) for end in ("low", "high")]
    return label if label and min(ends) > 0 else role


def _shown_by_ablation(effects: Effects) -> dict[tuple[str, str], str]:
    """The label of each head and role whose behaviour depends on the head, and specifically."""
    tried = [(effect, effect.p < LEVEL) for effect in effects.alone]
    tried += [(group.together, True) for group in effects.groups]
    shown: dict[tuple[str, str], str] = {}
    for effect, significant in tried:
        specific = effect.excess_low > 0 and effect.control <= _CONTROL_SHARE * effect.effect
        if significant and effect.low > 0 and specific:
            for role, label in effects.labels.get(effect.behaviour, {}).items():
                shown |= dict.fromkeys(((name, role) for name in effect.heads), label)
    return shown


def outcomes(
    found: Bool[np.ndarray, " C"],
    p: Float[np.ndarray, " C"],
    texts: Float[np.ndarray, " C"],
    choice: Bool[np.ndarray, " C"],
) -> list[str]:
    """The outcome of each row: `found`, `not found`, or `not tested: ` and what is missing.

    Args:
        p: The adjusted p; NaN where nothing was tested.
        texts: Held-out texts with at least one query for the role.
        choice: Whether the role is a choice among candidates.
    """
    return [
        untested(int(count), bool(chooses)) if np.isnan(level) else FOUND if has_role else NOT_FOUND
        for has_role, level, count, chooses in zip(found, p, texts, choice, strict=True)
    ]


def untested(texts: int, choice: bool = False) -> str:
    """Why a role was not tested: how many held-out texts have a query for it."""
    if not texts and choice:
        return _UNDECIDED
    if not texts:
        return "not tested: no held-out text has a query for it"
    return f"not tested: {texts} held-out text{'' if texts == 1 else 's'}, {_NEEDED}"


def none_found(rows: pd.DataFrame) -> str:
    """Describe heads without a found role: none was found, or none was tested.

    Roles for which no text has a query are not mentioned.
    """
    return _none_found(zip(*_columns(rows), strict=True))


def none_found_by_head(rows: pd.DataFrame) -> dict[str, str]:
    """`none_found` for each head, in one pass over the rows."""
    by_head: dict[str, list[_Row]] = {}
    for name, row in zip(rows["name"], zip(*_columns(rows), strict=True), strict=True):
        by_head.setdefault(name, []).append(row)
    return {name: _none_found(rows) for name, rows in by_head.items()}


def _columns(rows: pd.DataFrame) -> tuple[pd.Series, ...]:
    return rows["role"], rows["p_adj"].notna(), rows["texts"], rows["outcome"]


def _none_found(rows: Iterable[_Row]) -> str:
    tested: dict[str, bool] = {}
    texts: dict[str, int] = {}
    outcomes: dict[str, str] = {}
    for role, was_tested, count, outcome in rows:
        tested[role] = tested.get(role, False) or was_tested
        texts[role] = max(texts.get(role, 0), int(count))
        outcomes[role] = outcome
    undecided = [role for role in texts if not texts[role] and is_undecided(outcomes[role])]
    few = [count for role, count in texts.items() if count and not tested[role]]
    short = [count for count in few if count < FEWEST_TEXTS]
    beyond = len(few) - len(short)
    if not any(tested.values()):
        return _UNREACHABLE if beyond else untested(max(texts.values(), default=0), bool(undecided))
    if not few and not undecided:
        return "no role found"
    line = f"no role found among {sum(tested.values())} tested"
    if short:
        line += f"; {len(short)} {untested(max(short)).replace(': ', ': at most ')}"
    line = f"{line}; {beyond} {_UNREACHABLE}" if beyond else line
    return f"{line}; {len(undecided)} {_UNDECIDED.removesuffix(' for it')}" if undecided else line


def is_undecided(outcome: str) -> bool:
    """Whether a choice was not tested because every candidate is right, or every one wrong."""
    return outcome == _UNDECIDED


def shown_outcomes(outcomes: pd.DataFrame) -> pd.DataFrame:
    """The outcomes to show: of roles with a query, and of choices that no text can decide."""
    return outcomes[(outcomes["n"] > 0) | outcomes["outcome"].map(is_undecided)]


def shortfall(row: Mapping[Any, Any]) -> str:
    """Why a head does not have a role: its score, the strongest null and the test."""
    null = printable(row["null"] or "no null")
    scores = f"{row['effect']:.3f} against {row['baseline']:.3f} of {null}"
    if row["effect"] != row["effect"]:
        return printable(row["outcome"])
    if row["p_adj"] != row["p_adj"]:
        return f"{scores}, {printable(row['outcome'])}"
    could = "" if row["smallest"] != row["smallest"] else f"; {row['smallest']:.3f} needed"
    return (
        f"{scores}, lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}, "
        f"{row['chosen_half']:.3f} on the other half{could}"
    )


def outcomes_by_role(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per role: its outcome over all heads, and the head that comes nearest to a label."""
    return pd.DataFrame(
        [_role_outcome(str(role), of) for role, of in rows.groupby("role", sort=False)]
    )


def _role_outcome(role: str, rows: pd.DataFrame) -> dict[str, Any]:
    having = rows[rows["found"]]
    tested = rows[rows["outcome"].isin((FOUND, NOT_FOUND))]
    shown = by_nearness(having if len(having) else tested if len(tested) else rows).iloc[0]
    outcome = FOUND if len(having) else NOT_FOUND if len(tested) else str(shown["outcome"])
    names = ("effect", "ci_low", "ci_high", "null", "baseline", "lift", "smallest", "control", "n")
    return (
        {"role": role, "outcome": outcome, "heads": len(having), "nearest": shown["name"]}
        | {name: shown[name] for name in names}
        | {"texts": shown["texts"]}
    )


def by_nearness(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows from the one that comes nearest to a label down.

    A null that is always right leaves no lift: its heads are ordered by their distance to it.
    """
    nearness = rows["lift"].fillna(rows["effect"] - rows["baseline"])
    keys = rows.assign(nearness=nearness)[["nearness", "effect"]]
    order = keys.sort_values(["nearness", "effect"], ascending=False, kind="stable").index
    return rows.loc[order]


def example_rows(
    name: str, found: pd.DataFrame, texts: Mapping[str, Sequence[tuple[str, float, int]]]
) -> pd.DataFrame:
    """The texts that show the roles of a head most and least: role, score, queries, text."""
    rows = [
        (role, score, n, text)
        for role in found.loc[found["name"] == name, "role"]
        for text, score, n in texts.get(f"{name} {role}", ())
    ]
    return pd.DataFrame(rows, columns=["role", "score", "queries", "text"])


def heads_with(found: pd.DataFrame, role: str) -> list[Head]:
    """The heads that have a role, from the largest lift down."""
    return [Head.parse(name) for name in found.loc[found["role"] == role, "name"]]


def strongest_by_head(found: pd.DataFrame) -> dict[Head, tuple[str, float]]:
    """The strongest role of each head that has one, with its lift."""
    rows = found.drop_duplicates("name").to_dict("records")
    return {Head.parse(row["name"]): (row["role"], row["lift"]) for row in rows}
