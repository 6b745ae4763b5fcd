"""The evidence for one head in lines of text: its roles, its shape, and the roles just missed."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from headwise._display import counted, printable
from headwise.roles.results._rows import none_found, shortfall
from headwise.roles.results._shapes import shape_line
from headwise.roles.testing import NULLS

_NEAREST = 3  # roles just below the bar, and as many that were not tested


def explanation(
    rows: pd.DataFrame, shapes: pd.DataFrame, meanings: Mapping[str, str]
) -> Iterator[str]:
    """The lines of one head, from its rows of roles and of shapes."""
    rows = rows.sort_values("lift", ascending=False)
    having = rows[rows["found"]]
    for row in having.to_dict("records"):
        yield from _evidence(row, printable(meanings[row["role"]]))
    if not len(having):
        yield f"  {none_found(rows)}"
    for row in shapes.to_dict("records"):
        yield f"  {shape_line(row)}"
    tested, known = rows["p_adj"].notna(), rows["effect"].notna()
    missed, untested = rows[~rows["found"] & tested], rows[known & ~tested]
    for row in missed.head(_NEAREST).to_dict("records"):
        yield f"  not {printable(row['role'])}: {shortfall(row)}"
    for row in untested.head(_NEAREST).to_dict("records"):
        yield f"  {printable(row['role'])}: {shortfall(row)}"


def _evidence(row: Mapping[Any, Any], meaning: str) -> Iterator[str]:
    strong = "strongly" if row["lift"] >= 0.5 else "weakly"
    yield f"  {printable(row['label'])}, {strong}: {meaning}"
    yield (
        f"    {row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] over "
        f"{counted(int(row['n']), 'query', 'queries')} of "
        f"{counted(int(row['texts']), 'held-out text')} "
        f"({row['chosen_half']:.3f} on the other half)"
    )
    yield (
        f"    attention {_or_unknown(row['mass'])}, weighted by value norm "
        f"{_or_unknown(row['value'])}"
    )
    copying = row.get("copying", float("nan"))
    if copying == copying:
        ends = f"[{row['copying.low']:+.2f}, {row['copying.high']:+.2f}]"
        yield (
            f"    copying {copying:+.2f} {ends}: what it writes raises the token it reads, if "
            f"above 0"
        )
    rates = {null: row[f"null.{null}"] for null in NULLS}
    nulls = [f"{null} {rate:.2f}" for null, rate in rates.items() if rate == rate]
    yield f"    nulls: {', '.join(nulls)}; the strongest is {printable(row['null'])}"
    share = row.get("stability", float("nan"))
    stable = "" if share != share else f"; found under {share:.0%} of further splits"
    yield f"    lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}{stable}"


def _or_unknown(share: float) -> str:
    return "unknown" if share != share else f"{share:.3f}"
