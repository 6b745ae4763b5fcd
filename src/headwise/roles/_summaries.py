"""What became of each role, in words, and apart from roles: heads that are sinks or diffuse.

A sink takes much of the attention of every query whatever the text says. It is empty if the head
reads next to nothing there, weighted by the values; otherwise it broadcasts one message to all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headwise._display import counted, printable
from headwise.roles._rows import FOUND, NOT_FOUND, RULE_COLUMNS, TEXT, UNDECIDED, untested
from headwise.roles.evidence import FEWEST_TEXTS, LEVEL, NULLS, lift
from headwise.roles.relations import DIFFUSE, DIFFUSE_BESIDE_SINKS, PROBED, SHAPES, SINKS
from headwise.tables import Head

# The score of the best place among the candidates: the second one before the query, say.
PLACE = "null.offset"
_OF_SEQUENCES = {role.name for role in PROBED}
_UNREACHABLE = "not tested: these texts could not have shown it"
_NEAREST = 3  # roles just below the bar, and as many that were not tested
_BAR = 0.25  # of lift, for a sink
_MOST = 0.5  # of its attention, for what a head is said to do
EMPTY, BROADCASTING = "empty", "broadcasting"
_SHAPE_COLUMNS = (
    *("name", "stack", "layer", "head", "shape", "token", "attention", "ci_low", "ci_high"),
    *("value", "carries", "short", "long", "evenness", "evenness_beside_sinks"),
)


def none_found(rows: pd.DataFrame, unit: str) -> str:
    """Describe heads without a found role: none was found, or none was tested.

    Roles for which no text has a query are not mentioned.
    """
    tested: dict[str, bool] = {}
    texts: dict[str, int] = {}
    outcomes: dict[str, str] = {}
    columns = rows["role"], rows["p_adj"].notna(), rows["texts"], rows["outcome"]
    for role, was_tested, count, outcome in zip(*columns, strict=True):
        tested[role] = tested.get(role, False) or was_tested
        texts[role] = max(texts.get(role, 0), int(count))
        outcomes[role] = outcome
    undecided = [role for role in texts if not texts[role] and is_undecided(outcomes[role])]
    few = [count for role, count in texts.items() if count and not tested[role]]
    short = [count for count in few if count < FEWEST_TEXTS]
    beyond = len(few) - len(short)
    if not any(tested.values()):
        most = max(texts.values(), default=0)
        return _UNREACHABLE if beyond else untested(most, bool(undecided), unit)
    if not few and not undecided:
        return "no role found"
    line = f"no role found among {sum(tested.values())} tested"
    if short:
        line += f"; {len(short)} {untested(max(short), False, unit).replace(': ', ': at most ')}"
    line = f"{line}; {beyond} {_UNREACHABLE}" if beyond else line
    return f"{line}; {len(undecided)} {UNDECIDED.removesuffix(' for it')}" if undecided else line


def is_undecided(outcome: str) -> bool:
    """Whether a choice was not tested because every candidate is right, or every one wrong."""
    return outcome == UNDECIDED


def outcomes_by_role(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per role: its outcome over all heads, and the head that comes nearest to a label."""
    return pd.DataFrame(
        [_role_outcome(str(role), of) for role, of in rows.groupby("role", sort=False)]
    )


def _role_outcome(role: str, rows: pd.DataFrame) -> dict[str, Any]:
    having = rows[rows["found"]]
    tested = rows[rows["outcome"].isin((FOUND, NOT_FOUND))]
    shown = by_nearness(having if len(having) else tested if len(tested) else rows).iloc[0]
    outcome = FOUND if len(having) else NOT_FOUND if len(tested) else str(shown["outcome"])
    names = ["effect", "ci_low", "ci_high", "null", "baseline", "lift", "p_adj", "smallest"]
    names += ["control", "mass", "value", "n"]
    names += [name for name in (PLACE, *RULE_COLUMNS.values()) if name in rows]
    return (
        {"role": role, "outcome": outcome, "heads": len(having)}
        | {"nearest": shown["name"] if shown["effect"] == shown["effect"] else ""}
        | {name: shown[name] for name in names}
        | {"texts": shown["texts"], "stability": shown.get("stability", np.nan)}
    )


def shown_outcomes(outcomes: pd.DataFrame) -> pd.DataFrame:
    """The outcomes to show: of roles with a query, and of choices that no text can decide."""
    return outcomes[(outcomes["n"] > 0) | outcomes["outcome"].map(is_undecided)]


