"""Two tables with sums per text, compared head by head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from headwise.errors import ArgumentError
from headwise.report.comparison._comparison import ROLE_COLUMNS, Comparison
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
from headwise.roles import FEWEST_TEXTS, Roles
from headwise.tables import Head, HeadTable, TextSums, address_columns

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
        roles=None if roles is None else _role_changes((before, after), roles),
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
    heads = matched.heads

    def spread(values: Column) -> Column:
        """Values of the common heads as those of all heads."""
        column = np.full(len(heads), np.nan)
        column[matched.common] = values
        return column

    columns: dict[str, Any] = {**address_columns(heads), "statistic": name}
    sides = dict(zip(("before", "after"), zip(tables, matched[1:], strict=True), strict=True))
    for side, (table, rows) in sides.items():
        means = table.mean(name)
        columns[side] = np.array([np.nan if row is None else means[row] for row in rows])
    columns["difference"] = spread(result.difference)
    columns["size"] = _sizes(columns["difference"], columns["before"])
    columns |= {"ci_low": spread(result.low), "ci_high": spread(result.high)}
    columns |= {"p_adj": spread(result.p), "texts": np.nan_to_num(spread(result.texts))}
    outcomes = []
    for p, texts, *both in zip(columns["p_adj"], columns["texts"], *matched[1:], strict=True):
        if None in both:
            outcomes.append(ONLY_AFTER if both[0] is None else ONLY_BEFORE)
        elif np.isnan(p):
            outcomes.append(f"not tested: {texts:.0f} texts, {FEWEST_TEXTS} needed")
        else:
            outcomes.append(CHANGED if p <= ERROR_RATE else UNCHANGED)
    columns["outcome"] = outcomes
    for side, (table, rows) in sides.items():
        columns[f"{side}_head"] = ["" if row is None else str(table.heads[row]) for row in rows]
    return pd.DataFrame(columns)


def _sizes(difference: Column, before: Column) -> Column:
    """The differences in standard deviations of the heads before; 0 where nothing differs."""
    finite = before[np.isfinite(before)]
    deviation = finite.std() if len(finite) else 0.0
    return difference / deviation if deviation > 0 else np.where(difference == 0, 0.0, np.nan)


def _role_changes(tables: tuple[HeadTable, HeadTable], roles: tuple[Roles, Roles]) -> pd.DataFrame:
    """A row for each role that a head has before, after, or both: `ROLE_COLUMNS`.

    A role is `lost` if it was tested and not found after, and `won` if it was tested and not
    found before. Where it was not tested, `change` gives the reason; `head removed` means that
    the model after does not have the head.

    Raises:
        ArgumentError: the roles are of another model.
    """
    sides: list[dict[tuple[Head, str], dict[str, Any]]] = []
    for side, table, each in zip(("before", "after"), tables, roles, strict=True):
        if each.model != table.model:
            raise ArgumentError(
                f"compare: the roles {side} belong to the model {each.model}, the table to "
                f"{table.model}. Give the roles of the models that are compared."
            )
        pairs = zip(table.heads, table.original or table.heads, strict=True)
        originals = {str(head): was for head, was in pairs if was is not None}
        tested = set(each.outcomes()["role"])  # and no shapes, such as sinks
        sides.append(
            {
                (originals[str(row["name"])], str(row["role"])): {str(k): v for k, v in row.items()}
                for row in each.rows.to_dict("records")
                if row["role"] in tested and str(row["name"]) in originals
            }
        )
    left = set(originals.values())
    keys = {key for rows in sides for key, row in rows.items() if row["found"]}
    records = []
    for head, role in sorted(keys):
        rows = [side.get((head, role)) for side in sides]
        address = (str(head), head.stack, head.layer, head.head, role)
        change = _change(rows) if head in left else "head removed"
        numbers = [
            np.nan if row is None else float(row[column.partition(".")[2]])
            for row, side in zip(rows, ("before", "after"), strict=True)
            for column in ROLE_COLUMNS
            if column.startswith(f"{side}.")
        ]
        records.append((*address, change, *numbers))
    return pd.DataFrame(records, columns=list(ROLE_COLUMNS))


def _change(rows: Sequence[dict[str, Any] | None]) -> str:
    found = []
    for side, row in zip(("before", "after"), rows, strict=True):
        if row is None:
            return f"not tested {side}"
        if str(row["outcome"]).startswith("not tested"):
            return f"{side}: {row['outcome']}"
        found.append(bool(row["found"]))
    return "kept" if all(found) else "won" if found[1] else "lost"
