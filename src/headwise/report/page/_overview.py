"""The overview of a study: a sentence with counts, the evidence for each, a map of the heads."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise._display import counted
from headwise.report._study_data import StudyData
from headwise.report.page._pictures import HeadCell, HeadMap, head_maps, tint
from headwise.report.page._role_table import interval_text
from headwise.report.page._visible_text import digits, visible
from headwise.roles import Roles, shown_outcomes, signs_of
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
    """A count in the sentence, and the table that it opens.

    Attributes:
        before: Words before the count, including a space.
        after: Words after the count.
        title: The title of the table.
        columns: The titles of its columns.
        rows: Its rows; the first cell is a head if `of_heads`.
    """

    count: int
    after: str
    title: str
    before: str = ""
    columns: tuple[str, ...] = _EVIDENCE
    rows: Sequence[Sequence[str]] = ()
    of_heads: bool = True


@dataclass(frozen=True)
class Mark:
    """A role in the legend: its hue, its letter, and how many heads have it as their strongest."""

    name: str
    letter: str
    color: str
    heads: int


@dataclass(frozen=True)
class Overview:
    """What the page shows first."""

    lead: str
    clauses: list[Clause]
    marks: list[Mark]
    maps: list[HeadMap]


def overview(study: StudyData) -> Overview | None:
    """The overview; None if the study did not look for roles."""
    roles = study.roles
    if roles is None:
        return None
    # The strongest role of each head.
    strongest = roles.found().drop_duplicates("name").to_dict("records")
    counts = Counter(row["label"] for row in strongest)
    marks = category_marks([name for name, _ in counts.most_common()])
    states = _states(roles)
    cells = {
        row["name"]: HeadCell(
            tint(marks[row["label"]][0], row["lift"]),
            marks[row["label"]][1],
            visible(f"{row['label']}, lift {row['lift']:.2f}"),
        )
        for row in strongest
    }
    return Overview(
        lead=f"Of {counted(len(study.table.heads), 'head')}, ",
        clauses=[
            *_role_clauses(roles, counts),
            *_shape_clauses(roles),
            *_removal_clause(study.curves),
            *_nothing_clauses(roles, set(cells), states),
            *_untested_clause(roles),
        ],
        marks=[Mark(visible(name), *marks[name][::-1], counts[name]) for name in marks],
        maps=head_maps(study.table.heads, states | cells),
    )


def _untested_clause(roles: Roles) -> list[Clause]:
    """The roles that no head was tested for, if some head was tested for another role."""
    outcomes = shown_outcomes(roles.outcomes())[["role", "outcome"]]
    untested = outcomes[outcomes["outcome"].str.startswith("not tested")]
    if len(untested) in (0, len(outcomes)):
        return []
    rows = [[visible(text) for text in row] for row in untested.to_numpy()]
    after = f"of {counted(len(outcomes), 'role')} could not be tested on these texts"
    columns = ("Role", "Outcome")
    return [Clause(len(rows), after, "Roles not tested", "", columns, rows, of_heads=False)]


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


def _role_clauses(roles: Roles, counts: Mapping[str, int]) -> list[Clause]:
    strongest = roles.found().drop_duplicates("name")
    clauses = []
    for label in counts:
        having = strongest[strongest["label"] == label].to_dict("records")
        verb = "looks" if len(having) == 1 else "look"
        after = f"{verb} {_target(label)}"
        clauses.append(
            Clause(
                len(having), visible(after), visible(label), rows=[_evidence(row) for row in having]
            )
        )
    clauses.sort(key=lambda clause: -clause.count)
    unnamed = clauses[_NAMED:]
    if not unnamed:
        return clauses
    total = sum(clause.count for clause in unnamed)
    rows = [row for clause in unnamed for row in clause.rows]
    verb = "has" if total == 1 else "have"
    more = Clause(total, f"{verb} other roles", "Other roles", rows=rows)
    return [*clauses[:_NAMED], more]


def _target(label: str) -> str:
    """Where a head with a role looks, after "look"."""
    offset = re.fullmatch(r"offset ([+-])(\d+)", label)
    if offset is not None:
        return f"{offset[2]} tokens {'ahead' if offset[1] == '+' else 'back'}"
    return _PHRASES.get(label, f"for “{label}”")


def _evidence(row: Mapping[Any, Any]) -> list[str]:
    return [
        visible(row["name"]),
        interval_text(row),
        visible(f"{digits(row['baseline'])} of {row['null']}"),
        f"{row['n']:,.0f} in {counted(int(row['texts']), 'text')}",
    ]


def _shape_clauses(roles: Roles) -> list[Clause]:
    shapes = roles.shapes()
    columns: tuple[str, ...] = ("Head", "Attention on the sink", "Weighted by value", "Sink")
    sinks = shapes[shapes["shape"].str.contains("sink")].to_dict("records")
    clauses = []
    if sinks:
        empty = sum(row["carries"] == "empty" for row in sinks)
        are = "is a sink" if len(sinks) == 1 else "are sinks"
        take = "takes" if empty == 1 else "take"
        known = any(row["carries"] for row in sinks)
        which = "all of which take" if empty == len(sinks) > 1 else f"of which {empty} {take}"
        of_which = f", {which} next to nothing from it" if known else ""
        rows = [
            [row["name"], _attention(row), digits(row["value"]), visible(row["token"])]
            for row in sinks
        ]
        clauses.append(Clause(len(sinks), f"{are}{of_which}", "Sinks", "", columns, rows))
    spread = shapes[shapes["shape"].str.contains("diffuse")].to_dict("records")
    if spread:
        attend = "attends" if len(spread) == 1 else "attend"
        rows = [
            [
                row["name"],
                digits(row["evenness_beside_sinks" if "sink" in row["shape"] else "evenness"]),
            ]
            for row in spread
        ]
        columns = ("Head", "Share of the entropy of even attention")
        after = f"{attend} to all tokens almost alike"
        clauses.append(Clause(len(spread), after, "Diffuse heads", "", columns, rows))
    return clauses


def _attention(row: Mapping[Any, Any]) -> str:
    return f"{digits(row['attention'])} [{digits(row['ci_low'])}, {digits(row['ci_high'])}]"


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
    return [Clause(int(curves.removed[last]), after, title, "", columns, rows, of_heads=False)]


def _nothing_clauses(
    roles: Roles, with_role: set[str], states: Mapping[str, HeadCell]
) -> list[Clause]:
    without = [name for name, cell in states.items() if name not in with_role and not cell.letter]
    groups = (
        (False, "nothing found that these texts could show", "Nothing found"),
        (True, "not tested, for lack of texts", "Not tested"),
    )
    none = roles.none_found_by_head()
    clauses = []
    for untested, after, title in groups:
        names = [name for name in without if states[name].untested == untested]
        if names:
            rows = [[name, visible(none.get(name, ""))] for name in names]
            columns = ("Head", "Tested")
            clauses.append(Clause(len(names), after, title, "for ", columns, rows))
    return clauses
