"""Two tables with sums per text, compared head by head: paired intervals, one family of tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from headwise.errors import ArgumentError, HeadError
from headwise.report._comparison import (
    CHANGED,
    ERROR_RATE,
    NUMBERS_OF_ROLES,
    ONLY_AFTER,
    ONLY_BEFORE,
    ROLE_COLUMNS,
    UNCHANGED,
    Comparison,
)
from headwise.roles import FEWEST_TEXTS, Roles, step_down
from headwise.tables import Head, HeadTable, TextSums, address_columns

Column = Float64[np.ndarray, " N"]
PerText = Float64[np.ndarray, "M N"]

_SIDES = ("before", "after")
_NO_ROW = -1  # of a head that a table does not have


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
    tables = before, after
    names = _common_statistics(before, after)
    heads, rows = _match_heads(before, after)
    common = (rows != _NO_ROW).all(0)
    was, now = (
        _common_sums(table, names, each[common]) for table, each in zip(tables, rows, strict=True)
    )
    paired = np.array_equal(was.count, now.count)
    if paired:
        now = _without_rounding(was, now, tolerance)
    low, high = was.difference_interval(now, paired=paired)
    texts = np.minimum(*((side.count > 0).sum(0).astype(np.float64) for side in (was, now)))
    p = _adjusted_p(was, now, texts >= FEWEST_TEXTS, paired=paired, draws=draws)

    def of_all_heads(values: Column) -> Float64[np.ndarray, "statistics heads"]:
        """Values of the common heads as those of all heads; NaN for the others."""
        columns = np.full((len(names), len(heads)), np.nan)
        columns[:, common] = values.reshape(len(names), -1)
        return columns

    means = [
        np.where(each == _NO_ROW, np.nan, np.stack([table.mean(name)[each] for name in names]))
        for table, each in zip(tables, rows, strict=True)
    ]
    difference = of_all_heads(now.mean() - was.mean())
    numbers = {
        **dict(zip(_SIDES, means, strict=True)),
        "difference": difference,
        "size": np.stack(list(map(_sizes, difference, means[0]))),
        "ci_low": of_all_heads(low),
        "ci_high": of_all_heads(high),
        "p_adj": of_all_heads(p),
        "texts": np.nan_to_num(of_all_heads(texts)),
    }
    n = len(names)
    addresses = pd.concat([pd.DataFrame(address_columns(heads))] * n, ignore_index=True)
    columns = {name: values.ravel() for name, values in numbers.items()}
    frame = addresses.assign(statistic=np.repeat(names, len(heads)).tolist(), **columns)
    present = [(each != _NO_ROW).tolist() * n for each in rows]
    frame["outcome"] = list(map(_outcome, columns["p_adj"], columns["texts"], *present))
    for side, table, each in zip(_SIDES, tables, rows, strict=True):
        frame[f"{side}_head"] = [
            "" if row == _NO_ROW else str(table.heads[row]) for row in each
        ] * n
    return Comparison(
        rows=frame,
        roles=None if roles is None else _role_changes(tables, roles),
        titles=titles,
        models=(before.model, after.model),
        texts=(len(was.count), len(now.count)),
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
    for side, table in zip(_SIDES, (before, after), strict=True):
        missing = [name for name in names if table.totals[name].per_text is None]
        if missing:
            raise ArgumentError(
                f"compare: the sums of {missing[0]!r} in each text were not kept {side}. Study or "
                f"observe with Request(per_text=True). On the command line: headwise observe "
                f"--per-text, or headwise report --save."
            )
    return names


def _match_heads(
    before: HeadTable, after: HeadTable
) -> tuple[tuple[Head, ...], Int64[np.ndarray, "2 heads"]]:
    """The original addresses of all heads, and the row of each in both tables.

    Heads of zeros that pad a layer belong to neither model.

    Raises:
        HeadError: the models have other layers, or other numbers of heads without a record of the
            original ones, or no head in common.
    """
    was, now = (
        {head: row for row, head in enumerate(table.original or table.heads) if head is not None}
        for table in (before, after)
    )
    recorded = bool(before.original or after.original)
    if recorded and not was.keys() & now.keys():
        first = [", ".join(map(str, sorted(side)[:3])) for side in (was, now)]
        raise HeadError(
            f"compare: the models have no original head in common ({first[0]}, … before, "
            f"{first[1]}, … after). Compare models that share heads."
        )
    layers: list[dict[str, set[int]]] = [{}, {}]
    for by_layer, known in zip(layers, (was, now), strict=True):
        for head in known:
            by_layer.setdefault(str(head).rpartition(".")[0], set()).add(head.head)
    if layers[0].keys() != layers[1].keys():  # each layer keeps a head
        spans = [
            f"{len(x)} layers ({x[0]} to {x[-1]})" if len(x) > 1 else x[0]
            for x in map(list, layers)
        ]
        by, what = "", "models with the same layers"
        if recorded:
            by, what = ", by the original numbers of their heads", "a model with one made from it"
        raise HeadError(f"compare: {spans[0]} before and {spans[1]} after{by}. Compare {what}.")
    for layer, numbers in layers[0].items():
        if not recorded and numbers != layers[1][layer]:
            raise HeadError(
                f"compare: {layer} has {len(numbers)} heads before and {len(layers[1][layer])} "
                f"after, and neither model records which of the original heads it has. Compare "
                f"models that headwise pruned or grouped."
            )
    heads = tuple(dict.fromkeys([*was, *sorted(now)]))
    return heads, np.array([[rows.get(head, _NO_ROW) for head in heads] for rows in (was, now)])


def _common_sums(table: HeadTable, names: Sequence[str], rows: Int64[np.ndarray, " _"]) -> TextSums:
    """The sums of each text, with a column for each of these heads and statistics.

    All statistics are columns of one, so that they share the resamples and the family of tests.
    """
    parts = zip(*(table.per_text(name).parts for name in names), strict=True)
    return TextSums(*(np.concatenate([part[:, rows] for part in each], axis=1) for each in parts))


def _without_rounding(before: TextSums, after: TextSums, tolerance: float) -> TextSums:
    """The sums after, with those of before wherever a text's means differ by rounding alone.

    Args:
        tolerance: The largest difference that is rounding, for values up to 1; beyond, a share
            of the value.
    """
    limit = tolerance * np.maximum(before.count, np.abs(before.total))
    equal = (before.count == after.count) & (np.abs(after.total - before.total) <= limit)
    return replace(after, total=np.where(equal, before.total, after.total))


def _adjusted_p(
    before: TextSums, after: TextSums, tested: Any, *, paired: bool, draws: int
) -> Column:
    """The two-sided p of each column, adjusted over all of them; NaN where it is not tested.

    The statistic is Student's t of the influence of each text on the difference of the means,
    which are ratios of sums over texts. Both signs of every column are in the family, so that a
    test is two-sided.

    Source:
        Romano & Wolf 2005, algorithm 4.2 (`headwise.roles`).
    """
    # Columns with too few texts stay out of the family, which they would make larger for nothing.
    p = np.full(len(tested), np.nan)
    gains = _influence(before, after, paired)[:, tested]
    [both_signs] = step_down([np.concatenate([gains, -gains], axis=1)], draws=draws, seed=0)
    p[tested] = np.minimum(*np.split(both_signs.astype(np.float64), 2))
    return p


def _influence(before: TextSums, after: TextSums, paired: bool) -> PerText:
    """How far each text moves the difference of the means; their mean is the difference.

    If the models read different texts, the rows of both follow one another, weighted by the share
    of each model's texts, so that the variance of the mean over rows is the sum of both variances.
    """
    parts = [_centered(sums) for sums in (before, after)]
    difference = after.mean() - before.mean()
    if paired:
        return parts[1] - parts[0] + difference
    n = sum(map(len, parts))
    rows = [-n / len(parts[0]) * parts[0], n / len(parts[1]) * parts[1]]
    return np.concatenate(rows) + difference


def _centered(sums: TextSums) -> PerText:
    size = sums.count.mean(0)
    safe = np.where(size > 0, size, 1.0)
    return (sums.total - np.nan_to_num(sums.mean()) * sums.count) / safe


def _sizes(difference: Column, before: Column) -> Column:
    """The differences in standard deviations of the heads before; 0 where nothing differs."""
    finite = before[np.isfinite(before)]
    deviation = finite.std() if len(finite) else 0.0
    return difference / deviation if deviation > 0 else np.where(difference == 0, 0.0, np.nan)


def _outcome(p: float, texts: float, is_before: bool, is_after: bool) -> str:
    if not (is_before and is_after):
        return ONLY_BEFORE if is_before else ONLY_AFTER
    if np.isnan(p):
        return f"not tested: {texts:.0f} texts, {FEWEST_TEXTS} needed"
    return CHANGED if p <= ERROR_RATE else UNCHANGED


def _role_changes(tables: tuple[HeadTable, HeadTable], roles: tuple[Roles, Roles]) -> pd.DataFrame:
    """A row for each role that a head has before, after, or both: `ROLE_COLUMNS`.

    A role is `lost` if it was tested and not found after, and `won` if it was tested and not
    found before. Where it was not tested, `change` gives the reason; `head removed` means that
    the model after does not have the head.

    Raises:
        ArgumentError: the roles are of another model.
    """
    sides: list[dict[tuple[Head, str], Mapping[Any, Any]]] = []
    for side, table, each in zip(_SIDES, tables, roles, strict=True):
        if each.model != table.model:
            raise ArgumentError(
                f"compare: the roles {side} belong to the model {each.model}, the table to "
                f"{table.model}. Give the roles of the models that are compared."
            )
        pairs = zip(table.heads, table.original or table.heads, strict=True)
        originals = {str(head): was for head, was in pairs if was is not None}
        tested = set(each.outcomes()["role"])  # and no shapes, such as sinks
        rows = each.rows[each.rows["role"].isin(tested) & each.rows["name"].isin(originals)]
        sides.append(
            {(originals[row["name"]], row["role"]): row for row in rows.to_dict("records")}
        )
    left = set(originals.values())  # of the model after
    records = []
    for key in sorted({key for rows in sides for key, row in rows.items() if row["found"]}):
        head, role = key
        both = [rows.get(key) for rows in sides]
        numbers = (
            np.nan if row is None else float(row[name]) for row in both for name in NUMBERS_OF_ROLES
        )
        change = _change(both) if head in left else "head removed"
        records.append((str(head), head.stack, head.layer, head.head, role, change, *numbers))
    return pd.DataFrame(records, columns=list(ROLE_COLUMNS))


def _change(rows: Sequence[Mapping[Any, Any] | None]) -> str:
    found = []
    for side, row in zip(_SIDES, rows, strict=True):
        if row is None:
            return f"not tested {side}"
        if str(row["outcome"]).startswith("not tested"):
            return f"{side}: {row['outcome']}"
        found.append(bool(row["found"]))
    return "kept" if all(found) else "won" if found[1] else "lost"
