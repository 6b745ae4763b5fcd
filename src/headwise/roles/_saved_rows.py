"""The rows of a saved table of roles, checked, with what older versions did not save."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from headwise.roles._rows import FURTHER, NULLS, outcomes
from headwise.roles.effects import WITHOUT, Effects, labels_of_rows
from headwise.tables import Head, numbers_of, texts_of


def rows_of_file(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> tuple[pd.DataFrame, Effects]:
    """The rows and the ablation effects of a file.

    Raises:
        ValueError: a role has no description.
    """
    frame.attrs.clear()
    numbers = ["effect", "baseline", "lift", "ci_low", "ci_high", "n", "texts", "p_adj"]
    numbers += ["mass", "value", "chosen_half", *(f"null.{null}" for null in NULLS)]
    numbers += [name for name in FURTHER if name in frame]
    numbers += [name for name in map(str, frame) if name.startswith(WITHOUT)]
    heads = [Head.parse(name) for name in texts_of(frame, "name")]
    columns: dict[str, Any] = {name: numbers_of(frame, name) for name in numbers}
    columns |= {name: texts_of(frame, name) for name in ("name", "stack", "role", "null")}
    columns |= {"layer": [head.layer for head in heads], "head": [head.head for head in heads]}
    columns |= {"found": numbers_of(frame, "found") == 1}
    if "outcome" not in frame:  # saved by a version without this column
        frame.insert(list(frame).index("found") + 1, "outcome", "")
        columns["outcome"] = outcomes(*(columns[name] for name in ("found", "p_adj", "texts")))
    effects = Effects.from_json(metadata["effects"])
    if "label" not in frame:
        frame["label"] = labels_of_rows(frame.assign(found=columns["found"]), effects)
    columns["label"] = texts_of(frame, "label")
    unknown = sorted(set(columns["role"]) - set(metadata["meanings"]))
    if unknown:
        raise ValueError(f"the role {unknown[0]!r} has no description")
    # Keep the order of the file, so that columns of later versions keep their places.
    return pd.DataFrame({name: columns.get(name, frame[name]) for name in map(str, frame)}), effects
