"""The columns of a saved HeadTable."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from headwise.tables._totals import COLUMNS, TEXT_COLUMNS, TextSums, Totals
from headwise.tables.file import heads_of_rows, indices_of, numbers_of, originals_of_rows

SCHEMA = 1


def fields_of(frame: pd.DataFrame, about: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the table that a file holds."""
    # Tables of an earlier version do not have the key.
    keeps_texts = bool(about.get("per_text", False))

    def totals(name: str) -> Totals:
        columns = {part: numbers_of(frame, f"{name}.{part}") for part in COLUMNS}
        cells = {part: frame[f"{name}.{part}"].tolist() for part in TEXT_COLUMNS if keeps_texts}
        return Totals(**columns, per_text=TextSums.from_columns(cells) if keeps_texts else None)

    covered = [f"covered.{part}" for part in ("queries", "tokens") if f"covered.{part}" in frame]
    return {
        "heads": heads_of_rows(frame),
        "kv_heads": indices_of(frame, "kv_head"),
        "totals": {name: totals(name) for name in about["statistics"]},
        "covered": np.stack([numbers_of(frame, part) for part in covered]) if covered else None,
        "queries": str(about.get("queries", "eligible")),
        "model": str(about["model"]),
        "versions": dict(about["versions"]),
        "original": originals_of_rows(frame) if about.get("original", False) else (),
    }