def by_nearness(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows from the one that comes nearest to a label down.

    A null that is always right leaves no lift: its heads are ordered by their distance to it.
    """
    nearness = rows["lift"].fillna(rows["effect"] - rows["baseline"])
    keys = rows.assign(nearness=nearness)[["nearness", "effect"]]
    order = keys.sort_values(["nearness", "effect"], ascending=False, kind="stable").index
    return rows.loc[order]


def explanations(
    rows: pd.DataFrame,
    shapes: pd.DataFrame,
    effects: Mapping[str, Sequence[str]],
    meanings: Mapping[str, str],
    unit: str,
) -> dict[str, str]:
    """The evidence for each head in `effects`, by name: its roles, its shape, what it just missed.

    Args:
        effects: For each head, what ablating it does, in lines.
        unit: What counts as a held-out text.
    """
    rows = by_nearness(rows[rows["name"].isin(set(effects))])
    of_heads = dict([*rows.groupby("name")])
    shape = {row["name"]: [row] for row in shapes.to_dict("records")}
    texts = {}
    for name, lines in effects.items():
        shown = _explanation(of_heads.get(name, rows[:0]), shape.get(name, []), meanings, unit)
        texts[name] = "\n".join([name, *shown, *(f"  {printable(line)}" for line in lines)])
    return texts


def _explanation(
    of_head: pd.DataFrame,
    shapes: Sequence[Mapping[Any, Any]],
    meanings: Mapping[str, str],
    unit: str,
) -> Iterator[str]:
    """The lines of one head, from its rows of roles and of shapes."""
    rows = of_head.to_dict("records")
    having = [row for row in rows if row["found"]]
    for row in having:
        counts = TEXT if row["role"] in _OF_SEQUENCES else unit  # which no group holds together
        yield from _evidence(row, printable(meanings[row["role"]]), counts)
    if not having:
        yield f"  {none_found(of_head, unit)}"
    for shape in shapes:
        yield f"  {shape_line(shape)}"
    missed = [row for row in rows if not row["found"] and row["p_adj"] == row["p_adj"]]
    missing = [
        row for row in rows if row["p_adj"] != row["p_adj"] and row["effect"] == row["effect"]
    ]
    for row in missed[:_NEAREST]:
        yield f"  not {printable(row['role'])}: {shortfall(row)}"
    undecided = [row for row in rows if is_undecided(row["outcome"])]
    for row in [*missing[:_NEAREST], *undecided]:
        yield f"  {printable(row['role'])}: {shortfall(row)}"


def _evidence(row: Mapping[Any, Any], meaning: str, unit: str) -> Iterator[str]:
    strong = "strongly" if row["lift"] >= 0.5 else "weakly"
    yield f"  {printable(row['label'])}, {strong}: {meaning}"
    yield (
        f"    {row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] over "
        f"{counted(int(row['n']), 'query', 'queries')} of "
        f"{counted(int(row['texts']), unit)} "
        f"({row['chosen_half']:.3f} on the other half)"
    )
    mass, value = (
        "unknown" if row[name] != row[name] else f"{row[name]:.3f}" for name in ("mass", "value")
    )
    yield f"    attention {mass}, weighted by value norm {value}"
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


def shortfall(row: Mapping[Any, Any]) -> str:
    """Why a head does not have a role: its score, the strongest null and the test."""
    if row["effect"] != row["effect"]:
        return printable(row["outcome"])
    null = printable(row["null"] or "no null")
    scores = f"{row['effect']:.3f} against {row['baseline']:.3f} of {null}"
    rules = rules_line(row)
    candidates = f"; candidates: {rules}" if rules else ""
    if row["p_adj"] != row["p_adj"]:
        return f"{scores}, {printable(row['outcome'])}{candidates}"
    if row["smallest"] == row["smallest"]:
        missing = f"; {row['smallest']:.3f} needed"
    else:
        missing = "; fails by p" if LEVEL <= row["p_adj"] < 1 else ""
    return (
        f"{scores}, lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}, "
        f"{row['chosen_half']:.3f} on the other half{missing}{candidates}"
    )


def rules_of(row: Mapping[Any, Any]) -> dict[str, float]:
    """What every rule among the candidates of a choice scores, by its name; none for other roles.

    Each is the share of the head's queries for which the rule chooses a right candidate.
    """
    columns = {**RULE_COLUMNS, "best place": PLACE}
    scores = {rule: float(row.get(column, np.nan)) for rule, column in columns.items()}
    known = any(scores[rule] == scores[rule] for rule in RULE_COLUMNS)
    return scores if known else {}


def rules_line(row: Mapping[Any, Any]) -> str:
    """`rules_of` as text; empty for roles that are no choice, such as pairs: see `null.…`."""
    return ", ".join(f"{rule} {score:.3f}" for rule, score in rules_of(row).items())


def is_shape(roles: pd.Series) -> pd.Series:
    """Which rows of a table are about a shape of attention and not about a role."""
    return roles.isin(SHAPES)


def shape_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per head that has a shape, from the rows of all tests."""
    shapes = []
    for name, of_head in rows[is_shape(rows["role"])].groupby("name", sort=False):
        by_role = {row["role"]: row for row in of_head.to_dict("records")}
        shape = _shape_of(by_role)
        if shape:
            first = next(iter(by_role.values()))
            place = {"name": name} | {key: first[key] for key in ("stack", "layer", "head")}
            shapes.append(place | shape)
    return pd.DataFrame(shapes, columns=list(_SHAPE_COLUMNS))


def _shape_of(by_role: Mapping[str, Mapping[Any, Any]]) -> dict[str, Any]:
    """The shape of one head; empty without one."""
    sinks = [by_role[token] for token in SINKS if token in by_role and by_role[token]["found"]]
    even = by_role.get(DIFFUSE)
    beside = by_role.get(DIFFUSE_BESIDE_SINKS)
    spread = beside if sinks else even
    parts = ["sink"] * bool(sinks) + ["diffuse"] * bool(spread is not None and spread["found"])
    if not parts:
        return {}
    shape: dict[str, Any] = {"shape": " + ".join(parts), "token": "", "carries": ""}
    shape["evenness"] = np.nan if even is None else even["effect"]
    shape["evenness_beside_sinks"] = np.nan if beside is None else beside["effect"]
    if sinks:
        sink = max(sinks, key=lambda row: row["effect"])
        shape["token"] = " and ".join(row["role"] for row in sinks)
        shape["attention"] = sink["effect"]
        shape |= {key: sink[key] for key in ("ci_low", "ci_high", "value")}
        shape |= {key: sink.get(key, np.nan) for key in ("short", "long")}
        shape["carries"] = _carries(sink)
    return shape


def main_roles(found: pd.DataFrame, shapes: pd.DataFrame) -> pd.DataFrame:
    """A row for each head whose attention mostly goes to a role: half of it, and not to a sink.

    Beating every null takes little attention: a head may have found roles, and still spend most of
    its attention elsewhere.

    Args:
        found: The rows of roles that heads have, from the largest lift down.
    """
    on_sink = found["name"].map(shapes.set_index("name")["attention"]).fillna(0.0)
    is_most = found["effect"] >= np.maximum(on_sink.astype(float), _MOST)
    return found[is_most].drop_duplicates("name")


def categories_of(found: pd.DataFrame, shapes: pd.DataFrame) -> dict[Head, tuple[str, float]]:
    """The role that a map of heads shows, and its lift; 0 where a sink takes most instead."""
    main = main_roles(found, shapes)
    weak = found[~found["name"].isin(main["name"])].drop_duplicates("name")
    beside = weak["name"].isin(shapes["name"])
    shown = pd.concat([main, weak.assign(lift=weak["lift"].where(~beside, 0.0))])
    rows = shown.sort_index().to_dict("records")
    return {Head.parse(row["name"]): (row["role"], row["lift"]) for row in rows}


def _carries(sink: Mapping[Any, Any]) -> str:
    """Whether the sink would be one weighted by the values; "" where values are unknown."""
    value, baseline = sink["value"], sink["baseline"]
    if value != value:
        return ""
    reaches = lift(np.array([value]), np.array([baseline]))[0] >= _BAR
    return BROADCASTING if reaches else EMPTY


def shape_line(row: Mapping[Any, Any]) -> str:
    """A sentence part that describes the shape of a head with its numbers."""
    parts = [row["shape"]]
    if row["attention"] == row["attention"]:
        carried = f", {row['value']:.2f} weighted by value norm" if row["carries"] else ""
        parts.append(
            f"{row['attention']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] of its attention "
            f"on the {row['token']}{carried}" + (f" ({row['carries']})" if carried else "")
        )
        if row["short"] == row["short"]:
            parts.append(
                f"{row['short']:.2f} in the shortest third of the texts, {row['long']:.2f} in "
                f"the longest"
            )
    if "diffuse" in row["shape"]:
        beside = row["attention"] == row["attention"]
        evenness = row["evenness_beside_sinks" if beside else "evenness"]
        where = " beside the sink" if beside else ""
        parts.append(f"{evenness:.2f} of the entropy of uniform attention{where}")
    return f"{parts[0]}: {'; '.join(parts[1:])}"


def shapes_summary(shapes: pd.DataFrame) -> str:
    """How many heads are sinks and how many diffuse, in a clause; empty without any."""
    is_sink = shapes["shape"].str.contains("sink")
    diffuse = shapes["shape"].str.contains("diffuse")
    parts = []
    if is_sink.any():
        empty, known = (shapes["carries"] == EMPTY).sum(), (shapes["carries"] != "").sum()
        of_which = f", {empty} of them empty by value" if known else ""
        are = "is a sink" if is_sink.sum() == 1 else "are sinks"
        parts.append(f"{counted(int(is_sink.sum()), 'head')} {are}{of_which}")
    if diffuse.any():
        parts.append(
            f"{counted(int(diffuse.sum()), 'head')} "
            f"{'attends' if diffuse.sum() == 1 else 'attend'} diffusely"
        )
    return "; ".join(parts)


def signs_of(shapes: pd.DataFrame) -> dict[Head, tuple[str, str]]:
    """The sign of each sink and diffuse head on a map of heads, and what it means."""
    return {
        Head.parse(row["name"]): ("○", "sink") if "sink" in row["shape"] else ("≈", "diffuse")
        for row in shapes.to_dict("records")
    }
