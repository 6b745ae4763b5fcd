"""The evidence for a role of a head, as lines of text."""

from collections.abc import Mapping
from typing import Any

from headwise._display import counted, printable
from headwise.roles._rows import NULLS


def evidence_lines(row: Mapping[Any, Any], meaning: str) -> list[str]:
    """The score, the nulls and the test behind a row that was found."""
    strong = "strongly" if row["lift"] >= 0.5 else "weakly"
    nulls = [
        f"{null} {row[f'null.{null}']:.2f}"
        for null in NULLS
        if row[f"null.{null}"] == row[f"null.{null}"]
    ]
    return [
        f"  {printable(row['label'])}, {strong}: {printable(meaning)}",
        f"    {row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] over "
        f"{counted(int(row['n']), 'query', 'queries')} of "
        f"{counted(int(row['texts']), 'held-out text')} "
        f"({row['chosen_half']:.3f} on the other half)",
        f"    attention {_or_unknown(row['mass'])}, weighted by value norm "
        f"{_or_unknown(row['value'])}",
        *_copying_lines(row),
        f"    nulls: {', '.join(nulls)}; the strongest is {printable(row['null'])}",
        f"    lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}{_stability(row)}",
    ]


def _stability(row: Mapping[Any, Any]) -> str:
    share = row.get("stability", float("nan"))
    return "" if share != share else f"; found under {share:.0%} of further splits"


def _copying_lines(row: Mapping[Any, Any]) -> list[str]:
    score = row.get("copying", float("nan"))
    if score != score:
        return []
    ends = f"[{row['copying.low']:+.2f}, {row['copying.high']:+.2f}]"
    return [
        f"    copying {score:+.2f} {ends}: what it writes raises the token it reads, if above 0"
    ]


def _or_unknown(share: float) -> str:
    return "unknown" if share != share else f"{share:.3f}"
