"""Roles that heads won and lost, from two tables of roles."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from headwise.roles import Roles
from headwise.tables import Head

WON, LOST, KEPT, REMOVED = "won", "lost", "kept", "head removed"
_NUMBERS = ("effect", "ci_low", "ci_high", "p_adj")
COLUMNS = (
    "name", "stack", "layer", "head", "role", "change",
    *(f"{side}.{number}" for side in ("before", "after") for number in _NUMBERS),
)  # fmt: skip

Originals = Mapping[str, Head]
"""The address of each head in the original model, by its name in this one."""
_ByHead = dict[tuple[Head, str], dict[str, Any]]


def role_changes(
    before: Roles, after: Roles, originals: tuple[Originals, Originals]
) -> pd.DataFrame:
    """A row for each role that a head has before, after, or both: `COLUMNS`.

    A role is `lost` if it was tested and not found after, and `won` if it was tested and not
    found before. Where it was not tested, `change` gives the reason; `head removed` means that
    the model after does not have the head.
    """
    was, now = (_by_head(*side) for side in zip((before, after), originals, strict=True))
    left = set(originals[1].values())
    keys = {key for rows in (was, now) for key, row in rows.items() if row["found"]}
    records = []
    for head, role in sorted(keys):
        rows = was.get((head, role)), now.get((head, role))
        records.append(
            {
                "name": str(head),
                "stack": head.stack,
                "layer": head.layer,
                "head": head.head,
                "role": role,
                "change": REMOVED if head not in left else _change(*rows),
                **_numbers("before", rows[0]),
                **_numbers("after", rows[1]),
            }
        )
    return pd.DataFrame(records, columns=list(COLUMNS))


def _by_head(roles: Roles, originals: Originals) -> _ByHead:
    """The evidence for each role of each head; shapes, such as sinks, are left out."""
    tested = set(roles.outcomes()["role"])
    return {
        (originals[str(row["name"])], str(row["role"])): {str(k): v for k, v in row.items()}
        for row in roles.rows.to_dict("records")
        if row["role"] in tested and str(row["name"]) in originals
    }


def _change(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    for side, row in (("before", before), ("after", after)):
        if row is None:
            return f"not tested {side}"
        if str(row["outcome"]).startswith("not tested"):
            return f"{side}: {row['outcome']}"
    assert before is not None
    assert after is not None
    if before["found"] and after["found"]:
        return KEPT
    return WON if after["found"] else LOST


def _numbers(side: str, row: dict[str, Any] | None) -> dict[str, float]:
    return {
        f"{side}.{name}": float("nan") if row is None else float(row[name]) for name in _NUMBERS
    }
