"""The comparison of the studied model with another: a map of the heads, and what differs most."""

from typing import Any

import numpy as np

from headwise.report._comparison import ONLY_AFTER, ONLY_BEFORE, Comparison
from headwise.report.page._pictures import HeadCell, head_maps, tint
from headwise.report.page._visible_text import digits, probability, visible
from headwise.tables import statistic_label

_MORE, _LESS = "#d55e00", "#0072b2"
_MOST_ROWS = 300


def compared(comparison: Comparison | None) -> dict[str, Any] | None:
    """What the page shows of a comparison; None if the study holds none."""
    if comparison is None:
        return None
    before, after = (
        visible(title or side)
        for title, side in zip(comparison.titles, ("before", "after"), strict=True)
    )
    changed = comparison.changed().to_dict("records")
    largest = max((abs(row["size"]) for row in changed if np.isfinite(row["size"])), default=1.0)
    cells = {
        name: HeadCell("", "", outcome, untested=True)
        for outcome in (ONLY_BEFORE, ONLY_AFTER)
        for name in comparison.only(outcome)
    }
    rows = []
    for row in changed:
        label, is_more = statistic_label(row["statistic"]), row["difference"] > 0
        strength = float(np.nan_to_num(abs(row["size"]) / largest))
        color, sign = (_MORE, "+") if is_more else (_LESS, "\N{MINUS SIGN}")
        cell = HeadCell(tint(color, strength), sign, visible(f"{label} {digits(row['size'])}"))
        cells.setdefault(row["name"], cell)  # its largest difference comes first
        numbers = (digits(row[x]) for x in ("before", "after", "difference", "size"))
        interval = f"[{digits(row['ci_low'])}, {digits(row['ci_high'])}]"
        rows.append([row["name"], visible(label), *numbers, interval, probability(row["p_adj"])])
    return {
        "title": f"{before} → {after}",
        "sentences": [visible(line) for line in comparison.sentences()],
        "maps": head_maps(comparison.heads, cells, "The largest difference of each head"),
        "columns": (
            "Head",
            "Statistic",
            "Before",
            "After",
            "Difference",
            "Size",
            "95 %",
            "Adjusted p",
        ),
        "rows": rows[:_MOST_ROWS],
        "left_out": max(0, len(rows) - _MOST_ROWS),
    }
