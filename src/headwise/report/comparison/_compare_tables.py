"""Two tables with sums per text, compared head by head."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from headwise.errors import ArgumentError
from headwise.report.comparison._comparison import Comparison
from headwise.report.comparison._comparison_data import (
    CHANGED,
    ERROR_RATE,
    ONLY_AFTER,
    ONLY_BEFORE,
    UNCHANGED,
)
from headwise.report.comparison._differences import (
    HeadDifferences,
    differences,
    same_texts,
    without_rounding,
)
from headwise.report.comparison._matching import MatchedHeads, match_heads
from headwise.report.comparison._role_changes import Originals, role_changes
from headwise.roles import FEWEST_TEXTS, Roles
from headwise.tables import Head, HeadTable, TextSums

Column = Float64[np.ndarray, " _"]


def compare_tables(
    before: HeadTable,
    after: HeadTable,
    roles: tuple[Roles, Roles] | None = None,
    tolerance: float = 1e-5,
    titles: tuple[str, str] = ("", ""),
    *,
    draws: int = 4000,
) -> Comparison:
    """Compare two tables as `compare` does.

    Args:
        draws: Bootstrap resamples of the test.
    """
    names = _common_statistics(before, after)
    matched = match_heads(before, after)
    sums = _common_sums(before, after, matched, names)
    paired = same_texts(*sums)
    if paired:
        rounded = (without_rounding(sums[0][name], sums[1][name], tolerance) for name in names)
        sums = sums[0], dict(zip(names, rounded, strict=True))
    results = differences(*sums, paired=paired, draws=draws)
    parts = [_rows(name, results[name], matched, (before, after)) for name in names]
    rows = pd.concat(parts, ignore_index=True)
    n_texts = tuple(len(side[names[0]].count) for side in sums)
    return Comparison(
        rows=rows,
        roles=None if roles is None else role_changes(*roles, _originals(before, after, roles)),
        titles=titles,
        models=(before.model, after.model),
        texts=(n_texts[0], n_texts[1]),
        paired=paired,
        tolerance=tolerance,
        versions=dict(after.versions),
    )


def _common_statistics(before: HeadTable, after: HeadTable) -> list[str]:
    """The statistics of both tables, with sums per text.

    Raises:
        ArgumentError: there is none, the means are over other queries, or sums are missing.
    """
    if before.queries != after.queries:
        raise ArgumentError(
            f"compare: means over {before.queries!r} queries before and {after.queries!r} after. "
            f"Compare tables of the same request."
        )
    names = [name for name in before.statistics if name in after.totals]
    if not names:
        raise ArgumentError(
            f"compare: {', '.join(before.statistics) or 'no statistics'} before and "
            f"{', '.join(after.statistics) or 'no statistics'} after. Compare tables of the same "
            f"request."
        )
    for side, table in (("before", before), ("after", after)):
        missing = [name for name in names if table.totals[name].per_text is None]
        if missing:
            raise ArgumentError(
                f"compare: the sums of {missing[0]!r} in each text were not kept {side}. Study or "
                f"observe with Request(per_text=True). On the command line: headwise observe "
                f"--per-text, or headwise report --save."
            )
    return names


def _common_sums(
    before: HeadTable, after: HeadTable, matched: MatchedHeads, names: Sequence[str]
) -> tuple[dict[str, TextSums], dict[str, TextSums]]:
    """The sums per text of the heads that both tables have, in the same order."""
    sides = []
    for table, rows in ((before, matched.before), (after, matched.after)):
        common = [row for number in matched.common if (row := rows[number]) is not None]
        sums = {name: table.per_text(name).parts for name in names}
        sides.append({n: TextSums(*(part[:, common] for part in x)) for n, x in sums.items()})
    return sides[0], sides[1]


def _rows(
    name: str, result: HeadDifferences, matched: MatchedHeads, tables: tuple[HeadTable, HeadTable]
) -> pd.DataFrame:
    """A row for each head: what `Comparison.rows` holds of one statistic."""
    common, heads = matched.common, matched.heads
    sides = (matched.before, matched.after)
    before, after = (
        _values(table.mean(name), rows) for table, rows in zip(tables, sides, strict=True)
    )
    columns: dict[str, Any] = {
        "name": [str(head) for head in heads],
        "stack": [head.stack for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
        "statistic": name,
        "before": before,
        "after": after,
        "difference": _spread(result.difference, common, len(heads)),
    }
    columns["size"] = _sizes(columns["difference"], before)
    for key in ("low", "high"):
        columns[f"ci_{key}"] = _spread(getattr(result, key), common, len(heads))
    columns["p_adj"] = _spread(result.p, common, len(heads))
    columns["texts"] = np.nan_to_num(_spread(result.texts, common, len(heads)))
    columns["outcome"] = [
        _outcome(*pair) for pair in zip(columns["p_adj"], columns["texts"], strict=True)
    ]
    for side, table, rows, absent in (
        ("before", tables[0], sides[0], ONLY_AFTER),
        ("after", tables[1], sides[1], ONLY_BEFORE),
    ):
        columns[f"{side}_head"] = ["" if row is None else str(table.heads[row]) for row in rows]
        for number in (number for number, row in enumerate(rows) if row is None):
            columns["outcome"][number] = absent
    return pd.DataFrame(columns)


def _values(means: Column, rows: Sequence[int | None]) -> Column:
    return np.array([np.nan if row is None else means[row] for row in rows])


def _spread(values: Column, common: Sequence[int], heads: int) -> Column:
    spread = np.full(heads, np.nan)
    spread[list(common)] = values
    return spread


def _sizes(difference: Column, before: Column) -> Column:
    """The differences in standard deviations of the heads before; 0 where nothing differs."""
    finite = before[np.isfinite(before)]
    deviation = finite.std() if len(finite) else 0.0
    sizes = np.where(difference == 0, 0.0, np.nan)
    return difference / deviation if deviation > 0 else sizes


def _outcome(p: float, texts: float) -> str:
    if np.isnan(p):
        return f"not tested: {texts:.0f} texts, {FEWEST_TEXTS} needed"
    return CHANGED if p <= ERROR_RATE else UNCHANGED


def _originals(
    before: HeadTable, after: HeadTable, roles: tuple[Roles, Roles]
) -> tuple[Originals, Originals]:
    """For each side the original address of each head, by its name.

    Raises:
        ArgumentError: the roles are of another model.
    """
    sides: list[Originals] = []
    for side, table, each in zip(("before", "after"), (before, after), roles, strict=True):
        if each.model != table.model:
            raise ArgumentError(
                f"compare: the roles {side} belong to the model {each.model}, the table to "
                f"{table.model}. Give the roles of the models that are compared."
            )
        pairs: Mapping[Head, Head | None] = dict(
            zip(table.heads, table.original or table.heads, strict=True)
        )
        sides.append({str(head): was for head, was in pairs.items() if was is not None})
    return sides[0], sides[1]
