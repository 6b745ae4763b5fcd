"""The overview of a study: a sentence with counts, the evidence for each, a map of the heads."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from headwise._display import counted
from headwise.report._study_data import StudyData
from headwise.report.page._pictures import HeadCell, head_maps, tint
from headwise.report.page._role_table import interval_text
from headwise.report.page._visible_text import digits, visible
from headwise.roles import Roles, main_roles, shown_outcomes, signs_of
from headwise.tables import Curves, Head, category_marks

# Roles named in the sentence; the legend has all of them.
_NAMED = 5
_SMALL_LOSS = 0.01
_PHRASES = {
    "previous token": "at the previous token",
    "next token": "at the next token",
    "self": "at the token itself",
    "same token": "at the same token elsewhere",
    "prefix matching": "at what followed an earlier copy of the token",
    "induction": "at what followed an earlier copy of the token, and repeat it",
}
_EVIDENCE = ("Head", "Effect", "Strongest null", "Held-out queries")


@dataclass(frozen=True)
class Clause:
    """A count in the sentence, the words after it, and the table that it opens."""

    count: int
    after: str
    title: str
    columns: tuple[str, ...] = _EVIDENCE
    rows: Sequence[Sequence[str]] = ()
    of_heads: bool = True  # whether the first cell of each row is a head


def overview(study: StudyData) -> dict[str, Any] | None:
    """What the page shows first: a sentence of clauses, a legend, and the maps of the heads.

    `marks` are the roles of the legend: the hue, the letter, and on how many heads a map shows it.
    None if the study did not look for roles.
    """
    roles = study.roles
    if roles is None:
        return None
    found, shapes = roles.found(), roles.shapes()
    main = main_roles(found, shapes)
    weak = found[~found["name"].isin(main["name"])].drop_duplicates("name")
    shapes = shapes[~shapes["name"].isin(main["name"])]
    counts = Counter([*main["label"], *weak["label"]])
    marks = category_marks([name for name, _ in counts.most_common()])
    cells = _states(roles)
    with_nothing = {name: cell for name, cell in cells.items() if not cell.letter}
    for row in [*main.to_dict("records"), *weak.to_dict("records")]:
        with_nothing.pop(row["name"], None)
        cells[row["name"]] = _role_cell(row, *marks[row["label"]], cells[row["name"]], main)
    return {
        "lead": f"Of {counted(len(study.table.heads), 'head')}, ",
        "clauses": [
            *_role_clauses(main),
            *_weak_clause(weak[~weak["name"].isin(shapes["name"])]),
            *_shape_clauses(shapes, set(weak["name"])),
            *_nothing_clauses(roles, with_nothing),
            *_removal_clause(study.curves),
            *_untested_clause(roles),
        ],
        "marks": [
            {"name": visible(name), "letter": letter, "color": color, "heads": counts[name]}
            for name, (color, letter) in marks.items()
        ],
        "maps": head_maps(study.table.heads, cells, "The role of each head"),
    }


def _role_cell(
    row: Mapping[Any, Any], color: str, letter: str, below: HeadCell, main: pd.DataFrame
) -> HeadCell:
    """The cell of a head with a role: colored unless a sink or all tokens take more attention."""
    is_main = row["name"] in set(main["name"])
    more = "" if is_main else " more than chance"
    text = visible(f"{row['label']}{more}, lift {row['lift']:.2f}")
    if not below.letter:
        return HeadCell(tint(color, row["lift"]), letter, text)
    fill = tint(color, row["lift"]) if is_main else ""
    return HeadCell(fill, below.letter + letter, f"{below.text}; {text}")


def _untested_clause(roles: Roles) -> list[Clause]:
    """The roles that no head was tested for, if some head was tested for another role."""
    outcomes = shown_outcomes(roles.outcomes())[["role", "outcome"]]
    untested = outcomes[outcomes["outcome"].str.startswith("not tested")]
    if len(untested) in (0, len(outcomes)):
        return []
    rows = [[visible(text) for text in row] for row in untested.to_numpy()]
    after = f"of {counted(len(outcomes), 'role')} could not be tested on these texts"
    columns = ("Role", "Outcome")
    return [Clause(len(rows), after, "Roles not tested", columns, rows, of_heads=False)]


def _states(roles: Roles) -> dict[str, HeadCell]:
    """The cells of heads without a role: sinks, diffuse heads, and heads that were not tested."""
    rows = roles.frame()
    tested = set(rows.loc[rows["p_adj"].notna(), "name"])
    cells = {
        name: HeadCell(
            "", "", "no role found" if name in tested else "not tested", name not in tested
        )
        for name in dict.fromkeys(rows["name"])
    }
    shapes = roles.shapes()
    signs = signs_of(shapes)
    for row in shapes.to_dict("records"):
        letter, _ = signs[Head.parse(row["name"])]
        text = row["shape"] + (f", {row['carries']} by value" if row["carries"] else "")
        cells[row["name"]] = HeadCell("", letter, text)
    return cells


def _clause(
    rows: Sequence[Sequence[str]],
    verbs: tuple[str, str],
    rest: str,
    title: str,
    columns: tuple[str, ...] = _EVIDENCE,
) -> list[Clause]:
    """The clause that counts these heads, if there are any; `verbs` are for one and for several."""
    after = f"{verbs[len(rows) != 1]}{rest}"
    return [Clause(len(rows), after, title, columns, rows)] if rows else []


def _weak_clause(weak: pd.DataFrame) -> list[Clause]:
    """Heads that beat every null on a relation, but spend most of their attention elsewhere."""
    rows = []
    for row in weak.to_dict("records"):
        name, *evidence = _evidence(row)
        rows.append([name, visible(row["label"]), *evidence])
    rest, columns = " to a relation more than chance", ("Head", "Role", *_EVIDENCE[1:])
    return _clause(rows, ("attends", "attend"), rest, "Weak roles", columns)


def _role_clauses(main: pd.DataFrame) -> list[Clause]:
    clauses = []
    for label, group in main.groupby("label", sort=False):
        offset = re.fullmatch(r"offset ([+-])(\d+)", str(label))
        target = _PHRASES.get(str(label), f"for “{label}”")
        if offset is not None:
            target = f"{offset[2]} tokens {'ahead' if offset[1] == '+' else 'back'}"
        rows = [_evidence(row) for row in group.to_dict("records")]
        clauses += _clause(rows, ("looks", "look"), visible(f" {target}"), visible(str(label)))
    clauses.sort(key=lambda clause: -clause.count)
    others = [row for clause in clauses[_NAMED:] for row in clause.rows]
    return [*clauses[:_NAMED], *_clause(others, ("has", "have"), " other roles", "Other roles")]


def _evidence(row: Mapping[Any, Any]) -> list[str]:
    return [
        visible(row["name"]),
        interval_text(row),
        visible(f"{digits(row['baseline'])} of {row['null']}"),
        f"{row['n']:,.0f} in {counted(int(row['texts']), 'text')}",
    ]


def _shape_clauses(shapes: pd.DataFrame, with_role: Collection[str]) -> list[Clause]:
    """Sinks, and then heads that attend to all tokens alike and are no sinks.

    Args:
        shapes: The heads of which no role takes most of the attention.
        with_role: The heads that also attend to a relation more than chance.
    """
    sinks = shapes[shapes["shape"].str.contains("sink")].to_dict("records")
    rest = ""
    if any(row["carries"] for row in sinks):
        empty = sum(row["carries"] == "empty" for row in sinks)
        take = "takes" if empty == 1 else "take"
        which = "all of which take" if empty == len(sinks) > 1 else f"of which {empty} {take}"
        rest = f", {which} almost no information from the token they attend to"
    if also := sum(row["name"] in with_role for row in sinks):
        rest += f" ({also} also {'has' if also == 1 else 'have'} a weak role)"
    rows = [
        [row["name"], interval_text(row, "attention"), digits(row["value"]), visible(row["token"])]
        for row in sinks
    ]
    columns = ("Head", "Attention on the sink", "Weighted by value", "Sink")
    spread = shapes[shapes["shape"] == "diffuse"].to_dict("records")
    even = [[row["name"], digits(row["evenness"])] for row in spread]
    even_columns = ("Head", "Share of the entropy of uniform attention")
    alike, attend = " to all tokens almost alike", ("attends", "attend")
    return [
        *_clause(rows, ("is a sink", "are sinks"), rest, "Sinks", columns),
        *_clause(even, attend, alike, "Diffuse heads", even_columns),
    ]


def _removal_clause(curves: Curves | None) -> list[Clause]:
    """How many heads can be removed for under one per cent, by the first order of the curves.

    Nothing is said about random orders alone, or about shares of a loss that is 0.
    """
    orders = [] if curves is None else [name for name in curves.per_text if name != "random"]
    if curves is None or not orders:
        return []
    order = orders[0]
    mean, (low, high) = curves.mean(order).mean(0), curves.interval(order)
    # A loss that compares with the full model is 0 for it, so its growth is the loss itself.
    full = 1.0 if curves.compares else mean[0]
    if full == 0:
        return []
    growth = [(column - (0.0 if curves.compares else full)) / full for column in (mean, low, high)]
    within = [bool(value < _SMALL_LOSS) for value in growth[0]]
    last = within.index(False) - 1 if False in within else len(within) - 1
    rows = [
        [f"{count}", f"{value:+.2%} [{below:+.2%}, {above:+.2%}]"]
        for count, value, below, above in zip(curves.removed, *growth, strict=True)
        if count
    ]
    after = f"could be removed together for under 1 % more of the loss “{visible(curves.loss)}”"
    columns = ("Heads removed", "Growth of the loss")
    title = f"Removing heads by {visible(order)}"
    return [Clause(int(curves.removed[last]), after, title, columns, rows, of_heads=False)]


def _nothing_clauses(roles: Roles, without: Mapping[str, HeadCell]) -> list[Clause]:
    none, columns = roles.none_found_by_head(), ("Head", "Tested")
    rows: tuple[list[list[str]], list[list[str]]] = ([], [])
    for name, cell in without.items():
        rows[cell.untested].append([name, visible(none.get(name, ""))])
    nothing, few = " nothing detectable in these texts", " too few texts for any test"
    return [
        *_clause(rows[False], ("shows", "show"), nothing, "Nothing found", columns),
        *_clause(rows[True], ("has", "have"), few, "Not tested", columns),
    ]
