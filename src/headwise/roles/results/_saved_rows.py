"""The columns and the metadata of a saved table of roles."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from headwise.roles.effects import WITHOUT, Effects
from headwise.roles.results._rows import FURTHER
from headwise.roles.testing import NULLS
from headwise.tables import Head, numbers_of, texts_of

SCHEMA = 2
_NUMBERS = ("effect", "baseline", "lift", "ci_low", "ci_high", "n", "texts", "p_adj")
_MEASURES = ("mass", "value", "chosen_half", "smallest", "control")
_TEXTS = ("name", "stack", "role", "label", "outcome", "null")


def metadata_of(roles: Any) -> dict[str, Any]:
    """All that a file holds of `Roles` beside its rows; `fields_of` reads it."""
    return {
        "headwise_roles": SCHEMA,
        "meanings": dict(roles.meanings),
        "notes": list(roles.notes),
        "texts": {name: [list(row) for row in rows] for name, rows in roles.texts.items()},
        "model": roles.model,
        "versions": dict(roles.versions),
        "effects": roles.ablation_effects.to_json(),
    }


def fields_of(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the roles that a file holds.

    Raises:
        ValueError: a column is missing or holds something else, or a role has no description.
    """
    rows = _typed_rows(frame)
    meanings = {role: str(metadata["meanings"][role]) for role in metadata["meanings"]}
    unknown = sorted(set(rows["role"]) - meanings.keys())
    if unknown:
        raise ValueError(f"the role {unknown[0]!r} has no description")
    return {
        "rows": rows,
        "meanings": meanings,
        "notes": tuple(map(str, metadata["notes"])),
        "texts": {
            name: [(str(text), float(score), int(n)) for text, score, n in rows]
            for name, rows in metadata["texts"].items()
        },
        "model": str(metadata["model"]),
        "versions": dict(metadata["versions"]),
        "ablation_effects": Effects.from_json(metadata["effects"]),
    }


def _typed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a file in its order of columns."""
    frame.attrs.clear()
    nulls = [f"null.{null}" for null in NULLS]
    further = [name for name in FURTHER if name in frame]
    effects = [name for name in map(str, frame) if name.startswith(WITHOUT)]
    numbers = [*_NUMBERS, *_MEASURES, *nulls, *further, *effects]
    heads = [Head.parse(name) for name in texts_of(frame, "name")]
    columns: dict[str, Any] = {name: numbers_of(frame, name) for name in numbers}
    texts = [name for name in (*_TEXTS, "original") if name in _TEXTS or name in frame]
    columns |= {name: texts_of(frame, name) for name in texts}
    columns |= {"layer": [head.layer for head in heads], "head": [head.head for head in heads]}
    columns |= {"found": numbers_of(frame, "found") == 1}
    return pd.DataFrame({name: columns.get(name, frame[name]) for name in map(str, frame)})
