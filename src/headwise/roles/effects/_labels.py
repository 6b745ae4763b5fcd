"""Labels: a pattern of attention is named after a behaviour only if the head has that effect."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from headwise.roles.effects._effects import Effects

LEVEL = 0.05  # of an effect's adjusted p
_CONTROL_SHARE = 0.1  # of the effect, the most that ablation may cost on the control
# The behaviour that a pattern is named after, and the sign of the copying score that shows it.
_BY_COPYING = {"prefix matching": ("induction", 1.0), "same token": ("duplicate suppression", -1.0)}
# No relation may take the name of a behaviour: attention alone does not show one.
BEHAVIOUR_LABELS = tuple(label for label, _ in _BY_COPYING.values())


def labels_of_rows(rows: pd.DataFrame, effects: Effects) -> list[str]:
    """The label of each row: "" unless found, its role, or the behaviour that was shown as well.

    A behaviour is shown by the copying score, if its whole interval has the right sign, or by
    ablation: it costs the behaviour significantly and specifically. An effect is specific if it
    exceeds that on the behaviour's control, and the control loses at most a tenth of it. For
    heads that back each other up, the effect of their group counts.
    """
    shown = _shown_by_ablation(effects)
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
