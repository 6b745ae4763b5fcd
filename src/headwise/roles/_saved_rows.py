"""The rows of a saved table of roles: columns of known types, whichever version wrote them."""

from typing import Any

import numpy as np
import pandas as pd

from headwise.roles._rows import NULLS, outcomes
from headwise.roles.effects import WITHOUT
from headwise.tables import Head, numbers_of, texts_of

_NUMBERS = ("effect", "baseline", "lift", "ci_low", "ci_high", "n", "texts", "p_adj")
_MEASURES = ("mass", "value", "chosen_half")
_LATER = ("smallest", "control", "null.set", "null.by class", "null.candidate")


def typed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a file in its order of columns; what an earlier version lacks is NaN.

    Raises:
        ValueError: a column is missing or holds something else.
    """
    frame.attrs.clear()
    for name in _LATER:
        if name not in frame:
            frame[name] = np.nan
    nulls = [f"null.{null}" for null in NULLS]
    effects = [name for name in map(str, frame) if name.startswith(WITHOUT)]
    numbers = dict.fromkeys([*_NUMBERS, *_MEASURES, *_LATER, *nulls, *effects])
    heads = [Head.parse(name) for name in texts_of(frame, "name")]
    columns: dict[str, Any] = {name: numbers_of(frame, name) for name in numbers}
    columns |= {name: texts_of(frame, name) for name in ("name", "stack", "role", "null")}
    columns |= {"layer": [head.layer for head in heads], "head": [head.head for head in heads]}
    columns |= {"found": numbers_of(frame, "found") == 1}
    if "outcome" not in frame:
        frame.insert(list(frame).index("found") + 1, "outcome", "")
        choice = np.zeros(len(frame), dtype=bool)
        columns["outcome"] = outcomes(columns["found"], columns["p_adj"], columns["texts"], choice)
    # Columns of later versions keep their places.
    return pd.DataFrame({name: columns.get(name, frame[name]) for name in map(str, frame)})
