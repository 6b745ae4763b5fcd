"""The page of a comparison as text: its numbers, its style and a policy that allows no more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from headwise._display import counted, printable
from headwise.report._html import fill_template
from headwise.report._statistic_labels import statistic_label
from headwise.report.comparison._comparison_data import ComparisonData
from headwise.tables import STATISTICS, Frame, Head, Square, draw_grid

_FOLDER = Path(__file__).parent
_COLORS = _FOLDER.parent / "page" / "style" / "colors.css"
_MOST_ROWS = 20
# Squares of all maps together; further statistics are left out, and named.
_MOST_SQUARES = 30_000
_STEPS, _SIDES = 8, 4  # steps of colour: of all values, and of each sign
_TICKS = 12


def render(comparison: ComparisonData) -> str:
    """The page as text. Whatever comes from the comparison is escaped."""
    changed, shown = comparison.changed(), _shown_statistics(comparison)
    sizes = comparison.largest()
    content = {
        "titles": [
            printable(x) or side
            for x, side in zip(comparison.titles, ("before", "after"), strict=True)
        ],
        "sentences": comparison.sentences(),
        "overview": _map(
            "Largest difference of each head",
            comparison.heads,
            sizes,
            limits=(0.0, float(np.nanmax(sizes, initial=0.0))),
            scale=2,
        ),
        "changed": [
            _texts(row) | {"label": printable(statistic_label(row["statistic"]))}
            for row in changed[:_MOST_ROWS].to_dict("records")
        ],
        "more": len(changed) - _MOST_ROWS,
        "roles": None if comparison.roles is None else _roles(comparison.roles),
        "statistics": [_statistic(comparison, name) for name in shown],
        "left_out": [
            printable(statistic_label(name)) for name in comparison.statistics if name not in shown
        ],
        "facts": _facts(comparison),
    }
    template = _FOLDER / "comparison.html"
    return fill_template(template, content, style=page_style(), filters={"number": number})


def page_style() -> str:
    """The colours and fonts of the study's page, and the style of this one."""
    sheets = (_COLORS, _FOLDER / "comparison.css")
    return "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)


def _shown_statistics(comparison: ComparisonData) -> list[str]:
    """The statistics with values, those with the most changed heads first, as many as fit."""
    known = [
        name
        for name in comparison.statistics
        if np.isfinite(comparison.values("difference", name)).any()
    ]
    counts = comparison.changed()["statistic"].value_counts()
    known.sort(key=lambda name: -int(counts.get(name, 0)))
    return known[: max(1, _MOST_SQUARES // (3 * len(comparison.heads)))]


def _statistic(comparison: ComparisonData, name: str) -> dict[str, Any]:
    """The three maps of a statistic: before and after on one scale, and the difference."""
    sides = [comparison.values(side, name) for side in ("before", "after")]
    finite = np.concatenate([values[np.isfinite(values)] for values in sides])
    limits = float(finite.min()), float(finite.max())
    difference = comparison.values("difference", name)
    limit = float(np.nanmax(np.abs(difference)))
    changed = comparison.changed()
    count = int((changed["statistic"] == name).sum())
    described = STATISTICS.get(name)
    return {
        "name": printable(name),
        "label": printable(statistic_label(name)),
        "meaning": described.meaning if described else "share of attention",
        "unit": described.unit if described else "share",
        "changed": f"{counted(count, 'head')} changed" if count else "no head changed",
        "maps": [
            *(
                _map(title, comparison.heads, values, limits=limits)
                for title, values in zip(("before", "after"), sides, strict=True)
            ),
            _map(
                "after − before", comparison.heads, difference, limits=(-limit, limit), signed=True
            ),
        ],
    }


def _map(
    title: str,
    heads: Sequence[Head],
    values: Float64[np.ndarray, " N"],
    *,
    limits: tuple[float, float],
    signed: bool = False,
    scale: int = 1,
) -> str:
    """The map of a value of each head, with its caption; a head without a value is hollow.

    Args:
        limits: The values of the palest and the darkest step.
        signed: Whether colours diverge from 0.
        scale: Screen pixels for each pixel of the picture.
    """
    squares = []
    for head, value in zip(heads, values.tolist(), strict=True):
        style = _step(value, limits, signed)
        shown = number(value, signed) if np.isfinite(value) else "not there"
        squares.append(Square({"class": style, "rx": "1.5"}, f"{head}: {shown}"))
    layers, columns = len({(x.stack, x.layer) for x in heads}), 1 + max(x.head for x in heads)
    every = -(-layers // (2 * _TICKS)), -(-columns // _TICKS)
    frame = Frame(12, 11, left=26, bottom=14, every=every, row_end=22, column_at=-4)
    label = f"{title}: a row per layer, a column per head"
    size = scale * (26 + 12 * columns)
    picture = draw_grid(heads, squares, label, frame, width=size, height="")
    low, high = (number(limit, signed) for limit in limits)
    caption = f"{title} <small>{low} to {high}</small>"
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def number(value: float, signed: bool = False) -> str:
    """Three significant digits, with a true minus sign."""
    return f"{value + 0.0:{'+' if signed and value else ''}.3g}".replace("-", "\N{MINUS SIGN}")


def _step(value: float, limits: tuple[float, float], signed: bool) -> str:
    """The class of a value's colour."""
    low, high = limits
    if not np.isfinite(value):
        return "absent"
    if signed:
        step = min(_SIDES, round(abs(value) / high * _SIDES)) if high > 0 else 0
        return f"{'p' if value > 0 else 'n'}{step}" if step else "zero"
    share = (value - low) / (high - low) if high > low else 0.0
    return f"s{min(_STEPS, max(0, round(share * _STEPS)))}"


def _roles(roles: pd.DataFrame) -> list[dict[str, Any]]:
    """Changes first, then the roles that were kept."""
    kept = roles["change"] == "kept"
    return [_texts(row) for row in pd.concat([roles[~kept], roles[kept]]).to_dict("records")]


def _texts(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(key): printable(value) if isinstance(value, str) else value
        for key, value in row.items()
    }


def _facts(comparison: ComparisonData) -> dict[str, str]:
    untested = comparison.rows["outcome"].str.startswith("not tested")
    before, after = comparison.texts
    facts = {
        "Fingerprint before": comparison.models[0],
        "Fingerprint after": comparison.models[1],
        "Texts": f"{before:,}, the same" if comparison.paired else f"{before:,} and {after:,}",
        "Tests": f"{int(comparison.rows['p_adj'].notna().sum()):,}, one family",
        "Not tested": f"{int(untested.sum()):,}",
        "Counts as rounding": f"{comparison.tolerance:g}",
        **comparison.versions,
    }
    return {printable(name): printable(value) for name, value in facts.items()}
