"""The evidence for one head in lines of text: its roles, its shape, and the roles just missed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from headwise._display import counted, printable
from headwise.roles.results._outcomes import (
    by_nearness,
    is_undecided,
    none_found_by_head,
    rules_line,
    shortfall,
)
from headwise.roles.results._shapes import shape_line
from headwise.roles.testing import NULLS

_NEAREST = 3  # roles just below the bar, and as many that were not tested


def explanations(
    rows: pd.DataFrame,
    shapes: pd.DataFrame,
    effects: Mapping[str, Sequence[str]],
    meanings: Mapping[str, str],
) -> dict[str, str]:
    """The evidence for each head in `effects`, by name.

    Args:
        effects: For each head, what ablating it does, in lines.
    """
    of_head: dict[str, list[dict[Any, Any]]] = {name: [] for name in effects}
    rows = by_nearness(rows[rows["name"].isin(set(effects))])
    for row in rows.to_dict("records"):
        of_head[row["name"]].append(row)
    shape = {row["name"]: [row] for row in shapes.to_dict("records")}
    none = none_found_by_head(rows)
    texts = {}
    for name, lines in effects.items():
        shown = _explanation(of_head[name], shape.get(name, []), none.get(name, ""), meanings)
        texts[name] = "\n".join([name, *shown, *(f"  {printable(line)}" for line in lines)])
    return texts


def _explanation(
    rows: Sequence[Mapping[Any, Any]],
    shapes: Sequence[Mapping[Any, Any]],
    none_found: str,
    meanings: Mapping[str, str],
) -> Iterator[str]:
    """The lines of one head, from its rows of roles and of shapes.

    Args:
        none_found: What to say if the head has no role.
    """
    having = [row for row in rows if row["found"]]
    for row in having:
        yield from _evidence(row, printable(meanings[row["role"]]))
    if not having:
        yield f"  {none_found}"
    for row in shapes:
        yield f"  {shape_line(row)}"
    missed = [row for row in rows if not row["found"] and row["p_adj"] == row["p_adj"]]
    untested = [
        row for row in rows if row["p_adj"] != row["p_adj"] and row["effect"] == row["effect"]
    ]
    for row in missed[:_NEAREST]:
        yield f"  not {printable(row['role'])}: {shortfall(row)}"
    undecided = [row for row in rows if is_undecided(row["outcome"])]
    for row in [*untested[:_NEAREST], *undecided]:
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
    if rules := rules_line(row):
        yield f"    candidates: {rules}"
    share = row.get("stability", float("nan"))
    stable = "" if share != share else f"; found under {share:.0%} of further splits"
    yield f"    lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}{stable}"


def _or_unknown(share: float) -> str:
    return "unknown" if share != share else f"{share:.3f}"
