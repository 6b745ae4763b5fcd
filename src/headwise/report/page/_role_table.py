"""The roles of a study as the page shows them: those of each head, and the strongest of all."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise._display import counted
from headwise.report._study_data import StudyData
from headwise.report.page._visible_text import digits, probability, visible
from headwise.roles import (
    WITHOUT,
    Roles,
    by_nearness,
    group_line,
    rules_line,
    shape_line,
    shapes_summary,
    shown_outcomes,
)

COLUMNS = ("Head", "Role", "Effect", "Strongest null", "Lift", "p", "Held-out queries")
OUTCOME_COLUMNS = ("Role", "Outcome", "Nearest head", "Effect", "Strongest null", "Needed")
MAX_ROWS = 100  # of the table; each head's own panel shows all of its roles

# The most heads with their whole evidence on the page, unless the page is to be full.
_HEADS_WITH_EVIDENCE = 300
_LEVEL = 0.05  # of the adjusted p
# For example, a head that attends to another text.
_NOT_SEARCHED = "no role was looked for"

Payload = dict[str, Any]


def role_table(roles: Roles) -> Payload:
    """What the page says about all heads together, as text.

    `behaviors` were measured with heads ablated, `rows` are the roles that were found (the
    strongest first; `none` is said if there are none), `outcomes` what became of each role.
    """
    rows, effects = roles.found().to_dict("records"), roles.ablation_effects
    shapes = shapes_summary(roles.shapes())
    return {
        "behaviors": {visible(name): visible(text) for name, text in effects.says.items()},
        "columns": COLUMNS,
        "rows": [_row(roles, row) for row in rows[:MAX_ROWS]],
        "none": _sentence(roles.none_found()),
        "left_out": max(0, len(rows) - MAX_ROWS),
        "shapes": f"Apart from roles: {shapes}." if shapes else "",
        "groups": [visible(group_line(group)) for group in effects.groups],
        "notes": [visible(note) for note in roles.notes],
        "outcome_columns": OUTCOME_COLUMNS,
        "outcomes": [_outcome(row) for row in shown_outcomes(roles.outcomes()).to_dict("records")],
    }


def roles_of_heads(
    study: StudyData, order: Sequence[str], *, full: bool = False
) -> list[Payload] | None:
    """The roles and effects of each head; None if the study did not look for roles.

    Args:
        order: The names of all heads, those whose whole evidence comes first in front.
        full: Whether every head has its whole evidence as text.
    """
    if study.roles is None:
        return None
    roles, none = study.roles, study.roles.none_found_by_head()
    shapes = {row["name"]: shape_line(row) for row in roles.shapes().to_dict("records")}
    rows: dict[str, list[Payload]] = {}
    for row in roles.found().to_dict("records"):
        rows.setdefault(row["name"], []).append(_row(roles, row))
    nearest, effects = _nearest_roles(roles), _effects_of_heads(roles)
    why = roles.why_by_head(order if full else order[:_HEADS_WITH_EVIDENCE])
    return [
        {
            "none": _sentence(none.get(name, _NOT_SEARCHED)),
            "tested": name in nearest,
            "nearest": visible(nearest.get(name, "")),
            "rows": rows.get(name, []),
            "shape": visible(_capital(shapes.get(name, ""))),
            "groups": [
                visible(group_line(group))
                for group in roles.ablation_effects.groups
                if name in group.together.heads
            ],
            "effects": effects.get(name, []),
            "why": [visible(line) for line in why.get(name, "").split("\n")[1:]],
        }
        for name in map(str, study.table.heads)
    ]


def _nearest_roles(roles: Roles) -> dict[str, str]:
    """For each head, the role that was tested and came nearest without being found."""
    rows = roles.frame()
    is_role = rows["role"].isin(set(roles.outcomes()["role"]))  # and not a shape
    missed = rows[is_role & rows["p_adj"].notna() & (rows["outcome"] == "not found")]
    best = by_nearness(missed).drop_duplicates("name")
    return {
        row["name"]: (
            f"{row['role']}: {interval_text(row)}, against {digits(row['baseline'])} "
            f"of {row['null'] or 'no null'}"
        )
        for row in best.to_dict("records")
    }


def _effects_of_heads(roles: Roles) -> dict[str, list[Payload]]:
    """What ablating each head does to each behavior, with whether that is significant."""
    by_head: dict[str, list[Payload]] = {}
    for effect in roles.ablation_effects.alone:
        numbers = [effect.effect, effect.low, effect.high]
        by_head.setdefault(effect.heads[0], []).append(
            {
                "behavior": visible(effect.behavior),
                "meaning": visible(roles.ablation_effects.says[effect.behavior]),
                "values": [float(f"{number:.4g}") for number in numbers],
                "text": (
                    f"{effect.effect:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}], "
                    f"{counted(effect.texts, 'text')}"
                    + ("" if effect.p != effect.p else f", adjusted p {probability(effect.p)}")
                ),
                "significant": bool(effect.p < _LEVEL and (effect.low > 0 or effect.high < 0)),
            }
        )
    return by_head


def _sentence(text: str) -> str:
    return f"{_capital(text)}."


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def interval_text(row: Mapping[Any, Any], column: str = "effect") -> str:
    """A number of a row with its interval."""
    return f"{digits(row[column])} [{digits(row['ci_low'])}, {digits(row['ci_high'])}]"


def _row(roles: Roles, row: Mapping[Any, Any]) -> Payload:
    """A role of a head with its evidence, as text."""
    return {
        "head": visible(row["name"]),
        "role": visible(row["label"]),
        "meaning": visible(roles.meanings[row["role"]]),
        "effect": interval_text(row),
        "null": _null_text(row),
        "lift": f"{row['lift']:.2f}",
        "p": probability(row["p_adj"]),
        "half": digits(row["chosen_half"]),
        "n": f"{row['n']:,.0f} in {counted(int(row['texts']), 'text')}",
        "without": _without(row, roles.ablation_effects.says),
    }


def _outcome(row: Mapping[Any, Any]) -> Payload:
    """What became of a role, as text: with the head that has it or comes nearest."""
    outcome = f"{row['outcome']} ({counted(row['heads'], 'head')})"
    needed = row["smallest"]
    return {
        "role": visible(row["role"]),
        "outcome": visible(outcome if row["heads"] else row["outcome"]),
        "head": visible(row["nearest"]),
        "effect": interval_text(row),
        "null": _null_text(row),
        "needed": "–" if needed != needed else digits(needed),
    }


def _null_text(row: Mapping[Any, Any]) -> str:
    """The strongest null, and for a choice every rule that chooses among the candidates."""
    strongest = f"{digits(row['baseline'])} of {row['null'] or 'no null'}"
    rules = rules_line(row)
    return visible(f"{strongest} (candidates: {rules})" if rules else strongest)


def _without(row: Mapping[Any, Any], behaviors: Iterable[str]) -> list[str]:
    """How ablating the head changes the behaviors that depend on the role, where measured."""
    lines = []
    for behavior in behaviors:
        effect, low, high = (row[f"{WITHOUT}{behavior}{end}"] for end in ("", ".low", ".high"))
        if effect == effect:
            lines.append(visible(f"{behavior} {effect:+.3f} [{low:+.3f}, {high:+.3f}]"))
    return lines
