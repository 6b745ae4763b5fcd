"""The roles of a study as the page shows them: for each head its own, and the strongest of all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise._display import counted
from headwise.report._study import Study
from headwise.report._visible_text import visible
from headwise.roles import Roles
from headwise.roles.effects import WITHOUT, group_line

COLUMNS = ("Head", "Role", "Effect", "Strongest null", "Lift", "p", "Held-out queries")
MOST = 100  # rows of the table; every head shows its own besides

# Of a head that attends to another text, say.
_UNASKED = "no role was looked for"

Payload = dict[str, Any]


@dataclass(frozen=True)
class RoleTable:
    """What the page says of all heads together.

    Attributes:
        behaviours: What was tried without heads, by name and what its number is.
        rows: The roles that heads have, the strongest first.
        none: What to say where there are none.
        left_out: How many more there are.
        groups: Heads that back each other up, a sentence each.
        notes: How the numbers came about.
    """

    behaviours: dict[str, str]
    rows: list[Payload]
    none: str
    left_out: int
    groups: list[str]
    notes: list[str]
    columns: tuple[str, ...] = COLUMNS


def role_table(roles: Roles) -> RoleTable:
    """The table of all roles found, ready to be printed."""
    rows = roles.found().to_dict("records")
    says = {visible(name): visible(text) for name, text in roles.ablation_effects.says.items()}
    return RoleTable(
        behaviours=says,
        rows=[_row(roles, row) for row in rows[:MOST]],
        none=_sentence(roles.none_found()),
        left_out=max(0, len(rows) - MOST),
        groups=[visible(group_line(group)) for group in roles.ablation_effects.groups],
        notes=[visible(note) for note in roles.notes],
    )


def roles_of_heads(study: Study) -> list[Payload] | None:
    """For each head its roles and what was lost without it; None where none were looked for."""
    if study.roles is None:
        return None
    roles, looked = study.roles, set(study.roles.rows["name"])
    rows: dict[str, list[Payload]] = {}
    for row in roles.found().to_dict("records"):
        rows.setdefault(row["name"], []).append(_row(roles, row))
    return [
        {
            "none": _sentence(roles.none_found(name) if name in looked else _UNASKED),
            "rows": rows.get(name, []),
            "lines": [visible(line) for line in roles.ablation_effects.lines(name)],
        }
        for name in map(str, study.table.heads)
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _row(roles: Roles, row: Mapping[Any, Any]) -> Payload:
    """A role of a head in words: what a reader needs to judge it."""
    return {
        "head": visible(row["name"]),
        "role": visible(row["role"]),
        "says": visible(roles.meanings[row["role"]]),
        "effect": f"{row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]",
        "null": visible(f"{row['baseline']:.3f} of {row['null']}"),
        "lift": f"{row['lift']:.2f}",
        "p": f"{row['p_adj']:.2g}",
        "n": f"{row['n']:,.0f} in {counted(int(row['texts']), 'text')}",
        "without": [lost for name in roles.ablation_effects.says for lost in _without(row, name)],
    }


def _without(row: Mapping[Any, Any], behaviour: str) -> list[str]:
    """What a behaviour that goes with the role loses without the head, where it was tried."""
    effect, low, high = (row[f"{WITHOUT}{behaviour}{end}"] for end in ("", ".low", ".high"))
    if effect != effect:
        return []
    return [visible(f"{behaviour} {effect:+.3f} [{low:+.3f}, {high:+.3f}]")]
