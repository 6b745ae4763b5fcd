"""The sections of a study's page about effects and about a comparison with another model."""

from typing import Any

import numpy as np
import pandas as pd

from headwise.head_effects import HeadEffects
from headwise.report._comparison import ONLY_AFTER, ONLY_BEFORE, Comparison
from headwise.report.page._pictures import HeadCell, head_maps, round_ticks, tint
from headwise.report.page._visible_text import digits, probability, visible
from headwise.tables import statistic_label

_MORE, _LESS = "#d55e00", "#0072b2"
_COLUMNS = ("Head", "Kind", "Direct", "95 %", "Adjusted p", "Total", "Repair")
_MOST_ROWS = 300
_STYLES = {"writer": "hue-0", "canceller": "hue-1", "none": "", "not tested": ""}


def effects_section(effects: HeadEffects | None) -> dict[str, Any] | None:
    """What the page shows of effects; None if the study holds none."""
    if effects is None:
        return None
    found = effects.found().to_dict("records")
    rows = [
        [
            row["name"],
            row["kind"],
            digits(row["direct"]),
            f"[{digits(row['ci_low'])}, {digits(row['ci_high'])}]",
            probability(row["p_adj"]),
            digits(row["total"]),
            digits(row["repair"]),
        ]
        for row in found
    ]
    return {
        "says": visible(f"{effects}.").capitalize(),
        "notes": [visible(note) for note in effects.notes],
        "columns": _COLUMNS,
        "rows": rows[:_MOST_ROWS],
        "tested": bool(effects.rows["p_adj"].notna().any()),
        "left_out": max(0, len(rows) - _MOST_ROWS),
        "plot": _plot(effects.frame()),
    }


def _plot(rows: pd.DataFrame) -> dict[str, Any] | None:
    """A dot for each head on a canvas of 600 × 400, with ticks; None without total effects."""
    rows = rows.replace([np.inf, -np.inf], np.nan).dropna(subset=["direct", "total"])
    if rows.empty:
        return None
    across, up = (
        round_ticks(min(0.0, float(of.min())), max(0.0, float(of.max())))
        for of in (rows["direct"], rows["total"])
    )
    low, high = max(across[0], up[0]), min(across[-1], up[-1])

    def place(direct: float, total: float) -> tuple[float, float]:
        x = (direct - across[0]) / (across[-1] - across[0])
        return round(60 + 500 * x, 1), round(350 - 330 * (total - up[0]) / (up[-1] - up[0]), 1)

    dots = []
    # Those of a kind are drawn last, over the others.
    for row in rows.sort_values("kind", key=lambda kind: kind.map(_STYLES)).to_dict("records"):
        x, y = place(row["direct"], row["total"])
        numbers = f"direct {digits(row['direct'])}, total {digits(row['total'])}"
        style, title = _STYLES[row["kind"]], f"{row['name']}: {numbers}"
        name = row["name"] if style else ""
        dots.append({"x": x, "y": y, "style": style, "name": name, "title": title})
    counts = {kind: int(np.sum(rows["kind"] == kind)) for kind in _STYLES}
    return {
        "dots": dots,
        "diagonal": [*place(low, low), *place(high, high)] if low < high else [],
        "x_ticks": [(place(tick, up[0])[0], f"{tick:.10g}") for tick in across],
        "y_ticks": [(place(across[0], tick)[1], f"{tick:.10g}") for tick in up],
        "marks": [(_STYLES[kind], kind, count) for kind, count in counts.items() if count],
    }


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
